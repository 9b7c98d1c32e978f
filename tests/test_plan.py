"""Plans as data: what makes one unfit, JSON there and back, and how `_metadata` follows renames."""

from __future__ import annotations

import json
from typing import Any

import pytest
from torch import nn

from ckpttool.checkpoint import Checkpoint, ExtraEntry, Section, Span, Storage, TensorEntry
from ckpttool.errors import CkptError
from ckpttool.evaluate.apply import apply
from ckpttool.expression import Op, Ref
from ckpttool.plan import SCHEMA, Dropped, ModuleRename, Output, Plan, module_renames


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


def test_a_plan_that_uses_or_drops_everything_fits() -> None:
    assert problems(renames({"a": "x", "extra": "extra"}, ("b",)), checkpoint("a", "b")) == []


def test_swapped_names_are_no_collision() -> None:
    assert problems(renames({"a": "b", "b": "a", "extra": "extra"}), checkpoint("a", "b")) == []


def test_one_tensor_may_be_written_twice() -> None:
    plan = Plan((Output("", "x", Ref("a")), Output("", "y", Ref("a"))), (Dropped("", "extra", ""),))
    assert problems(plan, checkpoint("a")) == []


def test_every_problem_is_named_at_once() -> None:
    plan = renames({"a": "x", "b": "x", "nowhere": "y"}, ("gone",))
    opaque = Plan((*plan.outputs, Output("", "z", Op("opaque", (Ref("a"),)))), plan.dropped)
    assert problems(opaque, checkpoint("a", "b", "c")) == [
        "2 sources would be written to one key (a, b) @ x",
        "computed by code that is no tensor operator @ z",
        "neither used nor dropped @ c",
        "neither used nor dropped @ extra",
        "the plan drops a key that the checkpoint has not @ gone",
        "the plan reads a key that the checkpoint has not @ nowhere",
    ]


def test_a_plan_for_another_section() -> None:
    plan = Plan((Output("model", "x", Ref("a")),))
    assert problems(plan, checkpoint("a")) == ["the plan rewrites a section that the checkpoint has not @ model"]


def test_sections_that_the_plan_does_not_name_are_left_alone() -> None:
    assert problems(Plan(), checkpoint("a")) == []


PLAN = Plan(
    (Output("m", "x", Op("aten.cat.default", ((Ref("a"), Ref("b")), 0))), Output("m", "y", Ref("a"))),
    (Dropped("m", "c", "not wanted"),),
    (ModuleRename("m", "old", "new"),),
)


def test_json_there_and_back() -> None:
    assert Plan.from_json(json.loads(json.dumps(PLAN.to_json()))) == PLAN


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
    "a float that is none": broken(outputs=[{"section": "", "key": "x", "from": {"float": "x"}}]),
    "an unknown expression": broken(outputs=[{"section": "", "key": "x", "from": {"eval": "1"}}]),
    "a drop without a reason": broken(dropped=[{"section": "", "key": "x"}]),
    "modules that are a number": broken(modules=3),
    "modules that are null": broken(modules=None),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_plans_are_refused_in_words(name: str) -> None:
    with pytest.raises(CkptError):
        Plan.from_json(HOSTILE[name], "plan.json")


def moved(model: nn.Module, renamed: dict[str, str]) -> dict[str, str]:
    """The module paths of the model's `_metadata` that move, by `module_renames`."""
    state: Any = model.state_dict()
    keys = {key: renamed.get(key, key) for key in state}
    return {m.old: m.new for m in module_renames("", state._metadata, keys)}


def test_modules_follow_a_prefix() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.BatchNorm1d(1)))
    renamed = {key: f"module.{key}" for key in model.state_dict()}
    assert moved(model, renamed) == {"": "module", "0": "module.0", "1": "module.1", "1.0": "module.1.0"}


def test_modules_follow_their_own_tensors_only() -> None:
    model = nn.ModuleDict({"a": nn.BatchNorm1d(1), "b": nn.BatchNorm1d(1)})
    assert moved(model, {key: key.replace("a.", "x.y.") for key in model.state_dict()}) == {"a": "x.y"}


def test_a_module_without_tensors_follows_its_parent() -> None:
    model = nn.ModuleDict({"a": nn.Sequential(nn.Linear(1, 1), nn.ReLU())})
    assert moved(model, {key: key.replace("a.", "b.") for key in model.state_dict()}) == {
        "a": "b", "a.0": "b.0", "a.1": "b.1"
    }  # fmt: skip


@pytest.mark.parametrize("path", ["a", "b"])
def test_modules_move_in_their_own_section_alone(path: str) -> None:
    sections = tuple(
        Section(name, "state_dict", (entry("old.w"),), modules={"": {}, "old": {"version": 1}}) for name in ("a", "b")
    )
    outputs = tuple(Output(name, "new.w", Ref("old.w")) for name in ("a", "b"))
    done = apply(
        Plan(outputs, (), (ModuleRename(path, "old", "new"),)), Checkpoint("no file", "torch_zip", 0, sections)
    )
    moved = [section.path for section in done.sections if "new" in (section.modules or {})]
    assert moved == [path]


def test_nothing_moves_where_nothing_is_renamed() -> None:
    assert moved(nn.Sequential(nn.Linear(1, 1)), {}) == {}
