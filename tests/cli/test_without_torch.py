"""Commands that only slice or reorder tensors do not need torch, for views and for chunks of a DCP
folder.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import ckpttool
from torchless import torchless


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(2, 3, bias=False), nn.Linear(2, 3, bias=False)
        self.register_state_dict_post_hook(self.fuse)
        self.register_load_state_dict_pre_hook(self.split)

    @staticmethod
    def fuse(module: nn.Module, state: dict[str, Any], prefix: str, meta: object) -> None:
        state["qk"] = torch.cat([state.pop("q.weight"), state.pop("k.weight")])

    @staticmethod
    def split(module: nn.Module, state: dict[str, Any], *rest: object) -> None:
        fused = state.pop("qk")
        state["q.weight"], state["k.weight"] = fused.narrow(0, 0, 3), fused.narrow(0, 3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.q(x) + self.k(x)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_views_and_chunks_do_not_need_torch(tmp_path: Path) -> None:
    old, new, x = Fused(), Fused(), torch.ones(1, 2)
    torch.export.save(torch.export.export(old, (x,)), tmp_path / "old.pt2")
    (tmp_path / "names.json").write_text(json.dumps(ckpttool.trace(Fused).to_json()))
    torch.save(new.state_dict(), tmp_path / "new.pt")
    dcp.save(
        {"w": torch.arange(6.0).view(2, 3).t(), "v": torch.ones(1)}, checkpoint_id=tmp_path / "dcp"
    )
    with torchless() as process:
        for line in (
            "swap-weights old.pt2 new.pt --model names.json -o new.pt2",
            "remap new.pt --model names.json --to runtime -o runtime.pt",
            "remap dcp -o whole.safetensors",
            "remap dcp --drop v -o whole.pt",
            "diff runtime.pt --model names.json",
            "diff dcp whole.pt --values",
        ):
            answer = process.run(line, tmp_path)
            assert answer.done.status in (0, 1), answer
            assert not answer.torch, line
    swapped = torch.export.load(tmp_path / "new.pt2")
    assert torch.equal(swapped.module()(x), new(x))
    assert torch.equal(torch.load(tmp_path / "whole.pt")["w"], torch.arange(6.0).view(2, 3).t())
    in_memory = ckpttool.swap_weights(
        str(tmp_path / "old.pt2"), new.state_dict(), str(tmp_path / "m.pt2"), model=Fused
    )
    assert set(in_memory.sources) == {"q.weight", "k.weight"}
    assert torch.equal(torch.export.load(tmp_path / "m.pt2").module()(x), new(x))
