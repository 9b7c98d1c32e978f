"""Which of the old parameters a new one is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ckpttool.expression import Ref
from ckpttool.names import Names
from ckpttool.naming.optimizers.moves import between
from ckpttool.operands.model import ModelOperand


def names(*modules: str) -> Names:
    return ModelOperand(lambda: nn.ModuleDict({name: nn.PReLU() for name in modules})).names()


def test_what_a_rule_says_goes_before_what_the_names_say() -> None:
    """``b`` becomes the new ``a``, and the old ``a``, which has its name, another one."""
    found = between(names("a", "b"), names("a"), {"b.weight": "a.weight", "a.weight": "c.weight"})
    assert found == {"a.weight": Ref("b.weight")}


def test_a_buffer_of_a_parameters_name_is_no_parameter() -> None:
    model = nn.ModuleDict({"a": nn.PReLU()})
    buffered = nn.ModuleDict({"a": nn.Module()})
    buffered["a"].register_buffer("weight", model["a"].weight.detach().clone())
    new = ModelOperand(lambda: buffered).names()
    assert between(names("a"), new, {"a.weight": "a.weight"}) == {}


RENAMED = (("old", "new"), ("count", "seen"))


class Renaming(nn.Module):
    """Its parameter ``new`` is saved as ``old``, its buffer ``seen`` as ``count``."""

    def __init__(self) -> None:
        super().__init__()
        self.new = nn.Parameter(torch.ones(2))
        self.register_buffer("seen", torch.ones(2))

    def _save_to_state_dict(self, state: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(state, prefix, keep_vars)
        for old, new in RENAMED:
            state[prefix + old] = state.pop(prefix + new)

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *more: Any) -> None:
        for old, new in RENAMED:
            state[prefix + new] = state.pop(prefix + old)
        super()._load_from_state_dict(state, prefix, *more)


class Renamed(nn.Module):
    """What was saved before: a parameter, and a buffer or another parameter."""

    def __init__(self, count: str) -> None:
        super().__init__()
        self.old = nn.Parameter(torch.ones(2))
        getattr(self, f"register_{count}")("count", nn.Parameter(torch.ones(2)))


@pytest.mark.parametrize("count", ["buffer", "parameter"])
def test_a_parameter_is_what_loading_makes_it_of(count: str) -> None:
    old, new = ModelOperand(lambda: Renamed(count)).names(), ModelOperand(Renaming).names()
    assert between(old, new, {"old": "old", "count": "count"}) == {"new": Ref("old")}
    assert between(old, new, {"count": "count"}) == {}  # the optimizer has none of it
    assert between(old, new, {"old": "seen", "count": "count"}) == {"new": Ref("old")}


def test_a_parameter_that_a_rule_gives_away_is_not_given_twice() -> None:
    class Two(Renaming):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Parameter(torch.ones(2))

    old, new = ModelOperand(lambda: Renamed("buffer")).names(), ModelOperand(Two).names()
    assert between(old, new, {"old": "other"}) == {"other": Ref("old")}
