"""The files that are measured: one model in every format, its program, and indexes of many keys."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

TENSORS = 290  # as many as a 7-billion-parameter Llama has
MANY = 100_000


def make(folder: Path, gib: float, words: str) -> None:
    """Make the files that `words` names in another process: measured processes do not inherit its
    memory.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pid = os.fork()
    if pid == 0:
        _make(folder, gib, words)
        os._exit(0)
    if os.waitpid(pid, 0)[1]:
        sys.exit("the files could not be made")


def _make(folder: Path, gib: float, words: str) -> None:
    import torch
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import save_file
    from torch import nn

    class Tower(nn.Module):
        def __init__(self, side: int) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(side, side, bias=False) for _ in range(TENSORS))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = x + layer(x)
            return x

    side = int((gib * 2**30 / TENSORS / 4) ** 0.5)
    torch.manual_seed(0)
    model = Tower(side).eval()
    state = model.state_dict()
    save_file(state, folder / "model.safetensors")  # outputs are compared with it
    if "model.pt" in words:
        torch.save(state, folder / "model.pt")
    if "same.safetensors" in words:
        save_file(state, folder / "same.safetensors")
    if "other.safetensors" in words:
        middle = f"layers.{TENSORS // 2}.weight"
        zeroed = state[middle].clone().index_fill_(0, torch.tensor([0]), 0)
        save_file({**state, middle: zeroed}, folder / "other.safetensors")
    if "model.dcp" in words:
        warnings.simplefilter("ignore")  # about the single process
        dcp.save(state, checkpoint_id=folder / "model.dcp", no_dist=True)
    if "model.pt2" in words:
        with torch.no_grad():  # other values than the file's
            for weight in model.parameters():
                weight.neg_()
        torch.export.save(torch.export.export(model, (torch.zeros(1, side),)), folder / "model.pt2")
    if "large." in words:
        _make_large(folder)
    if "many." not in words:
        return
    many = {f"layers.{i // 10}.block.{i % 10}.weight": torch.zeros(1) for i in range(MANY)}
    torch.save({key: many[key] for key in list(many)[:10_000]}, folder / "many.pt")
    save_file(many, folder / "many.safetensors")


def _make_large(folder: Path) -> None:
    """Make files for a definition with tens of thousands of tensors, and two folders with many
    keys.
    """
    import json

    import torch
    from safetensors.torch import save_file

    import large

    state = large.build().state_dict()
    save_file(state, folder / "large.safetensors")
    wrong = {"head.weight": "heads.weight", "layers.0.gate.weight": "layers.0.router.weight"}
    save_file(
        {wrong.get(key, key): value for key, value in state.items()},
        folder / "large.wrong.safetensors",
    )
    for name, prefix in (("keys", "model.layers"), ("renamed", "net.blocks")):
        place = folder / f"large.{name}"
        place.mkdir(exist_ok=True)
        names = list(large.keys(prefix))
        count = -(-len(names) // large.SHARDS)
        weight_map = {}
        for number in range(large.SHARDS):
            shard = f"model-{number + 1:05}-of-{large.SHARDS:05}.safetensors"
            part = names[number * count : (number + 1) * count]
            save_file({key: torch.zeros(2, 2) for key in part}, place / shard)
            weight_map.update(dict.fromkeys(part, shard))
        index = {"metadata": {"total_size": 16 * len(names)}, "weight_map": weight_map}
        (place / "model.safetensors.index.json").write_text(json.dumps(index))
