"""Plans as data: checks against a checkpoint, JSON round trip, composition, and renames in
`_metadata`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from ckpttool import Checkpoint, CkptError, Plan
from ckpttool.core.checkpoint import ExtraEntry, Section, Span, Storage, TensorEntry
from ckpttool.core.expression import BY_CODE, Expression, Op, Ref, refs
from ckpttool.core.plan import (
    SCHEMA,
    Dropped,
    ModelRun,
    ModuleRename,
    Output,
    compose,
    in_turn,
    module_renames,
)
from ckpttool.evaluate.apply import apply
from ckpttool.evaluate.torch_eval import load
from ckpttool.live.model import section_of


def entry(key: str) -> TensorEntry:
    return TensorEntry(key, "float32", (2,), (1,), 0, Storage(Span("no file", 0, 8)))


def checkpoint(*keys: str, path: str = "") -> Checkpoint:
    section = Section(path, "state_dict", tuple(entry(key) for key in keys), (ExtraEntry("extra"),))
    return Checkpoint("no file", "torch_zip", 0, (section,))


def renames(pairs: dict[str, str], dropped: tuple[str, ...] = ()) -> Plan:
    outputs = tuple(Output("", new, Ref(old)) for old, new in pairs.items())
    return Plan(outputs, tuple(Dropped("", key, "because") for key in dropped))


A, B = Ref("a"), Ref("b")
KEPT = Dropped("", "extra", "because")
CHECKED: dict[str, tuple[Plan, tuple[str, ...], list[str]]] = {
    "every key is used or dropped": (renames({"a": "x", "extra": "extra"}, ("b",)), ("a", "b"), []),
    "swapped names": (renames({"a": "b", "b": "a", "extra": "extra"}), ("a", "b"), []),
    "one tensor under two keys": (
        Plan((Output("", "x", A), Output("", "y", A)), (KEPT,)),
        ("a",),
        [],
    ),
    "a section that is not in the plan": (Plan(), ("a",), []),
    "a missing section": (
        Plan((Output("model", "x", A),)),
        ("a",),
        ["the plan rewrites a section that the checkpoint does not have @ model"],
    ),
    "a colliding constant": (
        Plan((Output("", "x", Op("aten.zeros.default", ((2,),))), Output("", "x", A)), (KEPT,)),
        ("a",),
        ["2 sources would be written to one key (a constant, a) @ x"],
    ),
    "all problems": (
        Plan(
            (
                *renames({"a": "x", "b": "x", "nowhere": "y"}).outputs,
                Output("", "z", Op("opaque", (A,))),
            ),
            (Dropped("", "gone", "because"),),
        ),
        ("a", "b", "c"),
        [
            "2 sources would be written to one key (a, b) @ x",
            "computed by code that is not a tensor operator @ z",
            "neither used nor dropped @ c",
            "neither used nor dropped @ extra",
            "the plan drops a key that the checkpoint does not have @ gone",
            "the plan reads a key that the checkpoint does not have @ nowhere",
        ],
    ),
}


@pytest.mark.parametrize("name", CHECKED)
def test_problems_of_a_plan_are_reported_together(name: str) -> None:
    plan, keys, expected = CHECKED[name]
    assert sorted(map(str, plan.check(checkpoint(*keys)))) == expected


PLAN = Plan(
    (
        Output("m", "x", Op("aten.cat.default", ((Ref("a"), Ref("b")), 0))),
        Output("m", "y", Ref("a")),
    ),
    (Dropped("m", "c", "not wanted"),),
    (ModuleRename("m", "old", "new"),),
)


def test_json_round_trip_without_empty_parts() -> None:
    assert Plan.from_json(json.loads(json.dumps(PLAN.to_json()))) == PLAN
    assert Plan.from_json(Plan().to_json()) == Plan()
    assert Plan().to_json() == {"schema": SCHEMA, "outputs": [], "dropped": []}
    assert PLAN.to_json().keys() == {"schema", "outputs", "dropped", "modules"}


def test_keys_computed_by_model_code_are_listed_by_run() -> None:
    """Runs differ in section and way; renamed keys are not listed."""
    calls = {way: Op(way, ("w",)) for way in BY_CODE}
    outputs = [Output(path, f"{path}.{way}", call) for path in "ab" for way, call in calls.items()]
    mixed = Output("a", "mixed", Op("aten.cat.default", (tuple(calls.values()),)))
    runs = {(path, way): ModelRun(path, way, "m.py:M", {}, {}) for path in "ab" for way in BY_CODE}
    plan = Plan((Output("a", "plain", Ref("w")), *outputs, mixed), runs=tuple(runs.values()))
    found = {(run.section, run.way): keys for run, keys in plan.by_code}
    assert found == {
        (path, way): [f"{path}.{way}", *["mixed"] * (path == "a")] for path, way in runs
    }
    for place, run in runs.items():
        rest = replace(plan, runs=tuple(other for other in plan.runs if other is not run))
        missing = [
            p.key for p in rest.check(checkpoint(path="a")) if "which model's code" in p.problem
        ]
        assert missing == found[place]


# Composition


def random_plan(chance: random.Random, keys: Sequence[str]) -> Plan:
    """Return a plan that renames, concatenates, duplicates or drops each key."""
    outputs, dropped, at = [], [], 0
    remaining = chance.sample(keys, len(keys))
    while remaining:
        parts = [remaining.pop() for _ in range(min(len(remaining), chance.choice([1, 1, 1, 2])))]
        if chance.random() < 0.25:
            dropped += [Dropped("", key, f"{key} is not wanted") for key in parts]
        else:
            source: Expression = (
                Op("aten.cat.default", (tuple(map(Ref, parts)),))
                if len(parts) > 1
                else Ref(parts[0])
            )
            for _ in range(chance.choice([1, 1, 2])):
                outputs.append(Output("", f"k{at}", source))
                at += 1
    return Plan(tuple(outputs), tuple(dropped))


def test_composed_plan_equals_two_plans_in_sequence() -> None:
    for seed in range(200):
        chance = random.Random(seed)
        source = section_of({key: torch.arange(2) + 2 * at for at, key in enumerate("abcdef")})
        whole = Checkpoint("no file", "torch_zip", 0, (source,))
        first = random_plan(chance, list("abcdef"))
        between = apply(first, whole)
        second = random_plan(chance, between.section("").keys) if first.outputs else Plan()
        both = compose(first, second)
        assert both.check(whole) == [], seed
        expected, actual = (
            apply(second, between) if second.sections else between,
            apply(both, whole),
        )
        assert values(actual) == values(expected), seed
        dropped = {drop.key: drop.reason for drop in both.dropped}
        used = {key for output in both.outputs for key in refs(output.source)}
        assert used.isdisjoint(dropped)
        assert {drop.key: drop.reason for drop in first.dropped}.items() <= dropped.items()


def values(found: Checkpoint) -> dict[str, list[int]]:
    return {entry.key: load(entry).tolist() for entry in found.section("").tensors}


def moved(*rows: str) -> tuple[ModuleRename, ...]:
    """Return renames written as "section old new"."""
    return tuple(ModuleRename(*row.split(" ")) for row in rows)


@pytest.mark.parametrize(
    ("first", "second", "both"),
    [
        (["m a b"], ["m b a"], ["m b a"]),
        (["m a b"], ["m a c"], ["m a b"]),
        ([], ["m a c"], ["m a c"]),
        (
            ["m a b", "m c d", "n a x"],
            ["m b z", "m d c", "m e f"],
            ["m a z", "n a x", "m b z", "m d c", "m e f"],
        ),
    ],
)
def test_module_renames_are_chained(first: list[str], second: list[str], both: list[str]) -> None:
    assert in_turn(moved(*first), moved(*second)) == moved(*both)


def broken(**fields: Any) -> dict[str, Any]:
    return {**PLAN.to_json(), **fields}


@pytest.mark.parametrize(
    "value",
    [
        [],
        {"schema": "ckpttool.plan/2"},
        {"schema": SCHEMA, "dropped": []},
        broken(outputs="abc"),
        broken(outputs=None),
        broken(outputs=[1]),
        broken(dropped=[{"section": "", "key": "x"}]),  # without a reason
    ],
)
def test_invalid_plan_is_refused(value: Any) -> None:
    with pytest.raises(CkptError):
        Plan.from_json(value, "plan.json")


@pytest.mark.parametrize(
    ("model", "old", "new", "moves"),
    [
        (
            nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.BatchNorm1d(1))),
            "",
            "module.",
            {"": "module", "0": "module.0", "1": "module.1", "1.0": "module.1.0"},
        ),
        (
            nn.ModuleDict({"a": nn.BatchNorm1d(1), "b": nn.BatchNorm1d(1)}),
            "a.",
            "x.y.",
            {"a": "x.y"},
        ),
        (
            nn.ModuleDict({"a": nn.Sequential(nn.Linear(1, 1), nn.ReLU())}),  # one without tensors
            "a.",
            "b.",
            {"a": "b", "a.0": "b.0", "a.1": "b.1"},
        ),
        (nn.Sequential(nn.Linear(1, 1)), "x.", "y.", {}),
    ],
)
def test_modules_are_renamed_with_their_own_tensors(
    model: nn.Module, old: str, new: str, moves: dict[str, str]
) -> None:
    """A module without tensors is renamed with its parent."""
    state: Any = model.state_dict()
    keys = {key: new + key.removeprefix(old) if key.startswith(old) else key for key in state}
    assert {m.old: m.new for m in module_renames("", state._metadata, keys)} == moves


@pytest.mark.parametrize("path", ["a", "b"])
def test_module_rename_applies_only_to_its_section(path: str) -> None:
    sections = tuple(
        Section(name, "state_dict", (entry("old.w"),), modules={"": {}, "old": {"version": 1}})
        for name in ("a", "b")
    )
    outputs = tuple(Output(name, "new.w", Ref("old.w")) for name in ("a", "b"))
    done = apply(
        Plan(outputs, (), (ModuleRename(path, "old", "new"),)),
        Checkpoint("no file", "torch_zip", 0, sections),
    )
    sections_with_new = [
        section.path for section in done.sections if "new" in (section.modules or {})
    ]
    assert sections_with_new == [path]
