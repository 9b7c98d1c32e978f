"""Two checkpoints compared through a model that lacks some of their keys: common keys are still
compared.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ckpttool
import hook_zoo
from places import SUPPORT

ZOO = ("tied", "adds_an_alias", "plain")


def statuses(result: ckpttool.Diff) -> dict[str, str]:
    return {key: entry.status for entry in result.entries for key in (*entry.left, *entry.right)}


@pytest.mark.parametrize("removed", [0, 1])
@pytest.mark.parametrize("name", ZOO)
def test_a_copy_is_the_same_even_if_the_model_lacks_some_keys(
    name: str, removed: int, tmp_path: Path
) -> None:
    """This also holds if the checkpoints lack one of the model's keys."""
    state: dict[str, Any] = dict(getattr(hook_zoo, name)().state_dict())
    for key in list(state)[:removed]:
        del state[key]
    state |= {"loss.weight": torch.ones(2), "epoch": 3}
    for file in ("left.pt", "right.pt"):
        torch.save(state, tmp_path / file)
    operand = f"{SUPPORT}/hook_zoo.py:{name}"
    result = ckpttool.diff(
        str(tmp_path / "left.pt"), str(tmp_path / "right.pt"), model=operand, values=True
    )
    assert result.identical, result.entries


def test_different_values_of_a_key_not_in_the_model_are_reported(tmp_path: Path) -> None:
    state = dict(hook_zoo.tied().state_dict())
    torch.save({**state, "loss.weight": torch.ones(2)}, tmp_path / "left.pt")
    torch.save({**state, "loss.weight": torch.zeros(2)}, tmp_path / "right.pt")
    operand = f"{SUPPORT}/hook_zoo.py:tied"
    result = ckpttool.diff(
        str(tmp_path / "left.pt"), str(tmp_path / "right.pt"), model=operand, values=True
    )
    assert statuses(result)["loss.weight"] == "value"


def test_equal_keys_of_two_different_tensors_are_not_the_same() -> None:
    """Left has runtime names, right has serialized keys: `a` on the left is another tensor than `a`
    on the right.
    """
    model = hook_zoo.swaps_two_names()
    left, right = (
        {f"{name}.{leaf}": torch.ones(2) for leaf in ("weight", "bias")} for name in "ab"
    )
    assert not ckpttool.diff(left, right, model=model).identical
