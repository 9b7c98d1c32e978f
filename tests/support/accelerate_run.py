"""Two gloo ranks that save FSDP checkpoints with accelerate, and load the files that ckpttool
writes from them.

`python accelerate_run.py FOLDER`: FOLDER gets a folder for each of `KINDS`, and a file `KIND.pt`
with the full model and optimizer. Then a fresh run loads `again`, which ckpttool wrote from one of
these folders, and saves the full state as ``loaded.pt``. Accelerate enables FSDP only on
accelerators, so this script does that; accelerate saves and loads.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

KINDS = ("1 SHARDED_STATE_DICT", "1 LOCAL_STATE_DICT", "2 SHARDED_STATE_DICT", "2 FULL_STATE_DICT")
LOADED = "2 SHARDED_STATE_DICT"


class Net(nn.Module):
    """Rows that two ranks do not divide evenly, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(3, 7), nn.Linear(7, 3)
        self.register_buffer("seen", torch.ones(2))

    def forward(self, x: torch.Tensor) -> Any:
        return self.down(self.up(x).relu())


def _run(rank: int, folder: Path) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    for kind in KINDS:
        _save(accelerator, kind, folder)
    if rank == 0:
        _write_again(folder)
    dist.barrier()
    _load(accelerator, folder)
    dist.destroy_process_group()


def _plugin(kind: str) -> Any:
    from accelerate.utils import FullyShardedDataParallelPlugin

    version, form = kind.split()
    return FullyShardedDataParallelPlugin(
        fsdp_version=int(version), state_dict_type=form, cpu_ram_efficient_loading=False
    )


def _save(accelerator: Any, kind: str, folder: Path) -> None:
    from accelerate.checkpointing import save_accelerator_state
    from accelerate.utils import fsdp_utils

    model, optimizer, scheduler = _trained(kind, 2)
    plugin, place = _plugin(kind), str(folder / kind)
    fsdp_utils.save_fsdp_model(plugin, accelerator, model, place)
    fsdp_utils.save_fsdp_optimizer(plugin, accelerator, optimizer, model, place)
    save_accelerator_state(place, [], [], [scheduler], [], dist.get_rank(), 0)
    _save_whole(model, optimizer, folder / f"{kind}.pt")


def _write_again(folder: Path) -> None:
    from command import main

    (folder / "again").mkdir()
    for part, other in (("pytorch_model_fsdp_0", "optimizer"), ("optimizer_0", "model")):
        out = str(folder / "again" / part / ".metadata")
        assert main(["remap", str(folder / f"{LOADED}.pt"), "--drop", other, "-o", out]) == 0


def _load(accelerator: Any, folder: Path) -> None:
    from accelerate.utils import fsdp_utils

    model, optimizer, _ = _trained(LOADED, 1)
    plugin, place = _plugin(LOADED), str(folder / "again")
    fsdp_utils.load_fsdp_model(plugin, accelerator, model, place)
    fsdp_utils.load_fsdp_optimizer(plugin, accelerator, optimizer, model, place)
    _save_whole(model, optimizer, folder / "loaded.pt")


def _save_whole(model: nn.Module, optimizer: torch.optim.Optimizer, out: Path) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    weights, state = get_state_dict(
        model, optimizer, options=StateDictOptions(full_state_dict=True)
    )
    if dist.get_rank() == 0:
        torch.save({"model": weights, "optimizer": state}, out)
    dist.barrier()


def _trained(kind: str, steps: int) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    torch.manual_seed(steps)
    model: nn.Module = Net()
    if kind.startswith("1"):
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    else:
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.arange(12.0).reshape(4, 3)).square().sum().backward()
        optimizer.step()
        scheduler.step()
    return model, optimizer, scheduler


if __name__ == "__main__":
    import socket

    import accelerate.checkpointing  # noqa: F401
    import torch.distributed.fsdp

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ.update(
            MASTER_PORT=str(free.getsockname()[1]),
            GLOO_SOCKET_IFNAME="lo",
            ACCELERATE_USE_CPU="true",
        )
    # forked, so that torch is imported only once
    mp.start_processes(_run, (Path(sys.argv[1]),), nprocs=2, start_method="fork")
