"""Two checkpoints compared through a model that does not know all of their keys: names that both have are compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpttool
import hook_zoo
from places import SUPPORT

ZOO = ("tied", "adds_an_alias", "plain")


def statuses(found: ckpttool.Diff) -> dict[str, str]:
    return {key: entry.status for entry in found.entries for key in (*entry.left, *entry.right)}


@pytest.mark.parametrize("less", [0, 1])
@pytest.mark.parametrize("name", ZOO)
def test_a_copy_is_the_same_whatever_the_model_knows(name: str, less: int, tmp_path: Path) -> None:
    """Also without one of the model's keys."""
    state: dict[str, Any] = dict(getattr(hook_zoo, name)().state_dict())
    for key in list(state)[:less]:
        del state[key]
    state |= {"loss.weight": torch.ones(2), "epoch": 3}
    for file in ("left.pt", "right.pt"):
        torch.save(state, tmp_path / file)
    operand = f"{SUPPORT}/hook_zoo.py:{name}"
    found = ckpttool.diff(str(tmp_path / "left.pt"), str(tmp_path / "right.pt"), model=operand, values=True)
    assert found.identical, found.entries


def test_other_values_of_a_key_that_the_model_does_not_know(tmp_path: Path) -> None:
    state = dict(hook_zoo.tied().state_dict())
    torch.save({**state, "loss.weight": torch.ones(2)}, tmp_path / "left.pt")
    torch.save({**state, "loss.weight": torch.zeros(2)}, tmp_path / "right.pt")
    operand = f"{SUPPORT}/hook_zoo.py:tied"
    found = ckpttool.diff(str(tmp_path / "left.pt"), str(tmp_path / "right.pt"), model=operand, values=True)
    assert statuses(found)["loss.weight"] == "value"


class Exchanged(nn.Module):
    """The names of its two tensors are exchanged in checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.ones(2)) for _ in range(3))
        self.register_state_dict_post_hook(self.exchange)
        self.register_load_state_dict_pre_hook(lambda _, state, prefix, *rest: self.exchange(_, state, prefix, None))

    @staticmethod
    def exchange(_: nn.Module, state: dict[str, Any], prefix: str, metadata: object) -> None:
        for key in [key for key in ("a", "b") if key in state]:
            state[f"_{key}"] = state.pop(key)
        for old, new in (("_a", "b"), ("_b", "a")):
            if old in state:
                state[new] = state.pop(old)


def test_one_name_of_two_tensors_is_not_the_same() -> None:
    """The left has runtime names, the right serialized keys; each lacks the other's tensor `a`."""
    names = ckpttool.trace(Exchanged())
    assert {key.key for key in names.serialized} == {"a", "b", "c"}
    left, right = {"a": torch.ones(2), "c": torch.ones(2)}, {"b": torch.ones(2), "c": torch.ones(2)}
    found = ckpttool.diff(left, right, model=Exchanged())
    assert not found.identical
