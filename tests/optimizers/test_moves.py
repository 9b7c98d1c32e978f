"""Which of the old parameters a new one is, and in which group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from ckpttool.core.checkpoint import ExtraEntry, Lazy, Section, Storage, TensorEntry
from ckpttool.core.errors import Refused
from ckpttool.core.expression import Expression, Op, Ref
from ckpttool.core.names import Names
from ckpttool.core.optimizer_state import FQN, OptimizerState, ParamGroup
from ckpttool.io.pieces import read_all
from ckpttool.operands.model import ModelOperand
from ckpttool.optimizers.transform import (
    arranged,
    between,
    carry,
    different,
    from_serialized,
    move_of,
    moved_by,
    placed,
    to_serialized,
)


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
    """The saved state: a parameter, and a buffer or another parameter."""

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
        ({"exp_avg": moment(3), "step": 3}, "exp_avg: it does not have the shape of its parameter"),
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


def test_state_that_has_not_the_shape_of_its_parameter() -> None:
    """An object, or a tensor of another shape, is refused; an equal number is copied to its own memory."""
    step = moment(1)
    found = carried({"x": joined("a", "b")}, a={"step": step}, b={"step": moment(1)})["x"]["step"]
    assert (found.shape, found.storage is step.storage) == ((1,), False)
    for odd in (moment(3), ExtraEntry("hook")):
        with pytest.raises(Refused) as refused:
            carried({"x": joined("a", "b")}, a={"odd": odd}, b={"odd": odd})
        assert list(map(str, refused.value.problems)) == ["odd: it does not have the shape of its parameter @ x"]


def test_hyperparameters_that_are_no_numbers_are_told_by_their_kind() -> None:
    left = {"lr": moment(1), "hook": ExtraEntry("hook", payload=1), "eps": 1}
    assert different(left, {"lr": 2, "hook": 3}) == {
        "lr": ("a tensor", "2"), "hook": ("an object", "3"), "eps": ("1", "absent"),
    }  # fmt: skip


def test_a_group_of_a_plan_is_like_one_of_the_files_or_says_its_options() -> None:
    state = in_groups(("ab", 1.0))
    groups = (ParamGroup(("a",), {"lr": 1.0}), ParamGroup(("b",), {"lr": 7.0}))
    section = Section("o", "optimizer", (), mapping={})
    move = move_of(section, state, FQN, groups, {name: Ref(name) for name in "ab"}, {"a": (2,)})
    assert [(group.like, group.options) for group in move.groups] == [(0, {}), (None, {"lr": 7.0})]
    assert listed(moved_by(move, state, "o").groups) == [("a", 1.0), ("b", 7.0)]
    named = replace(groups[0], options={"lr": 1.0, "param_names": ["a"]})
    assert [g.like for g in move_of(section, state, FQN, (named,), {}, {}).groups] == [None]
    far = replace(move, groups=(replace(move.groups[0], like=1), move.groups[1]))
    with pytest.raises(Refused) as refused:
        moved_by(far, state, "o")
    assert "param group 1, and there are 1" in str(refused.value.problems[0])


@pytest.mark.parametrize("op", ["aten.roll.default", "aten.flip.default"])
def test_moments_that_only_torch_moves(op: str) -> None:
    values = torch.arange(2.0)
    data = Storage(Lazy(8, lambda: [values.numpy().tobytes()]))
    own = TensorEntry("", "float32", (2,), (1,), 0, data)
    found = carried({"x": Op(op, (Ref("a"), (1,) if "roll" in op else (0,)))}, a={"exp_avg": own})["x"]["exp_avg"]
    assert bytes(read_all(found.storage.data)) == values.flip(0).numpy().tobytes()


def test_which_parameters_are_of_serialized_keys() -> None:
    class Halved(nn.Module):
        """Its weight is saved in two parts, with a constant."""

        def __init__(self) -> None:
            super().__init__()
            self.w, self.v = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(1))
            self.register_buffer("b", torch.ones(2))
            self._register_state_dict_hook(Halved._save)
            self.register_load_state_dict_pre_hook(self._load)

        def _save(self, state: dict[str, Any], prefix: str, _: Any) -> None:
            state[f"{prefix}top"], state[f"{prefix}bottom"] = state.pop(f"{prefix}w").chunk(2)
            state[f"{prefix}of"] = torch.ones(1)

        def _load(self, _: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
            state.pop(f"{prefix}of")
            state[f"{prefix}w"] = torch.cat([state.pop(f"{prefix}{part}") for part in ("top", "bottom")])

    own = ModelOperand(Halved).names()
    found = from_serialized(own, ["top", "bottom", "v"])
    assert found is not None
    assert set(found) == {"w", "v"}
    assert from_serialized(own, ["w", "v"]) is None
    assert from_serialized(own, ["top", "bottom", "of"]) is None
    assert from_serialized(own, ["v"]) is None
    assert set(to_serialized(own, ["w", "v"])) == {"top", "bottom", "v"}
    assert set(to_serialized(own, ["v"])) == {"v"}
    assert between(own, own, {"w": "w", "v": "v"}) == {"w": Ref("w"), "v": Ref("v")}
