"""Entries of param groups, their parameters and their state, from hand-made values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from ckpttool import Names
from ckpttool.core.checkpoint import ExtraEntry, Section, Span, Storage, TensorEntry
from ckpttool.core.expression import Ref
from ckpttool.core.names import RuntimeTensor, SerializedKey
from ckpttool.core.optimizer_state import (
    FLAT,
    FQN,
    ID,
    PARAM_NAMES,
    OptimizerState,
    Param,
    ParamGroup,
)
from ckpttool.diffing.causes import Cause, Code
from ckpttool.diffing.result import Entry
from ckpttool.diffing.saved_optimizers import (
    Misassigned,
    OptimizerDiff,
    SavedOptimizer,
    compare_optimizers,
    group_entries,
    is_named,
    state_entries,
    tensors_of,
)
from ckpttool.optimizers.forms import write

State = Mapping[Param, Mapping[str, Any]]


def optimizer(
    *groups: Sequence[Param], state: State | None = None, **options: object
) -> OptimizerState:
    return OptimizerState(
        FQN, tuple(ParamGroup(tuple(group), options) for group in groups), state or {}
    )


def moment(*shape: int, dtype: str = "float32") -> TensorEntry:
    return TensorEntry("", dtype, shape, (1,) * len(shape), 0, Storage(Span("o.pt", 0, 64)))


def differences(entries: Iterable[Entry]) -> list[tuple[str, str, str]]:
    return [
        (
            one.status,
            " ".join((*one.left, *one.right)),
            ": ".join(filter(None, (one.reason, one.detail))),
        )
        for one in entries
        if one.status != "same"
    ]


def test_hyperparameters_are_compared_by_name() -> None:
    left, right = optimizer("a", lr=1, eps=2, old=0), optimizer("a", lr=1, eps=3, new=None)
    assert differences(group_entries(left, right)) == [
        (
            "value",
            "param_groups.0.eps param_groups.0.eps",
            "different hyperparameter: 2 instead of 3",
        ),
        ("unexpected", "param_groups.0.old", "`old` is not in the param groups of right"),
        ("missing", "param_groups.0.new", "`new` is not in the param groups of left"),
    ]


def in_another_group(param: str, left_index: int, right_index: int) -> tuple[str, str, str]:
    keys = " ".join(f"param_groups.{index}.params.{param}" for index in (left_index, right_index))
    return "renamed", keys, f"in param group {left_index} of left, {right_index} of right"


GROUPS: dict[str, tuple[Sequence[str], Sequence[str], list[tuple[str, str, str]]]] = {
    "in another order": (["ab", "cd"], ["cd", "ab"], []),
    "without a common parameter": (
        ["a", ""],
        ["b", ""],
        [
            (
                "unexpected",
                "param_groups.0.params.a",
                "parameter not in right; in param group 0 of left",
            ),
            (
                "missing",
                "param_groups.0.params.b",
                "parameter missing from left; in param group 0 of right",
            ),
        ],
    ),
    "by most of their parameters": (
        ["abc", "d"],
        ["a", "bcd"],
        [
            ("unexpected", "param_groups.1", "right does not have this param group"),
            ("missing", "param_groups.0", "left does not have this param group"),
            in_another_group("a", 0, 0),
            in_another_group("d", 1, 1),
        ],
    ),
    "first parameter replaced": (
        ["xab"],
        ["aby"],
        [
            (
                "unexpected",
                "param_groups.0.params.x",
                "parameter not in right; in param group 0 of left",
            ),
            (
                "missing",
                "param_groups.0.params.y",
                "parameter missing from left; in param group 0 of right",
            ),
        ],
    ),
    "one group less": (
        ["ab", "c"],
        ["abc"],
        [
            ("unexpected", "param_groups.1", "right does not have this param group"),
            in_another_group("c", 1, 0),
        ],
    ),
    "one group more": (
        ["abc"],
        ["ab", "c"],
        [
            ("missing", "param_groups.1", "left does not have this param group"),
            in_another_group("c", 0, 1),
        ],
    ),
}


@pytest.mark.parametrize("name", GROUPS)
def test_groups_are_paired_by_parameters_or_else_by_position(name: str) -> None:
    left, right, expected = GROUPS[name]
    assert differences(group_entries(optimizer(*left, lr=1), optimizer(*right, lr=1))) == expected


def test_only_common_parameters_are_reported_as_misassigned() -> None:
    misassigned = Misassigned(
        Cause(Code.DOUBT, ("misassigned",)), {"a": "to b", "c": None, "z": "in neither"}
    )
    keys = [
        "param_groups.0.params.a param_groups.0.params.a",
        "param_groups.0.params.b param_groups.0.params.b",
    ]
    assert differences(group_entries(optimizer("ab"), optimizer("ab"), misassigned)) == [
        ("order", keys[0], "misassigned: to b")
    ]


def test_state_is_compared_by_name() -> None:
    left: State = {
        "a": {"step": 1, "m": moment(2), "v": moment(2), "old": 1, "n": 3},
        "b": {"step": 1},
        "c": {},
    }
    right: State = {
        "a": {"step": 2, "m": 3, "v": moment(2, dtype="float16"), "new": 1, "n": 3},
        "b": {},
        "c": {"step": 1},
    }
    result = state_entries(optimizer("abc", state=left), optimizer("abc", state=right), None)
    assert differences(result) == [
        ("value", "state.a.step state.a.step", "different value"),
        ("dtype", "state.a.m state.a.m", "a tensor on one side, a Python value on the other"),
        ("dtype", "state.a.v state.a.v", "float32 instead of float16"),
        ("unexpected", "state.a.old", "no `old` in the state of right"),
        ("unexpected", "state.b.step", "right has no state for this parameter"),
        ("missing", "state.a.new", "no `new` in the state of left"),
        ("missing", "state.c.step", "left has no state for this parameter"),
    ]


def test_nested_and_shared_state_is_compared() -> None:
    """Dicts and lists are compared by part, lists of plain values as a unit; equal dotted paths get
    separate keys.
    """
    left_state: State = {
        "a": {"d": {"m": moment(2), "n": 1}, "l": [moment(2)], "p": [1, 2], "e": {}, "b.c": 1},
        "a.b": {"c": 1},
    }
    right_state: State = {
        "a": {"d": {"m": moment(3)}, "l": [moment(2), 1], "p": [1, 3], "e": {}, "b.c": 1},
        "a.b": {"c": 2},
    }
    groups = (ParamGroup(("a", "a.b"), {}),)
    left = OptimizerState(
        FQN, groups, left_state, {"x": {"y": 1}}, {"scaler": {"scale": moment(1)}, "same": 1}
    )
    right = OptimizerState(
        FQN, groups, right_state, {}, {"scaler": {"scale": moment(1), "step": 1}, "same": 1}
    )
    result = state_entries(left, right, None)
    assert differences(result) == [
        ("shape", "state.a.d.m state.a.d.m", "different shape: [2] instead of [3]"),
        ("value", "state.a.p state.a.p", "different value"),
        ("value", "state.a.b.c@1 state.a.b.c@1", "different value"),
        ("unexpected", "state.a.d.n", "no `d.n` in the state of right"),
        ("unexpected", "state.x.y", "not in right"),
        ("missing", "state.a.l.1", "no `l.1` in the state of left"),
        ("missing", "scaler.step", "missing from left"),
    ]
    assert [one.left[0] for one in result if one.status == "same"] == [
        *("state.a.l.0", "state.a.e", "state.a.b.c", "scaler.scale", "same")
    ]
    assert list(tensors_of(right)) == ["state.a.d.m", "state.a.l.0", "scaler.scale"]


def test_objects_in_state_are_compared() -> None:
    one, other = (ExtraEntry("", value=value) for value in ("x", "y"))
    pairs = {
        "same": (one, one),
        "other": (one, other),
        "tensor": (one, moment(1)),
        "plain": (one, 1),
        "dict": ({}, 1),
    }
    left, right = (
        optimizer("a", state={"a": {name: pair[at] for name, pair in pairs.items()}})
        for at in (0, 1)
    )
    assert differences(state_entries(left, right, lambda left, right: None)) == [
        ("value", "state.a.other state.a.other", "not a tensor, and a different object"),
        ("shape", "state.a.tensor state.a.tensor", "a tensor on one side only"),
        ("value", "state.a.plain state.a.plain", "different value"),
        ("value", "state.a.dict state.a.dict", "different value"),
    ]


# Two saved optimizers


def saved(state: OptimizerState) -> SavedOptimizer:
    return SavedOptimizer(write(state, Section("optimizer", "optimizer", ())))


def ids(*groups: Sequence[Param], names: str = "", state: State | None = None) -> OptimizerState:
    """Return groups of ids; `names` has one letter for each parameter."""
    rest = iter(names)
    options = [{PARAM_NAMES: [next(rest) for _ in group]} if names else {} for group in groups]
    return OptimizerState(
        ID, tuple(ParamGroup(tuple(g), o) for g, o in zip(groups, options)), state or {}
    )


def compare_saved(left: OptimizerState, right: OptimizerState) -> OptimizerDiff:
    return compare_optimizers(saved(left), saved(right))


def test_equal_names_at_other_positions_differ_if_they_have_state() -> None:
    """torch assigns state by position and ignores the names."""
    one: State = {1: {"exp_avg": moment(2)}}
    result = compare_saved(
        ids([0, 1, 2], names="abc", state=one),
        ids([0, 1, 2], names="acb", state={2: {"exp_avg": moment(2)}}),
    )
    assert result.notes == ("compared by parameter name, only the positions differ",)
    assert [
        (status, why.rpartition(": ")[2]) for status, _, why in differences(result.entries)
    ] == [
        ("order", "number 1 in left, 2 in right"),
        ("order", "number 2 in left, 1 in right"),
    ]
    assert not differences(compare_saved(ids([0, 1], names="ab"), ids([0, 1], names="ba")).entries)
    sides = ids([0, 1], names="ab", state={0: {"exp_avg": moment(2)}}), ids([0, 1], names="ba")
    assert {status for status, *_ in differences(compare_saved(*sides).entries)} == {
        "order",
        "unexpected",
    }
    assert {status for status, *_ in differences(compare_saved(*reversed(sides)).entries)} == {
        "order",
        "missing",
    }


def test_names_and_ids_that_contradict_the_model_are_noted() -> None:
    """Names not in the model, ids that fit no order of the model, and ids that contradict the
    shapes.
    """
    runtime = tuple(
        RuntimeTensor(one, one, "parameter", True, True, "float32", (2,), None) for one in "abc"
    )
    names = Names(
        "n",
        "2",
        runtime,
        tuple(SerializedKey(t.fqn, "float32", (2,), Ref(t.fqn), None) for t in runtime),
        (),
    )
    unknown = compare_optimizers(saved(ids([0, 1])), saved(ids([0, 1])), names)
    assert "and the model 3, 3 of them trainable" in unknown.notes[0]
    strange = compare_optimizers(saved(optimizer("xy")), saved(optimizer("xy")), names)
    assert strange.notes[0] == (
        "left holds 2 parameters that the model lacks: not a parameter of n @ x"
    )
    wrong: State = {0: {"exp_avg": moment(7)}}
    for side in range(2):
        pair = [ids([0, 1, 2], names="abc"), ids([0, 1, 2], names="abc")]
        pair[side] = replace(pair[side], state=wrong)
        doubted = compare_optimizers(saved(pair[0]), saved(pair[1]), names)
        assert {entry.status for entry in doubted.entries} - {"same"} >= {
            ("unexpected", "missing")[side]
        }
        assert any(
            note.startswith(
                f"{('left', 'right')[side]}: the shapes in its state contradict its param_names"
            )
            for note in doubted.notes
        )


def test_names_on_one_side_only_are_compared_by_position() -> None:
    result = compare_saved(optimizer("ab"), ids([0, 1]))
    assert "parameters are compared by position in the param groups" in result.notes
    assert differences(result.entries) == [
        (
            "renamed",
            "state state",
            "left identifies parameters by name, right by id, as torch.optim does",
        )
    ]
    back = compare_saved(ids([0, 1]), optimizer("ab"))
    assert [status for status, *_ in differences(back.entries)] == ["renamed"]


def test_ids_are_compared_if_one_side_has_no_names() -> None:
    result = compare_saved(ids([0, 1], names="ab"), ids([1, 0]))
    assert (result.notes, result.by_id) == ((), True)
    assert not differences(result.entries)


@pytest.mark.parametrize(
    ("state", "named"),
    [(ids([0]), False), (ids([0], names="a"), True), (optimizer("a"), True), (ids([]), True)],
)
def test_is_named_is_true_if_the_file_names_its_parameters(
    state: OptimizerState, named: bool
) -> None:
    assert is_named(saved(state)) == named


def test_optimizer_classes_are_recognised() -> None:
    sgd: State = {0: {"momentum_buffer": moment(2)}}
    adam: State = {0: {"step": 1, "exp_avg": moment(2), "exp_avg_sq": moment(2)}}
    unknown_class: State = {0: {"trace": moment(2)}}
    for one, other, classes in (
        (sgd, adam, ("SGD", "Adam or AdamW")),
        (unknown_class, sgd, (None, "SGD")),
        (unknown_class, unknown_class, (None, None)),
        (sgd, sgd, ("SGD", "SGD")),
    ):
        assert (
            compare_saved(ids([0], names="a", state=one), ids([0], names="a", state=other)).classes
            == classes
        )


def test_flat_and_named_states_are_compared_by_name() -> None:
    state: State = {"b": {"step": 1}, "a": {"step": 2}}
    left = optimizer("ab", state=state, lr=1)
    flat = OptimizerState(FLAT, (ParamGroup(("b", "a"), {"lr": 1}),), state)
    assert differences(compare_saved(left, flat).entries) == [
        (
            "renamed",
            "state state",
            "left identifies parameters by name, right by name, in flat keys",
        )
    ]
