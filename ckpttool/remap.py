"""The plan of a remap: what to drop, the model's way from one form to another, the user's rules, in this order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ckpttool.apply import apply
from ckpttool.checkpoint import Checkpoint, Section
from ckpttool.convert import drop
from ckpttool.errors import Problem, Refused
from ckpttool.expression import Ref
from ckpttool.naming.forms import RUNTIME, SERIALIZED, move, read
from ckpttool.naming.names import Names
from ckpttool.operand import model_section
from ckpttool.plan import Output, Plan, module_renames
from ckpttool.rules import Rule, rename

# What the user calls a form -> the form. An exported program has the runtime names since torch 2.6 (pytorch#137609).
FORMS = {SERIALIZED: SERIALIZED, RUNTIME: RUNTIME, "exported": RUNTIME}


@dataclass(frozen=True, slots=True)
class Remap:
    """What a remap makes of its source. `result` is the checkpoint to be written; `was` and `to` are forms, or None."""

    result: Checkpoint
    plan: Plan
    was: str | None = None
    to: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def counts(self) -> dict[str, int]:
        """How many outputs are renamed, transformed and unchanged."""
        renamed = sum(isinstance(o.source, Ref) and o.source.key != o.key for o in self.plan.outputs)
        transformed = sum(not isinstance(o.source, Ref) for o in self.plan.outputs)
        unchanged = len(self.plan.outputs) - renamed - transformed
        return {"renamed": renamed, "transformed": transformed, "unchanged": unchanged}


def remap(
    source: Checkpoint,
    *,
    names: Names | None = None,
    to: str | None = None,
    was: str | None = None,
    rules: Sequence[Rule] = (),
    drops: Sequence[str] = (),
) -> Remap:
    """Makes and carries out the plan. Raises `Refused`, all problems at once, where it would lose, collide or guess."""
    source, dropped = drop(source, drops) if drops else (source, [])
    if names is None and not rules:
        plan = _identity(source)
        return Remap(source, replace(plan, dropped=tuple(dropped)))
    section = model_section(source)
    notes: list[str] = []
    if names is not None:
        plan, was, notes = _by_model(names, section, to or SERIALIZED, was)
    else:
        plan = _identity_section(section)
    if rules:
        plan = _by_rules(plan, section, rules)
    return Remap(apply(plan, source), replace(plan, dropped=(*plan.dropped, *dropped)), was, to, tuple(notes))


def by_plan(source: Checkpoint, plan: Plan) -> Remap:
    """Carries out a plan that was saved; what it drops outside of sections is dropped by path."""
    inside = {(section.path, key) for section in source.sections for key in section.by_key()}
    paths = [d for d in plan.dropped if (d.section, d.key) not in inside]
    kept = replace(plan, dropped=tuple(d for d in plan.dropped if (d.section, d.key) in inside))
    rest = drop(source, [d.key for d in paths])[0] if paths else source
    return Remap(apply(kept, rest), plan)


def _identity(source: Checkpoint) -> Plan:
    outputs = [output for section in source.sections for output in _identity_section(section).outputs]
    return Plan(tuple(outputs))


def _identity_section(section: Section) -> Plan:
    return Plan(tuple(Output(section.path, key, Ref(key)) for key in section.by_key()))


def _by_model(names: Names, section: Section, to: str, was: str | None) -> tuple[Plan, str, list[str]]:
    target = FORMS[to]
    reading = read(names, section, None if was is None else FORMS[was])
    found = len(reading.match.names)
    if not found:
        raise Refused(
            f"0 of {len(section.by_key())} keys are names of {names.model}",
            hint=f"compare them: ckpttool diff --model {names.model} CKPT",
            problems=[Problem("no name of this model", key) for key in list(section.by_key())[:10]],
        )
    moved = move(names, section, reading, target)
    if moved.problems:
        raise Refused(
            f"the checkpoint does not fit {names.model}: {len(moved.problems)} problems",
            hint="--drop PATTERN leaves keys out; `ckpttool diff --model MODEL CKPT` says more",
            problems=moved.problems,
        )
    notes = []
    if reading.match.missing:
        notes.append(f"{len(reading.match.missing)} names of the model are not in the checkpoint")
    if reading.ambiguous and was is None:
        notes.append(
            "the keys fit the serialized and the runtime form, whose values differ: read as serialized, which is what "
            "state_dict() writes (--from runtime says otherwise)"
        )
    if not names.roundtrips:
        notes.append("this model does not read back all that it writes: see `ckpttool trace`")
    return moved.plan, reading.form, notes


def _by_rules(plan: Plan, section: Section, rules: Sequence[Rule]) -> Plan:
    """The plan with its outputs renamed by the rules. ``_metadata`` follows."""
    renamed = rename([output.key for output in plan.outputs], rules)
    outputs = tuple(replace(output, key=renamed[output.key]) for output in plan.outputs)
    modules = tuple(plan.modules)
    if section.modules is not None:
        moved = {key: new for key, new in renamed.items() if key != new}
        before = {m.old: m.new for m in plan.modules}
        modules = module_renames(section.path, (before.get(path, path) for path in section.modules), moved) or modules
    return replace(plan, outputs=outputs, modules=modules)


def to_json(remapped: Remap, source: str, output: str) -> Mapping[str, object]:
    """The `remap` object of the contract, without its plan."""
    return {
        "schema": "ckpttool.remap/1",
        "source": source,
        "output": output,
        "from": remapped.was,
        "to": remapped.to,
        **remapped.counts,
        "dropped": [".".join(filter(None, (d.section, d.key))) for d in remapped.plan.dropped],
        "optimizer": None,
        "notes": list(remapped.notes),
    }
