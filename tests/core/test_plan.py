"""Plans as data: checks against a checkpoint, JSON round trip, composition, and renames in `_metadata`."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from ckpttool.core.checkpoint import Checkpoint, ExtraEntry, Section, Span, Storage, TensorEntry
from ckpttool.core.errors import CkptError
from ckpttool.core.expression import BY_CODE, Expression, Op, Ref, refs
from ckpttool.core.plan import SCHEMA, Dropped, ModelRun, ModuleRename, Output, Plan, compose, in_turn, module_renames
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


def problems(plan: Plan, source: Checkpoint) -> list[str]:
    return sorted(map(str, plan.check(source)))


def test_plan_that_uses_or_drops_every_key_is_valid() -> None:
    assert problems(renames({"a": "x", "extra": "extra"}, ("b",)), checkpoint("a", "b")) == []


def test_swapped_names_do_not_collide() -> None:
    assert problems(renames({"a": "b", "b": "a", "extra": "extra"}), checkpoint("a", "b")) == []


def test_tensor_may_be_written_under_two_keys() -> None:
    plan = Plan((Output("", "x", Ref("a")), Output("", "y", Ref("a"))), (Dropped("", "extra", ""),))
    assert problems(plan, checkpoint("a")) == []


def test_all_problems_are_reported_together() -> None:
    plan = renames({"a": "x", "b": "x", "nowhere": "y"}, ("gone",))
    opaque = Plan((*plan.outputs, Output("", "z", Op("opaque", (Ref("a"),)))), plan.dropped)
    assert problems(opaque, checkpoint("a", "b", "c")) == [
        "2 sources would be written to one key (a, b) @ x",
        "computed by code that is not a tensor operator @ z",
        "neither used nor dropped @ c",
        "neither used nor dropped @ extra",
        "the plan drops a key that the checkpoint has not @ gone",
        "the plan reads a key that the checkpoint has not @ nowhere",
    ]


def test_missing_section_is_reported() -> None:
    plan = Plan((Output("model", "x", Ref("a")),))
    assert problems(plan, checkpoint("a")) == ["the plan rewrites a section that the checkpoint has not @ model"]


def test_sections_not_in_the_plan_are_unchanged() -> None:
    assert problems(Plan(), checkpoint("a")) == []


PLAN = Plan(
    (Output("m", "x", Op("aten.cat.default", ((Ref("a"), Ref("b")), 0))), Output("m", "y", Ref("a"))),
    (Dropped("m", "c", "not wanted"),),
    (ModuleRename("m", "old", "new"),),
)


def test_json_round_trip() -> None:
    assert Plan.from_json(json.loads(json.dumps(PLAN.to_json()))) == PLAN


def test_empty_parts_of_a_plan_are_not_written() -> None:
    assert Plan().to_json() == {"schema": SCHEMA, "outputs": [], "dropped": []}
    assert PLAN.to_json().keys() == {"schema", "outputs", "dropped", "modules"}
    assert Plan.from_json(Plan().to_json()) == Plan()


def test_keys_computed_by_model_code_are_listed_by_run() -> None:
    """Runs differ in section and way; renamed keys are not listed."""
    calls = {way: Op(way, ("w",)) for way in BY_CODE}
    outputs = [Output(path, f"{path}.{way}", call) for path in "ab" for way, call in calls.items()]
    mixed = Output("a", "mixed", Op("aten.cat.default", (tuple(calls.values()),)))
    runs = {(path, way): ModelRun(path, way, "m.py:M", {}, {}) for path in "ab" for way in BY_CODE}
    plan = Plan((Output("a", "plain", Ref("w")), *outputs, mixed), runs=tuple(runs.values()))
    found = {(run.section, run.way): keys for run, keys in plan.by_code}
    assert found == {(path, way): [f"{path}.{way}", *["mixed"] * (path == "a")] for path, way in runs}
    for place, run in runs.items():
        rest = replace(plan, runs=tuple(other for other in plan.runs if other is not run))
        missing = [p.key for p in rest.check(checkpoint(path="a")) if "which model's code" in p.problem]
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
            source: Expression = Op("aten.cat.default", (tuple(map(Ref, parts)),)) if len(parts) > 1 else Ref(parts[0])
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
        expected, actual = apply(second, between) if second.sections else between, apply(both, whole)
        assert values(actual) == values(expected), seed
        dropped = {drop.key: drop.reason for drop in both.dropped}
        used = {key for output in both.outputs for key in refs(output.source)}
        assert used.isdisjoint(dropped)
        assert {drop.key: drop.reason for drop in first.dropped}.items() <= dropped.items()


def values(found: Checkpoint) -> dict[str, list[int]]:
    return {entry.key: load(entry).tolist() for entry in found.section("").tensors}


def test_colliding_constant_is_named() -> None:
    outputs = (Output("", "x", Op("aten.zeros.default", ((2,),))), Output("", "x", Ref("a")))
    assert problems(Plan(outputs, (Dropped("", "extra", "because"),)), checkpoint("a")) == [
        "2 sources would be written to one key (a constant, a) @ x"
    ]


def test_module_renamed_back_keeps_only_the_last_rename() -> None:
    there, back, other = ModuleRename("", "a", "b"), ModuleRename("", "b", "a"), ModuleRename("", "a", "c")
    assert in_turn([there], [back]) == (back,)
    assert in_turn([there], [other]) == (there,)
    assert in_turn([], [other]) == (other,)


def test_module_renames_are_chained() -> None:
    first = [ModuleRename("m", "a", "b"), ModuleRename("m", "c", "d"), ModuleRename("n", "a", "x")]
    second = [ModuleRename("m", "b", "z"), ModuleRename("m", "d", "c"), ModuleRename("m", "e", "f")]
    assert in_turn(first, second) == (
        ModuleRename("m", "a", "z"), ModuleRename("n", "a", "x"), ModuleRename("m", "b", "z"),
        ModuleRename("m", "d", "c"), ModuleRename("m", "e", "f"),
    )  # fmt: skip


def broken(**fields: Any) -> dict[str, Any]:
    return {**PLAN.to_json(), **fields}


HOSTILE: dict[str, Any] = {
    "a list": [],
    "another schema": {"schema": "ckpttool.plan/2"},
    "no outputs": {"schema": SCHEMA, "dropped": []},
    "outputs that are text": broken(outputs="abc"),
    "outputs that are null": broken(outputs=None),
    "an output that is a number": broken(outputs=[1]),
    "a key that is a number": broken(outputs=[{"section": "", "key": 1, "from": {"ref": "a"}}]),
    "a literal as a tensor": broken(outputs=[{"section": "", "key": "x", "from": 1}]),
    "text that is not a float": broken(outputs=[{"section": "", "key": "x", "from": {"float": "x"}}]),
    "an unknown expression": broken(outputs=[{"section": "", "key": "x", "from": {"eval": "1"}}]),
    "a drop without a reason": broken(dropped=[{"section": "", "key": "x"}]),
    "modules that are a number": broken(modules=3),
    "modules that are null": broken(modules=None),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_invalid_plan_is_refused(name: str) -> None:
    with pytest.raises(CkptError):
        Plan.from_json(HOSTILE[name], "plan.json")


def module_moves(model: nn.Module, renamed: dict[str, str]) -> dict[str, str]:
    """Return the renamed module paths in the model's `_metadata`."""
    state: Any = model.state_dict()
    keys = {key: renamed.get(key, key) for key in state}
    return {m.old: m.new for m in module_renames("", state._metadata, keys)}


def test_prefix_renames_all_modules() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.BatchNorm1d(1)))
    renamed = {key: f"module.{key}" for key in model.state_dict()}
    assert module_moves(model, renamed) == {"": "module", "0": "module.0", "1": "module.1", "1.0": "module.1.0"}


def test_module_is_renamed_only_with_its_own_tensors() -> None:
    model = nn.ModuleDict({"a": nn.BatchNorm1d(1), "b": nn.BatchNorm1d(1)})
    assert module_moves(model, {key: key.replace("a.", "x.y.") for key in model.state_dict()}) == {"a": "x.y"}


def test_module_without_tensors_is_renamed_with_its_parent() -> None:
    model = nn.ModuleDict({"a": nn.Sequential(nn.Linear(1, 1), nn.ReLU())})
    assert module_moves(model, {key: key.replace("a.", "b.") for key in model.state_dict()}) == {
        "a": "b", "a.0": "b.0", "a.1": "b.1"
    }  # fmt: skip


@pytest.mark.parametrize("path", ["a", "b"])
def test_module_rename_applies_only_to_its_section(path: str) -> None:
    sections = tuple(
        Section(name, "state_dict", (entry("old.w"),), modules={"": {}, "old": {"version": 1}}) for name in ("a", "b")
    )
    outputs = tuple(Output(name, "new.w", Ref("old.w")) for name in ("a", "b"))
    done = apply(
        Plan(outputs, (), (ModuleRename(path, "old", "new"),)), Checkpoint("no file", "torch_zip", 0, sections)
    )
    sections_with_new = [section.path for section in done.sections if "new" in (section.modules or {})]
    assert sections_with_new == [path]


def test_modules_are_not_renamed_without_renamed_keys() -> None:
    assert module_moves(nn.Sequential(nn.Linear(1, 1)), {}) == {}
