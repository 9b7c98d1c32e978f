"""The verdict on a strict load is found once for each content."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import ckpttool


class Counted(nn.Linear):
    """It counts how often a state dict is loaded into it, or into a copy of it."""

    loads = 0

    def __init__(self) -> None:
        super().__init__(2, 2)

    def load_state_dict(self, *args: Any, **options: Any) -> Any:
        Counted.loads += 1
        return super().load_state_dict(*args, **options)


def test_a_fix_loads_the_old_and_the_new_content_once_for_all_sections(tmp_path: Path) -> None:
    wrapped = {f"module.{key}": value for key, value in nn.Linear(2, 2).state_dict().items()}
    torch.save({"model": wrapped, "ema": wrapped}, tmp_path / "in.pt")
    Counted.loads = 0
    ckpttool.fix(str(tmp_path / "in.pt"), str(tmp_path / "out.pt"), model=Counted)
    Counted().load_state_dict(torch.load(tmp_path / "out.pt")["ema"])
    assert Counted.loads == 3
