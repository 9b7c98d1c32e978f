"""A remap half-way, and what its steps have in common."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import field, replace
from typing import Protocol

from ckpttool.checkpoint import Checkpoint, Section
from ckpttool.edits.remap.ruled import Ruled
from ckpttool.evaluate.apply import Runner, apply
from ckpttool.expression import Ref
from ckpttool.naming.wrappers.chain import Evidence
from ckpttool.plan import Output, Plan, in_turn, module_renames
from ckpttool.values import dataclass


@dataclass(frozen=True, slots=True)
class Draft:
    """The plan so far for one section, as it was read. Every step makes a new one.

    `wrappers` is what the section's keys show of wrappers; `canonical` maps the keys that the plan writes to canonical
    names, `form` says which form the section's keys are in. `counters` are keys of AveragedModels' counters that stand
    aside while a model's names, which have none, are gone through. `runners` run models' code for the plan. `ruled` is
    what the rules did. `missing` are the keys of the target model that the plan does not write.
    """

    section: Section
    plan: Plan
    wrappers: Evidence
    canonical: Mapping[str, str]
    form: str | None = None
    counters: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    runners: Mapping[str, Runner] = field(default_factory=dict)
    ruled: Ruled | None = None
    missing: tuple[str, ...] = ()

    @property
    def keys(self) -> list[str]:
        """The keys that the plan writes."""
        return [output.key for output in self.plan.outputs]

    def evaluated(self) -> Section:
        """The section as the plan makes it, on the index; without the counters that stand aside."""
        tensors = tuple(entry for entry in self.section.tensors if entry.key not in self.counters)
        section = replace(self.section, tensors=tensors)
        return apply(self.plan, Checkpoint("", "", 0, (section,)), self.runners).section(section.path)

    def renamed(self, names: Mapping[str, str]) -> Plan:
        """The plan with its outputs under new names (what has none keeps its own). ``_metadata`` follows."""
        return renamed(self.plan, self.section, names)


class Step(Protocol):
    """One step of a remap; a small value."""

    def apply(self, draft: Draft) -> Draft:
        """The draft after it. Raises `Refused`, all problems at once, where it would lose, collide or guess."""


def carried(sections: Iterable[Section]) -> Plan:
    """The plan that leaves every key its name."""
    return Plan(tuple(Output(section.path, key, Ref(key)) for section in sections for key in section.keys))


def renamed(plan: Plan, section: Section, names: Mapping[str, str]) -> Plan:
    """The plan for `section` with its outputs under new names. ``_metadata`` follows."""
    outputs = tuple(Output(output.section, names.get(output.key, output.key), output.source) for output in plan.outputs)
    modules = tuple(plan.modules)
    if section.modules is not None:
        moved = {key: new for key, new in names.items() if key != new}
        before = {m.old: m.new for m in plan.modules}
        paths = (before.get(path, path) for path in section.modules)
        modules = in_turn(modules, module_renames(section.path, paths, moved))
    return replace(plan, outputs=outputs, modules=modules)
