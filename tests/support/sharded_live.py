"""Gloo ranks that swap weights into live sharded modules: `python sharded_live.py FOLDER` writes
what went wrong.

The oracle is torch: a module of the same kind that was built with the new weights has the same
outputs, and after one more step of training the same weights.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from ckpttool import Refused, swap_weights

Build = Callable[[int], Any]
Weights = dict[str, torch.Tensor]
LAST = ("nothing", "forward", "eval", "step", "unshard", "async")


@dataclass(frozen=True)
class Kind:
    """How to build a module from a seed, its full weights, and whether its state dict holds
    DTensors.
    """

    title: str
    build: Build
    whole: Callable[[int], Weights]
    is_sharded: bool = True


def net(seed: int, tied: bool = False) -> Any:
    """Build a network with uneven rows; `tied`: one weight has two names."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 5), nn.LayerNorm(5), nn.Linear(5, 5, bias=False)
    )
    if tied:
        model[4].weight = model[2].weight
    return model


def fsdp2(
    shape: tuple[int, ...], reshard: bool, half: bool, tied: bool, columns: bool = False
) -> Build:
    def build(seed: int) -> nn.Module:
        names = ("replicate", "shard")[-len(shape) :]
        chosen: dict[str, Any] = {
            "reshard_after_forward": reshard,
            "mesh": init_device_mesh("cpu", shape, mesh_dim_names=names),
        }
        if half:
            chosen["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        if columns:
            chosen["shard_placement_fn"] = lambda p: (
                Shard(1) if p.shape[-1] % shape[-1] == 0 and p.ndim > 1 else Shard(0)
            )
        model = net(seed, tied)
        if not tied:
            for layer in (model[0], model[2]):
                fully_shard(layer, **chosen)
        return fully_shard(model, **chosen)

    return build


def fsdp1(original: bool, half: bool) -> Build:
    def build(seed: int) -> nn.Module:
        kinds = MixedPrecision(param_dtype=torch.bfloat16) if half else None
        chosen: dict[str, Any] = {
            "device_id": torch.device("cpu"),
            "use_orig_params": original,
            "mixed_precision": kinds,
        }
        model = net(seed)
        model[0] = FullyShardedDataParallel(model[0], **chosen)
        return FullyShardedDataParallel(model, **chosen)

    return build


def parallel(seed: int) -> Any:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4))
    return parallelize_module(
        model,
        init_device_mesh("cpu", (dist.get_world_size(),)),
        {"0": ColwiseParallel(), "2": RowwiseParallel()},
    )


def kinds(ranks: int) -> Iterator[Kind]:
    shapes: list[tuple[int, ...]] = [(ranks,), (1, ranks), (ranks, 1)]
    for number, (reshard, half, tied) in enumerate(itertools.product((False, True), repeat=3)):
        shape, whole = shapes[number % 3], partial(_plain, tied)
        yield Kind(
            f"fully_shard {shape} {reshard=} {half=} {tied=}",
            fsdp2(shape, reshard, half, tied),
            whole,
        )
    plain = partial(_plain, False)
    yield Kind("fully_shard, columns", fsdp2((ranks,), True, False, False, columns=True), plain)
    yield Kind("FSDP1", fsdp1(False, False), plain, False)
    yield Kind("FSDP1, original parameters, half", fsdp1(True, True), plain, False)
    yield Kind(
        "tensor parallel",
        parallel,
        lambda seed: {k: v.full_tensor() for k, v in parallel(seed).state_dict().items()},
    )
    yield Kind("DDP", lambda seed: DistributedDataParallel(net(seed)), plain, False)


def _plain(tied: bool, seed: int) -> Weights:
    return net(seed, tied).state_dict()


def prepared(build: Build, last: str, x: torch.Tensor) -> tuple[Any, torch.optim.Optimizer]:
    """Return a module with other weights that has just done what `last` says."""
    model: Any = build(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if last in ("forward", "step"):
        loss = model(x).sum()
        if last == "step":
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    elif last == "eval":
        with torch.no_grad():
            model(x)
    elif hasattr(model, "unshard") and last != "nothing":
        model.unshard(async_op=last == "async")
    return model, optimizer


def wrong(kind: Kind, last: str, form: str, in_place: bool) -> str:
    """Swap in copies of the new weights, full or as this rank's DTensors.

    Return how the module differs from one that was built with these weights, or an empty string.
    """
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    model, optimizer = prepared(kind.build, last, x)
    weights = kind.build(2).state_dict() if form == "sharded" else kind.whole(2)
    try:
        swap_weights(
            model,
            {key: value.detach().clone() for key, value in weights.items()},
            in_place=in_place,
        )
    except Refused as refused:
        return (
            ""
            if not in_place and "in_place=True, which works" in refused.hint
            else (f"refused: {refused}")
        )
    fresh = kind.build(2)
    of_fresh = torch.optim.SGD(fresh.parameters(), lr=0.1)
    if not torch.equal(model(x), fresh(x)):
        return "different outputs"
    if not in_place:
        return ""
    for own, steps in ((model, optimizer), (fresh, of_fresh)):
        own(x).sum().backward()
        steps.step()
    return "" if torch.equal(model(x), fresh(x)) else "different outputs after a step"


def _run(rank: int, ranks: int, folder: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/{ranks}", rank=rank, world_size=ranks
    )
    found = {}
    for number, kind in enumerate(kinds(ranks)):
        chosen = LAST if "CKPTTOOL_SEEDS" in os.environ else LAST[(number + ranks) % 2 :: 2]
        forms = itertools.cycle(("sharded", "full") if kind.is_sharded else ("full",))
        for last, form in zip(chosen, forms):
            for in_place in (True, False) if last == chosen[0] else (True,):
                found[f"{kind.title}; {last}; {form}; {in_place=}"] = wrong(
                    kind, last, form, in_place
                )
            dist.barrier()
    Path(folder, f"found-{ranks}-{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    for ranks in (1, 2):  # forked, so that torch is imported only once
        mp.start_processes(_run, (ranks, sys.argv[1]), nprocs=ranks, start_method="fork")
