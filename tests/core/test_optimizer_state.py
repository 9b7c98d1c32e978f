"""Optimizer state with unusual values for the lists of names and of param groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ckpttool.core.optimizer_state import ParamGroup
from ckpttool.formats.detect_folder import open_checkpoint
from ckpttool.optimizers import forms
from command import Run


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["a", "b"], ("a", "b")),
        (("a", "b"), ("a", "b")),
        (["a"], None),
        (["a", "b", "c"], None),
        (["a", 1], None),
        ("ab", None),
        (None, None),
    ],
)
def test_param_names_must_be_one_string_per_parameter(
    names: object, expected: object, tmp_path: Path, run: Run
) -> None:
    assert ParamGroup((0, 1), {"param_names": names}).param_names == expected
    moments = {"exp_avg": torch.ones(2)}
    optimizer = {"state": {0: moments, 1: moments}, "param_groups": [{"params": [0, 1], "param_names": names}]}
    torch.save({"optimizer": optimizer}, tmp_path / "in.pt")
    (section,) = open_checkpoint(str(tmp_path / "in.pt")).optimizers
    assert forms.read(section).groups[0].param_names == expected
    done = run("remap", tmp_path / "in.pt", "--optimizer-keys", "fqn", "-o", tmp_path / "out.pt")
    assert done.status == (1 if expected is None else 0), done.err


@pytest.mark.parametrize("groups", [3, {"params": [1]}, [1, {"a": torch.ones(1)}], None])
def test_entry_next_to_unrelated_param_groups_can_be_dropped(groups: Any, tmp_path: Path, run: Run) -> None:
    scaler = {"scale": torch.ones(2), "growth": torch.ones(()), "param_groups": groups}
    state = {"state": {0: {"step": torch.ones(())}}, "param_groups": [{"params": [0]}], "scaler": scaler}
    torch.save({"model": {"w": torch.ones(2)}, "optimizer": state}, tmp_path / "in.pt")
    done = run("remap", tmp_path / "in.pt", "--drop", "optimizer.scaler.scale", "-o", tmp_path / "out.pt")
    assert done.status == 0, done.err
    scaler = torch.load(tmp_path / "out.pt")["optimizer"]["scaler"]
    assert list(scaler) == ["growth", "param_groups"]
    assert str(scaler["param_groups"]) == str(groups)
