"""An optimizer's state as a value: what files of other authors hold where torch has lists of names and of groups."""

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
    ("names", "taken"),
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
def test_names_of_parameters_are_words_one_for_each(names: object, taken: object, tmp_path: Path, run: Run) -> None:
    assert ParamGroup((0, 1), {"param_names": names}).param_names == taken
    own = {"exp_avg": torch.ones(2)}
    optimizer = {"state": {0: own, 1: own}, "param_groups": [{"params": [0, 1], "param_names": names}]}
    torch.save({"optimizer": optimizer}, tmp_path / "in.pt")
    (section,) = open_checkpoint(str(tmp_path / "in.pt")).optimizers
    assert forms.read(section).groups[0].param_names == taken
    done = run("remap", tmp_path / "in.pt", "--optimizer-keys", "fqn", "-o", tmp_path / "out.pt")
    assert done.status == (1 if taken is None else 0), done.err


@pytest.mark.parametrize("odd", [3, {"params": [1]}, [1, {"a": torch.ones(1)}], None])
def test_what_is_left_out_is_left_out_beside_what_is_only_called_groups(odd: Any, tmp_path: Path, run: Run) -> None:
    own = {"scale": torch.ones(2), "growth": torch.ones(()), "param_groups": odd}
    state = {"state": {0: {"step": torch.ones(())}}, "param_groups": [{"params": [0]}], "scaler": own}
    torch.save({"model": {"w": torch.ones(2)}, "optimizer": state}, tmp_path / "in.pt")
    done = run("remap", tmp_path / "in.pt", "--drop", "optimizer.scaler.scale", "-o", tmp_path / "out.pt")
    assert done.status == 0, done.err
    own = torch.load(tmp_path / "out.pt")["optimizer"]["scaler"]
    assert list(own) == ["growth", "param_groups"]
    assert str(own["param_groups"]) == str(odd)
