"""Two saved optimizers: entries of param groups, of their parameters and of their state."""

from __future__ import annotations

import copy
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpttool
from ckpttool import Diff
from names_files import names_file, ref, runtime, serialized
from saved_optimizers import Difference, differences, flattened

State = dict[Any, dict[str, Any]]


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def optimizer(*groups: Any, state: State | None = None, **options: Any) -> dict[str, Any]:
    """Return groups of one-letter names, or of ids."""
    param_groups = [{**options, "params": list(group)} for group in groups]
    return {"state": state or {}, "param_groups": param_groups}


def named_ids(names: str, state: State | None = None) -> dict[str, Any]:
    """Return ids with their names in the file."""
    return optimizer(range(len(names)), state=state, param_names=list(names))


def moment(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def compare(left: dict[str, Any], right: dict[str, Any], **options: Any) -> Diff:
    torch.save({"optimizer": left}, "left.pt")
    torch.save({"optimizer": right}, "right.pt")
    return ckpttool.diff("left.pt::optimizer", "right.pt::optimizer", **options)


def test_hyperparameters_are_compared_by_name() -> None:
    left, right = optimizer("a", lr=1, eps=2, old=0), optimizer("a", lr=1, eps=3, new=None)
    eps = "param_groups.0.eps param_groups.0.eps"
    assert differences(compare(left, right)) == [
        ("value", eps, "different hyperparameter: 2 instead of 3"),
        ("unexpected", "param_groups.0.old", "`old` is not in the param groups of right"),
        ("missing", "param_groups.0.new", "`new` is not in the param groups of left"),
    ]


def in_another_group(param: str, left_index: int, right_index: int) -> Difference:
    keys = " ".join(f"param_groups.{index}.params.{param}" for index in (left_index, right_index))
    return "renamed", keys, f"in param group {left_index} of left, {right_index} of right"


def only_left(param: str) -> Difference:
    key = f"param_groups.0.params.{param}"
    return "unexpected", key, "parameter not in right; in param group 0 of left"


def only_right(param: str) -> Difference:
    key = f"param_groups.0.params.{param}"
    return "missing", key, "parameter missing from left; in param group 0 of right"


GROUP_1_ONLY_LEFT = ("unexpected", "param_groups.1", "right does not have this param group")
GROUPS: dict[str, tuple[list[str], list[str], list[Difference]]] = {
    "in another order": (["ab", "cd"], ["cd", "ab"], []),
    "without a common parameter": (["a", ""], ["b", ""], [only_left("a"), only_right("b")]),
    "by most of their parameters": (
        ["abc", "d"],
        ["a", "bcd"],
        [
            GROUP_1_ONLY_LEFT,
            ("missing", "param_groups.0", "left does not have this param group"),
            in_another_group("a", 0, 0),
            in_another_group("d", 1, 1),
        ],
    ),
    "first parameter replaced": (["xab"], ["aby"], [only_left("x"), only_right("y")]),
    "one group less": (["ab", "c"], ["abc"], [GROUP_1_ONLY_LEFT, in_another_group("c", 1, 0)]),
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
    assert differences(compare(optimizer(*left, lr=1), optimizer(*right, lr=1))) == expected


def test_state_is_compared_by_name() -> None:
    left: State = {
        "a": {"step": 1, "m": moment(2), "v": moment(2), "old": 1, "n": 3},
        "b": {"step": 1},
        "c": {},
    }
    right: State = {
        "a": {"step": 2, "m": 3, "v": moment(2, dtype=torch.float16), "new": 1, "n": 3},
        "b": {},
        "c": {"step": 1},
    }
    diff = compare(optimizer("abc", state=left), optimizer("abc", state=right))
    assert differences(diff) == [
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
    left: State = {
        "a": {"d": {"m": moment(2), "n": 1}, "l": [moment(2)], "p": [1, 2], "e": {}, "b.c": 1},
        "a.b": {"c": 1},
        "x": {"y": 1},
    }
    right: State = {
        "a": {"d": {"m": moment(3)}, "l": [moment(2), 1], "p": [1, 3], "e": {}, "b.c": 1},
        "a.b": {"c": 2},
        "x": {},
    }
    diff = compare(
        {**optimizer(["a", "a.b", "x"], state=left), "scaler": {"scale": moment(1)}, "same": 1},
        {
            **optimizer(["a", "a.b", "x"], state=right),
            "scaler": {"scale": moment(1), "step": 1},
            "same": 1,
        },
    )
    assert differences(diff) == [
        ("shape", "state.a.d.m state.a.d.m", "different shape: [2] instead of [3]"),
        ("value", "state.a.p state.a.p", "different value"),
        ("value", "state.a.b.c@1 state.a.b.c@1", "different value"),
        ("unexpected", "state.a.d.n", "no `d.n` in the state of right"),
        ("unexpected", "state.x.y", "right has no state for this parameter"),
        ("missing", "state.a.l.1", "no `l.1` in the state of left"),
        ("missing", "scaler.step", "missing from left"),
    ]
    same = [entry.left[0] for entry in diff.entries if entry.status == "same"]
    assert [key for key in same if "param_groups" not in key] == [
        *("state.a.l.0", "state.a.e", "state.a.b.c", "scaler.scale", "same")
    ]


def test_objects_in_state_are_compared() -> None:
    one, other = Namespace(x=1), Namespace(x=2)
    pairs = {
        "same": (one, one),
        "other": (one, other),
        "tensor": (one, moment(1)),
        "plain": (one, 1),
        "dict": ({}, 1),
    }
    sides = [
        optimizer("a", state={"a": {name: pair[at] for name, pair in pairs.items()}})
        for at in (0, 1)
    ]
    assert differences(compare(*sides, values=True)) == [
        ("value", "state.a.other state.a.other", "not a tensor, and a different object"),
        ("shape", "state.a.tensor state.a.tensor", "a tensor on one side only"),
        ("value", "state.a.plain state.a.plain", "different value"),
        ("value", "state.a.dict state.a.dict", "different value"),
    ]


def statuses(diff: Diff) -> set[str]:
    return {status for status, *_ in differences(diff)}


def test_equal_names_at_other_positions_differ_if_they_have_state() -> None:
    """torch assigns state by position and ignores the names."""
    left = named_ids("abc", {1: {"exp_avg": moment(2)}})
    diff = compare(left, named_ids("acb", {2: {"exp_avg": moment(2)}}))
    assert diff.notes[0] == "compared by parameter name, only the positions differ"
    assert [(status, why.rpartition(": ")[2]) for status, _, why in differences(diff)] == [
        ("order", "position 1 -> 2"),
        ("order", "position 2 -> 1"),
    ]
    assert not differences(compare(named_ids("ab"), named_ids("ba")))
    sides = named_ids("ab", {0: {"exp_avg": moment(2)}}), named_ids("ba")
    assert statuses(compare(*sides)) == {"order", "unexpected"}
    assert statuses(compare(*reversed(sides))) == {"order", "missing"}


def test_only_common_parameters_are_at_another_position() -> None:
    state: State = {at: {"exp_avg": moment(2)} for at in range(3)}
    diff = compare(named_ids("abz", state), named_ids("bay", state))
    assert [keys for _, keys, _ in differences(diff, ["order"])] == [
        f"param_groups.0.params.{one} param_groups.0.params.{one}" for one in "ab"
    ]


@pytest.mark.parametrize(
    ("left", "way"),
    [
        (optimizer([0]), "keys_by_model"),
        (named_ids("a"), "keys"),
        (flattened(optimizer("a", lr=1)), "keys"),
        (optimizer([]), "keys"),
    ],
)
def test_only_a_file_that_names_its_parameters_changes_its_form_without_a_model(
    left: dict[str, Any], way: str, names: str
) -> None:
    right = optimizer("a")
    for model, expected in ((None, way), (names, "keys_by_model")):
        remedy = compare(left, right, model=model).remedy
        assert remedy is not None
        assert (remedy.way, remedy.form) == (expected, "fqn")


@pytest.fixture
def names() -> str:
    return names_file(
        Path("names.json"),
        [runtime(one) for one in "abc"],
        [serialized(one, ref(one)) for one in "abc"],
        {one: ref(one) for one in "abc"},
        model="n",
    )


def test_ids_that_fit_no_order_of_the_model_are_noted(names: str) -> None:
    diff = compare(optimizer([0, 1]), optimizer([0, 1]), model=names)
    assert diff.notes[0] == "parameters are compared by id"
    assert "and the model 3, 3 of them trainable" in diff.notes[1]


def test_names_that_the_model_lacks_are_noted(names: str) -> None:
    diff = compare(optimizer("xy"), optimizer("xy"), model=names)
    assert diff.notes[0] == (
        "left: 2 names in the file that the model does not have: not a parameter of n @ x"
    )


@pytest.mark.parametrize("side", ["left", "right"])
def test_names_that_the_shapes_contradict_are_noted(side: str, names: str) -> None:
    sides = {"left": named_ids("abc"), "right": named_ids("abc")}
    sides[side]["state"] = {0: {"exp_avg": moment(7)}}
    diff = compare(*sides.values(), model=names)
    assert {"left": "unexpected", "right": "missing"}[side] in statuses(diff)
    begin = f"{side}: the shapes in its state contradict its param_names"
    assert any(note.startswith(begin) for note in diff.notes)


def test_names_on_one_side_only_are_compared_by_position() -> None:
    diff = compare(optimizer("ab"), optimizer([0, 1]))
    assert "parameters are compared by position in the param groups" in diff.notes
    why = "left identifies parameters by name, right by id, as torch.optim does"
    assert differences(diff) == [("renamed", "state state", why)]
    assert statuses(compare(optimizer([0, 1]), optimizer("ab"))) == {"renamed"}


def test_ids_are_compared_if_one_side_has_no_names() -> None:
    diff = compare(named_ids("ab"), optimizer([1, 0]))
    assert not differences(diff)
    assert diff.notes == (
        "parameters are compared by id: pass --model MODEL to compare them by name",
    )


SGD: State = {0: {"momentum_buffer": moment(2)}}
ADAM: State = {0: {"step": 1, "exp_avg": moment(2), "exp_avg_sq": moment(2)}}
UNKNOWN: State = {0: {"trace": moment(2)}}


@pytest.mark.parametrize(
    ("left", "right", "classes"),
    [
        (SGD, ADAM, "SGD, right of Adam or AdamW"),
        (UNKNOWN, SGD, "an optimizer that is not part of torch, right of SGD"),
        (UNKNOWN, UNKNOWN, None),
        (SGD, SGD, None),
    ],
)
def test_states_of_two_optimizer_classes_are_noted(
    left: State, right: State, classes: str | None
) -> None:
    diff = compare(named_ids("a", left), named_ids("a", right))
    note = f"left is the state of {classes}: neither loads the other's"
    assert diff.notes == ((note,) if classes else ())


def test_flat_and_named_states_are_compared_by_name() -> None:
    state: State = {"b": {"step": 1}, "a": {"step": 2}}
    left = optimizer("ab", state=state, lr=1)
    diff = compare(left, flattened(optimizer("ba", state=copy.deepcopy(state), lr=1)))
    why = "left identifies parameters by name, right by name, in flat keys"
    assert differences(diff) == [("renamed", "state state", why)]
