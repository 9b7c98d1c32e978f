"""The sources of new parameters in the old optimizer, their groups, and their state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import ckpttool
from ckpttool import Names, Refused
from ckpttool.core.checkpoint import ExtraEntry, Lazy, Section, Storage, TensorEntry
from ckpttool.core.expression import Expression, Op, Ref
from ckpttool.core.optimizer_state import FQN, OptimizerState, ParamGroup
from ckpttool.io.pieces import read_all
from ckpttool.optimizers.groups import fill_layout, keep_groups
from ckpttool.optimizers.options import different
from ckpttool.optimizers.transform import (
    from_serialized,
    move_of,
    move_state,
    sources_between,
    to_serialized,
)


def names(*modules: str) -> Names:
    return ckpttool.trace(lambda: nn.ModuleDict({name: nn.PReLU() for name in modules}))


def test_a_rule_overrides_equal_names() -> None:
    """The rules rename ``b`` to ``a``, and the old ``a`` to ``c``."""
    result = sources_between(
        names("a", "b"), names("a"), {"b.weight": "a.weight", "a.weight": "c.weight"}
    )
    assert result == {"a.weight": Ref("b.weight")}


def test_a_buffer_with_the_name_of_a_parameter_is_ignored() -> None:
    model = nn.ModuleDict({"a": nn.PReLU()})
    buffered = nn.ModuleDict({"a": nn.Module()})
    buffered["a"].register_buffer("weight", model["a"].weight.detach().clone())
    new = ckpttool.trace(lambda: buffered)
    assert sources_between(names("a"), new, {"a.weight": "a.weight"}) == {}


SAVED_NAMES = (("old", "new"), ("count", "seen"))


class RenamesBoth(nn.Module):
    """Its parameter ``new`` is saved as ``old``, its buffer ``seen`` as ``count``."""

    def __init__(self) -> None:
        super().__init__()
        self.new = nn.Parameter(torch.ones(2))
        self.register_buffer("seen", torch.ones(2))

    def _save_to_state_dict(self, state: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(state, prefix, keep_vars)
        for old, new in SAVED_NAMES:
            state[prefix + old] = state.pop(prefix + new)

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *more: Any) -> None:
        for old, new in SAVED_NAMES:
            state[prefix + new] = state.pop(prefix + old)
        super()._load_from_state_dict(state, prefix, *more)


class SavedModel(nn.Module):
    """The saved state: a parameter, and a buffer or another parameter."""

    def __init__(self, count: str) -> None:
        super().__init__()
        self.old = nn.Parameter(torch.ones(2))
        getattr(self, f"register_{count}")("count", nn.Parameter(torch.ones(2)))


@pytest.mark.parametrize("count", ["buffer", "parameter"])
def test_a_new_parameter_comes_from_the_key_that_it_loads(count: str) -> None:
    old, new = ckpttool.trace(lambda: SavedModel(count)), ckpttool.trace(RenamesBoth)
    assert sources_between(old, new, {"old": "old", "count": "count"}) == {"new": Ref("old")}
    assert (
        sources_between(old, new, {"count": "count"}) == {}
    )  # the optimizer does not have its source
    assert sources_between(old, new, {"old": "seen", "count": "count"}) == {"new": Ref("old")}


def test_a_parameter_that_a_rule_renames_is_used_once() -> None:
    class Two(RenamesBoth):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Parameter(torch.ones(2))

    old, new = ckpttool.trace(lambda: SavedModel("buffer")), ckpttool.trace(Two)
    assert sources_between(old, new, {"old": "other"}) == {"other": Ref("old")}


# Groups


def grouped_params(*groups: tuple[str, float]) -> OptimizerState:
    """Return one-letter parameters in groups with these learning rates."""
    return OptimizerState(
        FQN, tuple(ParamGroup(tuple(params), {"lr": rate}) for params, rate in groups), {}
    )


def params_and_rates(groups: Sequence[ParamGroup]) -> list[tuple[str, object]]:
    return [("".join(map(str, group.params)), group.options.get("lr")) for group in groups]


def concat(*names: str) -> Op:
    return Op("aten.cat.default", (tuple(map(Ref, names)),))


def test_new_parameters_keep_the_position_of_the_old_ones() -> None:
    state = grouped_params(("ab", 1.0), ("", 3.0), ("cd", 1.0), ("e", 2.0))
    sources: dict[str, Expression] = {
        "z": Ref("e"),
        "y": concat("d", "b"),
        "x": Ref("a"),
        "w": Ref("c"),
    }
    assert params_and_rates(keep_groups(state, sources)) == [
        ("xy", 1.0),
        ("", 3.0),
        ("w", 1.0),
        ("z", 2.0),
    ]
    assert params_and_rates(keep_groups(state, {"x": Ref("a"), "w": Ref("c")})) == [
        ("x", 1.0),
        ("", 3.0),
        ("w", 1.0),
    ]


def test_parameters_of_different_groups_are_not_concatenated() -> None:
    with pytest.raises(
        Refused, match="x is made of parameters of different param groups"
    ) as refused:
        keep_groups(grouped_params(("ab", 1.0), ("c", 2.0)), {"x": concat("b", "c", "a")})
    assert list(map(str, refused.value.problems)) == [
        "param group 0 @ b",
        "param group 1 @ c",
        "param group 0 @ a",
    ]


def test_a_group_of_new_parameters_has_the_new_optimizers_options() -> None:
    state, sources = grouped_params(("ab", 1.0), ("c", 2.0)), {name: Ref(name) for name in "abc"}
    defaults = [{"lr": 7.0}, {"lr": 8.0}, {}]
    layout = ["cx", "yz", "", "ab"]
    assert params_and_rates(fill_layout(state, sources, layout, defaults)) == [
        ("cx", 7.0),  # no saved group has these parameters
        ("yz", 8.0),
        ("", 1.0),
        ("ab", 1.0),
    ]
    empty = OptimizerState(FQN, (), {})
    assert params_and_rates(fill_layout(empty, {}, ["x", "y"], [{"lr": 7.0}])) == [
        ("x", 7.0),
        ("y", None),
    ]


def test_conflicting_hyperparameters_are_reported() -> None:
    state = grouped_params(("a", 1.0), ("b", 2.0), ("c", 1.0), ("d", 3.0))
    sources = {name: Ref(name) for name in "abcd"}
    with pytest.raises(Refused, match="different hyperparameters") as refused:
        fill_layout(state, sources, ["ca", "bad"], [])
    assert list(map(str, refused.value.problems)) == [
        "lr is 1.0 in param group 0 and 2.0 in 1 @ param_groups.1",
        "lr is 1.0 in param group 0 and 3.0 in 3 @ param_groups.1",
    ]


# State


def moment(*shape: int, dtype: str = "float32", key: str = "") -> TensorEntry:
    return TensorEntry(
        key, dtype, shape, (1,) * len(shape), 0, Storage(Lazy(4, lambda: [bytes(4)]))
    )


def carry_state(sources: dict[str, Expression], **state_of: Any) -> dict[Any, Any]:
    states: dict[Any, Any] = {**state_of}
    state = OptimizerState(FQN, (ParamGroup(("a", "b"), {}),), states)
    return move_state(state, sources, {"a": (2,), "b": (2,)}, "optimizer")


def test_concatenated_parameters_must_have_taken_the_same_steps() -> None:
    concatenated: dict[str, Expression] = {"x": concat("a", "b")}
    one = {"exp_avg": moment(2), "step": 3}
    new_state = carry_state(concatenated, a=one, b=one)["x"]
    assert (new_state["exp_avg"].shape, new_state["step"]) == ((4,), 3)
    assert carry_state(concatenated) == {}  # without steps
    for other, message in (
        ({}, "a and b do not have the same state"),
        ({"exp_avg": moment(2)}, "a and b do not have the same state"),
        ({"exp_avg": moment(2), "step": 4}, "step: not the same in a, b"),
        ({"exp_avg": moment(3), "step": 3}, "exp_avg: it does not have the shape of its parameter"),
    ):
        with pytest.raises(
            Refused, match="state cannot follow its parameters: 1 problem"
        ) as refused:
            carry_state(concatenated, a=one, b=other)
        assert [str(problem) for problem in refused.value.problems] == [f"{message} @ x"]


def test_moments_do_not_follow_operators_that_change_values() -> None:
    scaled = Op("aten.mul.Scalar", (Ref("a"), 2))
    with pytest.raises(Refused) as refused:
        carry_state(
            {"x": scaled, "y": Ref("b")}, a={"exp_avg": moment(2)}, b={"exp_avg": moment(2)}
        )
    assert [str(problem) for problem in refused.value.problems] == [
        "computed by aten.mul, which changes values: moments do not follow it @ x"
    ]
    part = Op("getitem", (Op("aten.split.Tensor", (Ref("a"), 1)), 1))
    assert carry_state({"x": part}, a={"exp_avg": moment(2)})["x"]["exp_avg"].shape == (1,)
    assert carry_state({"x": scaled}, b={"exp_avg": moment(2)}) == {}  # without moments


def test_state_of_all_parameters_requires_the_same_order() -> None:
    history = {"old_dirs": [moment(4)], "d": moment(4)}
    assert carry_state({"x": Ref("a"), "y": Ref("b")}, a=history) == {"x": history}
    for sources in ({"y": Ref("b"), "x": Ref("a")}, {"x": Ref("a")}, {"x": concat("b", "a")}):
        with pytest.raises(Refused) as refused:
            carry_state(dict(sources), a=history, b=history)
        assert "belongs to all parameters together, in their order @ d, old_dirs" in map(
            str, refused.value.problems
        )


def test_only_equal_scalars_are_concatenated_without_the_parameters_shape() -> None:
    """The scalar is copied to separate memory; objects and other shapes are refused."""
    step = moment(1)
    result = carry_state({"x": concat("a", "b")}, a={"step": step}, b={"step": moment(1)})["x"][
        "step"
    ]
    assert (result.shape, result.storage is step.storage) == ((1,), False)
    for invalid in (moment(3), ExtraEntry("hook")):
        with pytest.raises(Refused) as refused:
            carry_state({"x": concat("a", "b")}, a={"m": invalid}, b={"m": invalid})
        assert list(map(str, refused.value.problems)) == [
            "m: it does not have the shape of its parameter @ x"
        ]


def test_hyperparameters_that_are_not_numbers_are_shown_by_kind() -> None:
    left = {"lr": moment(1), "hook": ExtraEntry("hook", payload=1), "eps": 1}
    assert different(left, {"lr": 2, "hook": 3}) == {
        "lr": ("a tensor", "2"), "hook": ("an object", "3"), "eps": ("1", "absent"),
    }  # fmt: skip


def test_a_group_of_a_plan_refers_to_a_group_of_the_file_or_lists_its_options() -> None:
    state = grouped_params(("ab", 1.0))
    groups = (ParamGroup(("a",), {"lr": 1.0}), ParamGroup(("b",), {"lr": 7.0}))
    section = Section("o", "optimizer", (), mapping={})
    move = move_of(section, state, FQN, groups, {name: Ref(name) for name in "ab"}, {"a": (2,)})
    assert [(group.like, group.options) for group in move.groups] == [(0, {}), (None, {"lr": 7.0})]
    named = replace(groups[0], options={"lr": 1.0, "param_names": ["a"]})
    assert [g.like for g in move_of(section, state, FQN, (named,), {}, {}).groups] == [None]


@pytest.mark.parametrize("op", ["aten.roll.default", "aten.flip.default"])
def test_moments_follow_operators_that_torch_evaluates(op: str) -> None:
    values = torch.arange(2.0)
    data = Storage(Lazy(8, lambda: [values.numpy().tobytes()]))
    exp_avg = TensorEntry("", "float32", (2,), (1,), 0, data)
    result = carry_state(
        {"x": Op(op, (Ref("a"), (1,) if "roll" in op else (0,)))}, a={"exp_avg": exp_avg}
    )["x"]["exp_avg"]
    assert bytes(read_all(result.storage.data)) == values.flip(0).numpy().tobytes()


def test_parameters_and_serialized_keys_are_converted() -> None:
    class SavesInTwoParts(nn.Module):
        """Saves its weight in two parts, and a constant."""

        def __init__(self) -> None:
            super().__init__()
            self.w, self.v = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(1))
            self.register_buffer("b", torch.ones(2))
            self._register_state_dict_hook(SavesInTwoParts._save)
            self.register_load_state_dict_pre_hook(self._load)

        def _save(self, state: dict[str, Any], prefix: str, _: Any) -> None:
            state[f"{prefix}top"], state[f"{prefix}bottom"] = state.pop(f"{prefix}w").chunk(2)
            state[f"{prefix}of"] = torch.ones(1)

        def _load(self, _: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
            state.pop(f"{prefix}of")
            state[f"{prefix}w"] = torch.cat(
                [state.pop(f"{prefix}{part}") for part in ("top", "bottom")]
            )

    model_names = ckpttool.trace(SavesInTwoParts)
    result = from_serialized(model_names, ["top", "bottom", "v"])
    assert result is not None
    assert set(result) == {"w", "v"}
    assert from_serialized(model_names, ["w", "v"]) is None
    assert from_serialized(model_names, ["top", "bottom", "of"]) is None
    assert from_serialized(model_names, ["v"]) is None
    assert set(to_serialized(model_names, ["w", "v"])) == {"top", "bottom", "v"}
    assert set(to_serialized(model_names, ["v"])) == {"v"}
    assert sources_between(model_names, model_names, {"w": "w", "v": "v"}) == {
        "w": Ref("w"),
        "v": Ref("v"),
    }
