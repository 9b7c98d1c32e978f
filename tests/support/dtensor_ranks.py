"""Four gloo ranks that save DTensors and their full tensors: `python dtensor_ranks.py FOLDER
SEED`.
"""

from __future__ import annotations

import os
import random
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

RANKS = 4
FULL = StateDictOptions(full_state_dict=True)


class Net(nn.Module):
    """Uneven rows, and buffers."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(3, hidden)
        self.norm = nn.BatchNorm1d(hidden)
        self.down = nn.Linear(hidden, 5, bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.down(self.norm(self.up(x)))


def tensors(seed: int) -> dict[str, DTensor]:
    """Return DTensors of random shapes and placements, on one- and two-dimensional meshes."""
    draw = random.Random(seed)
    meshes = [init_device_mesh("cpu", shape) for shape in ((4,), (2, 2), (1, 4), (4, 1))]
    made = {}
    for number in range(12):
        shape = [draw.choice((0, 1, 2, 3, 5, 6, 8)) for _ in range(draw.randint(1, 3))]
        whole = torch.arange(
            torch.Size(shape).numel(),
            dtype=draw.choice((torch.float32, torch.bfloat16, torch.int64)),
        )
        mesh = draw.choice(meshes)
        cuts = [Replicate(), *(Shard(dim) for dim in range(len(shape)))]
        made[f"t{number}"] = distribute_tensor(
            whole.reshape(shape), mesh, [draw.choice(cuts) for _ in range(mesh.ndim)]
        )
    return made


def trained(kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model after two steps: FSDP2, HSDP, or FSDP2 on top of tensor parallelism."""
    torch.manual_seed(0)
    model = Net(6 if kind == "tp" else 7)
    if kind == "fsdp":
        fully_shard(model.up, mesh=init_device_mesh("cpu", (RANKS,)))
        fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)))
    else:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
        if kind == "tp":
            model.norm = nn.Identity()  # type: ignore[assignment]
            parallelize_module(
                model, mesh["model"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
            )
        fully_shard(model, mesh=mesh["data"] if kind == "tp" else mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.arange(12.0).reshape(4, 3)).square().sum().backward()
        optimizer.step()
    return model, optimizer


def whole(value: Any) -> Any:
    """Return the value with every DTensor replaced by its full tensor."""
    if isinstance(value, dict):
        return {key: whole(item) for key, item in value.items()}
    if isinstance(value, list):
        return [whole(item) for item in value]
    return value.full_tensor() if isinstance(value, DTensor) else value


def _save(rank: int, folder: Path, name: str, state: Any) -> None:
    torch.save(state, folder / f"{name}_{rank}.pt")
    full = whole(state)
    if rank == 0:
        torch.save(full, folder / f"full-{name}.pt")


def _load_again(rank: int, folder: Path) -> None:
    """Load a DCP folder that ckpttool wrote from FSDP2 shards, on a different mesh."""
    if rank == 0:
        from command import main

        assert main(["remap", f"{folder}/fsdp-named_?.pt", "-o", f"{folder}/again.dcp"]) == 0
    dist.barrier()
    model, optimizer = trained("hsdp")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=f"{folder}/again.dcp")
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    weights, state = get_state_dict(model, optimizer, options=FULL)
    if rank == 0:
        torch.save({"model": weights, "optimizer": state}, folder / "again.pt")


def _run(rank: int, folder: str, seed: int) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS
    )
    place = Path(folder)
    _save(rank, place, "drawn", {"model": tensors(seed), "epoch": 3, "args": {"lr": 0.1}})
    for kind in ("fsdp", "hsdp", "tp"):
        model, optimizer = trained(kind)
        _save(
            rank,
            place,
            kind,
            {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 2},
        )
        if kind != "tp":
            weights, named = get_state_dict(model, optimizer)
            _save(rank, place, f"{kind}-named", {"model": weights, "optimizer": named})
    _load_again(rank, place)
    mesh = init_device_mesh("cpu", (RANKS,))
    part = DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False)
    torch.save({"w": part}, place / f"partial_{rank}.pt")
    other = mesh if rank != 1 else init_device_mesh("cpu", (RANKS,))
    cut = [Shard(0)] if rank != 1 else [Shard(1)]
    torch.save(
        {"w": DTensor.from_local(torch.ones(4, 4), other, cut, run_check=False)},
        place / f"differing_{rank}.pt",
    )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # forked, so that torch is imported only once
    mp.start_processes(_run, (sys.argv[1], int(sys.argv[2])), nprocs=RANKS, start_method="fork")
