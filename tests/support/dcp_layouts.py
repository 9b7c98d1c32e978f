"""Gloo ranks that save a trained model with torch.distributed.checkpoint in several layouts, and
load it in others.

`python dcp_layouts.py FOLDER SAVERS LOADERS LAYOUT...` saves with SAVERS ranks, converts with
ckpttool, loads with LOADERS ranks, and writes ``found.json``: for each conversion and load, the
keys whose values differ from torch's.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

LAYOUTS = sys.argv[4:]
WIDTH = 8


class Net(nn.Module):
    """Layers that a pipeline stage can run alone, uneven rows, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt = nn.Parameter(torch.randn(5, WIDTH))
        self.layers = nn.ModuleDict({str(number): nn.Linear(WIDTH, WIDTH) for number in range(4)})
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.layers.values():
            x = layer(x)
        return self.norm(x) if self.prompt is None else self.norm(x) + self.prompt.sum(0)


def build(layout: str) -> nn.Module:
    model, ranks = Net(), dist.get_world_size()
    if layout == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if layout == "pipeline":
        rank = dist.get_rank()
        for number in range(4):
            if number * ranks // 4 != rank:
                del model.layers[str(number)]
        if rank:
            model.prompt = None  # type: ignore[assignment]
        if rank != ranks - 1:
            model.norm = nn.Identity()  # type: ignore[assignment]
        return model
    shape = {
        "fsdp": (ranks,),
        "tp": (ranks,),
        "hsdp": (2, ranks // 2),
        "fsdp of tp": (ranks // 2, 2),
    }[layout]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner")[: len(shape)])
    if "tp" in layout:
        styles: Any = {
            f"layers.{number}": RowwiseParallel() if number % 2 else ColwiseParallel()
            for number in range(4)
        }
        parallelize_module(model, mesh if layout == "tp" else mesh["inner"], styles)
    if "fsdp" in layout or layout == "hsdp":
        over = mesh["outer"] if "tp" in layout else mesh
        for layer in model.layers.values():
            fully_shard(layer, mesh=over)
        fully_shard(model, mesh=over)
    return model


def trained(layout: str, seed: int) -> dict[str, Any]:
    """Return the state that torch would save, after one step."""
    torch.manual_seed(seed)
    model = build(layout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * seed, foreach=False)
    model(torch.randn(8, WIDTH)).square().mean().backward()
    optimizer.step()
    weights, state = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": state}


def flat(state: Any, way: str = "") -> dict[str, Any]:
    if not isinstance(state, dict):
        whole = state.full_tensor() if isinstance(state, DTensor) else state
        return {way: whole.detach() if isinstance(whole, torch.Tensor) else whole}
    return {
        key: value
        for name, item in state.items()
        for key, value in flat(item, f"{way}/{name}").items()
    }


def differing(expected: dict[str, Any], actual: dict[str, Any]) -> list[str]:
    return [
        key
        for key in expected.keys() | actual.keys()
        if not same(expected.get(key), actual.get(key))
    ]


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    return type(left) is type(right) and bool(left == right)


def save(folder: Path) -> None:
    for layout in LAYOUTS:
        dcp.save(trained(layout, 1), checkpoint_id=folder / layout)


def load(folder: Path) -> None:
    """Load ckpttool's folders into every layout with this number of ranks, the saved layout and the
    others.
    """
    found: dict[str, list[str]] = {}
    for layout in LAYOUTS:
        for source in (layout, LAYOUTS[LAYOUTS.index(layout) - 1]):
            expected = flat(torch.load(folder / f"{source}.torch.pt", weights_only=False))
            state = trained(layout, 2)
            dcp.load(state, checkpoint_id=folder / f"{source}.again.dcp")
            actual = flat(state)
            if layout == "pipeline":  # a stage loads its own tensors
                expected = {key: value for key, value in expected.items() if key in actual}
            if "pipeline" in (layout, source):  # each stage saves its own param groups as group 0
                del expected["/optimizer/param_groups"], actual["/optimizer/param_groups"]
            found[f"{source} as {layout}"] = differing(expected, actual)
    (folder / f"loaded-{dist.get_rank()}.json").write_text(json.dumps(found))


def convert(folder: Path) -> dict[str, list[str]]:
    """Convert every folder with ckpttool in both directions, and compare with torch's own
    conversions.
    """
    from command import main

    found = {}
    for layout in LAYOUTS:
        source, by_torch, out, again = (
            folder / f"{layout}{end}" for end in ("", ".torch.pt", ".pt", ".again.dcp")
        )
        dcp_to_torch_save(source, by_torch)
        rule = ("--rule", "{x*} => net.{x*}")
        commands = (
            ("remap", source, "-o", out, "--verify"),
            ("remap", out, "-o", again, "--verify"),
            ("remap", source, "-o", folder / f"{layout}.renamed.dcp", *rule),
            (
                "remap",
                folder / f"{layout}.renamed.dcp",
                "-o",
                folder / f"{layout}.back.pt",
                *rule,
                "--reverse",
            ),
            ("diff", source, again, "--values", "--whole"),
        )
        failed = [" ".join(map(str, words)) for words in commands if main([*map(str, words)])]
        torch_save_to_dcp(by_torch, folder / f"{layout}.torch.dcp")
        for name in ("torch.dcp", "again.dcp"):
            dcp_to_torch_save(folder / f"{layout}.{name}", folder / f"{layout}.{name}.pt")
        expected, *made = (
            flat(torch.load(folder / f"{layout}.{name}", weights_only=False))
            for name in ("torch.pt", "pt", "back.pt", "again.dcp.pt", "torch.dcp.pt")
        )
        found[layout] = failed + [key for one in made for key in differing(expected, one)]
    return found


def _run(rank: int, job: Callable[[Path], None], folder: Path, ranks: int) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    store = folder / f"store-{job.__name__}"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    job(folder)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # torch's own threads sometimes abort a process that ends while the machine is busy


def start(job: Callable[[Path], None], folder: Path, ranks: int) -> None:
    # forked, so that torch is imported only once
    mp.start_processes(_run, (job, folder, ranks), nprocs=ranks, start_method="fork")


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    place = Path(sys.argv[1])
    start(save, place, int(sys.argv[2]))
    result = convert(place)
    start(load, place, int(sys.argv[3]))
    for path in place.glob("loaded-*.json"):
        for name, wrong in json.loads(path.read_text()).items():
            result.setdefault(name, []).extend(wrong)
    (place / "found.json").write_text(json.dumps(result))
