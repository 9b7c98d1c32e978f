"""Which of the old parameters a new one is, and in which group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from ckpttool.checkpoint import Lazy, Storage, TensorEntry
from ckpttool.errors import Refused
from ckpttool.expression import Expression, Op, Ref
from ckpttool.names import Names
from ckpttool.naming.optimizers.moves import arranged, between, carry, placed
from ckpttool.operands.model import ModelOperand
from ckpttool.optimizer_state import FQN, OptimizerState, ParamGroup


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


# Groups


def in_groups(*groups: tuple[str, float]) -> OptimizerState:
    """Parameters of one letter, in groups with these learning rates."""
    return OptimizerState(FQN, tuple(ParamGroup(tuple(params), {"lr": rate}) for params, rate in groups), {})


def listed(groups: Sequence[ParamGroup]) -> list[tuple[str, object]]:
    return [("".join(map(str, group.params)), group.options.get("lr")) for group in groups]


def joined(*names: str) -> Op:
    return Op("aten.cat.default", (tuple(map(Ref, names)),))


def test_new_parameters_stand_where_the_old_ones_stood() -> None:
    state = in_groups(("ab", 1.0), ("", 3.0), ("cd", 1.0), ("e", 2.0))
    sources: dict[str, Expression] = {"z": Ref("e"), "y": joined("d", "b"), "x": Ref("a"), "w": Ref("c")}
    assert listed(placed(state, sources)) == [("xy", 1.0), ("", 3.0), ("w", 1.0), ("z", 2.0)]
    assert listed(placed(state, {"x": Ref("a"), "w": Ref("c")})) == [("x", 1.0), ("", 3.0), ("w", 1.0)]


def test_parameters_of_groups_that_differ_are_not_joined() -> None:
    with pytest.raises(Refused, match="x is made of parameters of different param groups") as refused:
        placed(in_groups(("ab", 1.0), ("c", 2.0)), {"x": joined("b", "c", "a")})
    assert list(map(str, refused.value.problems)) == ["param group 0 @ b", "param group 1 @ c", "param group 0 @ a"]


def test_a_group_of_new_parameters_has_the_new_optimizers_options() -> None:
    state, own = in_groups(("ab", 1.0), ("c", 2.0)), {name: Ref(name) for name in "abc"}
    defaults = [{"lr": 7.0}, {"lr": 8.0}, {}]
    layout = ["cx", "yz", "", "ab"]
    assert listed(arranged(state, own, layout, defaults)) == [("cx", 2.0), ("yz", 8.0), ("", 1.0), ("ab", 1.0)]
    bare = OptimizerState(FQN, (), {})
    assert listed(arranged(bare, {}, ["x", "y"], [{"lr": 7.0}])) == [("x", 7.0), ("y", None)]


def test_every_hyperparameter_that_does_not_go_together_is_named() -> None:
    state = in_groups(("a", 1.0), ("b", 2.0), ("c", 1.0), ("d", 3.0))
    own = {name: Ref(name) for name in "abcd"}
    with pytest.raises(Refused, match="different hyperparameters") as refused:
        arranged(state, own, ["ca", "bad"], [])
    assert list(map(str, refused.value.problems)) == [
        "lr is 1.0 in param group 0 and 2.0 in 1 @ param_groups.1",
        "lr is 1.0 in param group 0 and 3.0 in 3 @ param_groups.1",
    ]


# State


def moment(*shape: int, dtype: str = "float32", key: str = "") -> TensorEntry:
    return TensorEntry(key, dtype, shape, (1,) * len(shape), 0, Storage(Lazy(4, lambda: [bytes(4)])))


def carried(sources: dict[str, Expression], **state_of: Any) -> dict[Any, Any]:
    own: dict[Any, Any] = {**state_of}
    state = OptimizerState(FQN, (ParamGroup(("a", "b"), {}),), own)
    return carry(state, sources, {"a": (2,), "b": (2,)}, "optimizer")


def test_parameters_that_are_joined_have_taken_the_same_steps() -> None:
    both: dict[str, Expression] = {"x": joined("a", "b")}
    one = {"exp_avg": moment(2), "step": 3}
    made = carried(both, a=one, b=one)["x"]
    assert (made["exp_avg"].shape, made["step"]) == ((4,), 3)
    assert carried(both) == {}  # no steps at all
    for other, words in (
        ({}, "a and b have not taken the same steps"),
        ({"exp_avg": moment(2)}, "a and b have not taken the same steps"),
        ({"exp_avg": moment(2), "step": 4}, "step: not the same in a, b"),
        ({"exp_avg": moment(3), "step": 3}, "exp_avg: it has not the shape of its parameter"),
    ):
        with pytest.raises(Refused, match="the state of 1 parameters cannot follow them") as refused:
            carried(both, a=one, b=other)
        assert [str(problem) for problem in refused.value.problems] == [f"{words} @ x"]


def test_moments_do_not_follow_what_changes_values() -> None:
    scaled = Op("aten.mul.Scalar", (Ref("a"), 2))
    with pytest.raises(Refused) as refused:
        carried({"x": scaled, "y": Ref("b")}, a={"exp_avg": moment(2)}, b={"exp_avg": moment(2)})
    assert [str(problem) for problem in refused.value.problems] == [
        "computed by aten.mul, which changes values: moments do not follow it @ x"
    ]
    part = Op("getitem", (Op("aten.split.Tensor", (Ref("a"), 1)), 1))
    assert carried({"x": part}, a={"exp_avg": moment(2)})["x"]["exp_avg"].shape == (1,)
    assert carried({"x": scaled}, b={"exp_avg": moment(2)}) == {}  # there are none


def test_what_belongs_to_all_parameters_stays_in_their_order() -> None:
    history = {"old_dirs": [moment(4)], "d": moment(4)}
    assert carried({"x": Ref("a"), "y": Ref("b")}, a=history) == {"x": history}
    for sources in ({"y": Ref("b"), "x": Ref("a")}, {"x": Ref("a")}, {"x": joined("b", "a")}):
        with pytest.raises(Refused) as refused:
            carried(dict(sources), a=history, b=history)
        assert "belongs to all parameters together, in their order @ d, old_dirs" in map(str, refused.value.problems)
