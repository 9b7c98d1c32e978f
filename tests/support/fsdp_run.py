"""Real FSDP1 runs on gloo and the CPU: the files of every rank, and the full state dict that FSDP
gathers.

``python tests/support/fsdp_run.py FOLDER WORLD_SIZE...`` trains the same model with and without
original parameters, for each world size in FOLDER/WORLD_SIZE.
"""

from __future__ import annotations

import os
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

GROUPS = 3  # from this world size on the optimizer has two param groups, and names


class Mlp(nn.Module):
    """An FSDP unit inside another unit."""

    def __init__(self, hidden: int = 5) -> None:
        super().__init__()
        self.up = nn.Linear(3, hidden)
        self.down = nn.Linear(hidden, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


class Block(nn.Module):
    """A unit with parameters before and after the nested one, and buffers."""

    def __init__(self, hidden: int = 5) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.mlp = Mlp(hidden)
        self.norm = nn.LayerNorm(3)
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("mask", torch.ones(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += x.detach().sum()  # every rank sees different data
        return x + self.norm(self.mlp(x * self.scale)) * self.mask


class Net(nn.Module):
    """Direct parameters, two units, and tied weights."""

    def __init__(self, hidden: int = 5, layers: int = 2) -> None:
        super().__init__()
        self.emb = nn.Embedding(7, 3)
        self.layers = nn.ModuleList(Block(hidden) for _ in range(layers))
        self.head = nn.Linear(3, 7)
        self.head.weight = self.emb.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.emb(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def _wrapped(seed: int, original: bool):
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    torch.manual_seed(seed)
    policy = ModuleWrapPolicy({Block, Mlp})
    return FSDP(
        Net(), auto_wrap_policy=policy, device_id=torch.device("cpu"), use_orig_params=original
    )


def _optimizer(
    model: nn.Module, world_size: int, inside: str = "layers", named: bool = True
) -> torch.optim.Optimizer:
    """Use two param groups if there are `GROUPS` ranks: parameters with `inside` in their names,
    and all others.
    """
    if world_size < GROUPS:
        return torch.optim.AdamW(model.parameters(), lr=0.01)
    groups: list[dict[str, Any]] = [{"params": []}, {"params": [], "weight_decay": 0.0}]
    for name, parameter in model.named_parameters():
        groups[inside not in name]["params"].append((name, parameter) if named else parameter)
    return torch.optim.AdamW(groups, lr=0.01)


def by_layers(model: nn.Module) -> torch.optim.Optimizer:
    """Create the optimizer from the model before it is wrapped."""
    return _optimizer(model, GROUPS)


def by_first_layer(model: nn.Module) -> torch.optim.Optimizer:
    """Create an optimizer whose param groups cannot be inferred from parameter sizes."""
    return _optimizer(model, GROUPS, "layers.0")


def _full(model: nn.Module, optimizer: torch.optim.Optimizer, average: nn.Module) -> dict:
    """Return the full state dicts that FSDP gathers from all ranks.

    Offload is off: on the CPU with original parameters, the offloaded tensor is a view of a reused
    buffer, so that ``exp_avg`` would hold the values of ``exp_avg_sq`` (torch 2.13).
    """
    from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig, StateDictType
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    kinds = (
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(),
        FullOptimStateDictConfig(offload_to_cpu=False),
    )
    with FSDP.state_dict_type(model, *kinds), FSDP.state_dict_type(average, *kinds):
        optimized = FSDP.optim_state_dict(model, optimizer)
        return {"model": model.state_dict(), "optimizer": optimized, "ema": average.state_dict()}


def _saved(
    model: nn.Module, optimizer: torch.optim.Optimizer, average: nn.Module, sharded: bool = False
) -> dict:
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp import StateDictType

    kind = StateDictType.SHARDED_STATE_DICT if sharded else StateDictType.LOCAL_STATE_DICT
    with FSDP.state_dict_type(model, kind), FSDP.state_dict_type(average, kind):
        optimized = FSDP.optim_state_dict(model, optimizer) if sharded else optimizer.state_dict()
        return {"model": model.state_dict(), "optimizer": optimized, "ema": average.state_dict()}


def _train(rank: int, world_size: int, folder: str, original: bool, inside: str = "") -> None:
    """Train; if `inside` is given, the optimizer has no names."""
    model, average = _wrapped(0, original), _wrapped(2, original)
    optimizer = _optimizer(model, world_size, inside or "layers", named=not inside)
    for step in range(2):
        optimizer.zero_grad()
        model(torch.arange(4) + (rank + step) % 3).square().sum().backward()
        optimizer.step()
    kind = ("original" if original else "flat") + inside
    torch.save(_saved(model, optimizer, average), f"{folder}/{kind}_rank_{rank}.pt")
    if not original and not inside:
        torch.save(
            _saved(model, optimizer, average, sharded=True), f"{folder}/sharded_rank_{rank}.pt"
        )
    full = _full(model, optimizer, average)
    if rank == 0:
        torch.save(full, f"{folder}/{kind}_full.pt")


def _run(rank: int, world_size: int, folder: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size
    )
    for original in (False, True):
        _train(rank, world_size, folder, original)
        for inside in ("layers", "layers.0") if world_size >= GROUPS else ():
            _train(rank, world_size, folder, original, inside)
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch.distributed.fsdp

    for size in sys.argv[2:]:  # forked, so that torch is imported only once
        folder = f"{sys.argv[1]}/{size}"
        os.mkdir(folder)
        mp.start_processes(_run, (int(size), folder), nprocs=int(size), start_method="fork")
