"""The steps of a remap that go through a model's names."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import field, replace
from typing import Protocol

from ckpttool.core import expression as ex
from ckpttool.core.checkpoint import Checkpoint, Section
from ckpttool.core.errors import Problem, Refused
from ckpttool.core.expression import Ref
from ckpttool.core.names import RUNTIME, SERIALIZED
from ckpttool.core.plan import Dropped, Output, Plan, compose, in_turn, module_renames
from ckpttool.core.text import plural
from ckpttool.core.values import dataclass
from ckpttool.evaluate.apply import Runner, apply
from ckpttool.evaluate.compare import same_values
from ckpttool.naming import wrappers
from ckpttool.naming.adapters import adapter_of
from ckpttool.naming.call_variants import collapse, expand, settle
from ckpttool.naming.convert import FormPlan, ModelForm, Reading, check_versions, left_to_code, move, read
from ckpttool.naming.match import NameTables
from ckpttool.naming.wrappers import Evidence, strip
from ckpttool.operands.model import ModelOperand
from ckpttool.remapping.rule_effects import RuleEffect


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
    ruled: RuleEffect | None = None
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


def trained(plan: Plan, tables: NameTables, form: str) -> Plan:
    """The plan without what is made of frozen parameters only, as torch's ``ignore_frozen_params``; buffers stay.

    `form` says which names the plan's keys are: ``serialized`` or ``runtime``.
    """
    frozen = {t.fqn for t in tables.names.runtime if t.kind == "parameter" and not t.trainable}

    def is_trained(output: Output) -> bool:
        source = None if form == RUNTIME else tables.saved.get(output.key)
        made_of = {output.key} if source is None else set(ex.refs(source))
        return not made_of <= frozen

    return _only(plan, [output for output in plan.outputs if is_trained(output)], "the parameter is frozen")


def select(plan: Plan, paths: Collection[str], prefix: str) -> tuple[Plan, dict[str, str]]:
    """The plan of the submodule `prefix` alone, under the names that it has; and key -> the submodule's own name.

    `prefix` leaves out the segments of wrappers, which stand at `paths`, or has them all. The wrappers around parts of
    the submodule, and around itself, are in its own names. Raises `Refused` where nothing is below `prefix`.
    """
    keys = [output.key for output in plan.outputs]
    own = {key: rest for key in keys if (rest := _below(key, paths, prefix))}
    own = own or {key: key.removeprefix(prefix + ".") for key in keys if key.startswith(prefix + ".")}
    if not own:
        heads = dict.fromkeys(strip(key, paths).partition(".")[0] for key in keys)
        raise Refused(
            f"no key is below {prefix!r}",
            hint=f"--select takes the dotted path of a submodule; there are {', '.join(list(heads)[:8])}",
        )
    return _only(plan, [output for output in plan.outputs if output.key in own], f"not below {prefix}"), own


def _below(key: str, paths: Collection[str], prefix: str) -> str:
    """What follows `prefix` in the key; empty where the key is not below it."""
    parts = key.split(".")
    for depth in range(1, len(parts)):
        if strip(".".join(parts[:depth]), paths) == prefix:
            return ".".join(parts[depth:])
    return ""


def _only(plan: Plan, outputs: list[Output], reason: str) -> Plan:
    """The plan with these of its outputs; sources that no other output reads are dropped."""
    used = {(output.section, key) for output in outputs for key in ex.refs(output.source)}
    gone = dict.fromkeys((output.section, key) for output in plan.outputs for key in ex.refs(output.source))
    dropped = tuple(Dropped(*place, reason) for place in gone if place not in used)
    return replace(plan, outputs=tuple(outputs), dropped=(*plan.dropped, *dropped))


NO_COUNTER = "AveragedModel's counter, which only that wrapper has"


@dataclass(frozen=True, slots=True)
class ByModel:
    """From the keys that are there to the form `to` of the model that saved them.

    `source_form` says which form the keys are in, where it is not to be recognised. With `trainable_only` what is made
    of frozen parameters only is left out. `tie`: a tensor that has several names there gets all of them.
    `code` is the model itself, which computes what its names do not say.
    """

    tables: NameTables
    to: ModelForm
    source_form: ModelForm | None = None
    trainable_only: bool = False
    tie: bool = True
    code: ModelOperand | None = None

    def apply(self, draft: Draft) -> Draft:
        """Raises `Refused` where the keys are not this model's."""
        form = None if self.source_form is None else self.source_form.names
        section, reading = draft.section, read(self.tables, draft.section, form)
        counted = wrappers.counters([entry.key for entry in section.tensors])
        counters = [key for key in counted if key in reading.match.unmatched]
        if counters:
            section = replace(section, tensors=tuple(entry for entry in section.tensors if entry.key not in counters))
            reading = read(self.tables, section, form)
        plan = self._move(section, reading).plan
        missing = lacking(self.tables, self.to, {output.key for output in plan.outputs})
        if self.trainable_only:
            wanted = Plan(tuple(Output(section.path, key, Ref(key)) for key in missing))
            missing = tuple(output.key for output in trained(wanted, self.tables, self.to.names).outputs)
        notes = self._notes(reading)
        return replace(
            draft,
            plan=trained(plan, self.tables, self.to.names) if self.trainable_only else plan,
            canonical=self.tables.serialized_names,
            form=(draft.wrappers.form or "wrapped") if reading.match.wrapped else reading.form,
            missing=missing,
            counters=tuple(counters),
            notes=(*draft.notes, *notes),
            runners=_with_runner(draft.runners, plan, self.code),
        )

    def _move(self, section: Section, reading: Reading) -> FormPlan:
        names = self.tables.names
        if not reading.match.names:
            adapter = adapter_of(section.by_key())
            raise Refused(
                f"0 of {len(section.by_key())} keys are names of {names.model}",
                hint=f"compare them: ckpttool diff --model {names.model} CKPT"
                if adapter is None or not adapter.alone
                else f"{adapter.title} without its model: --to-model NEW says what it is to be put on, and so do rules",
                problems=[Problem("no name of this model", key) for key in section.by_key()],
            )
        if reading.form != self.to.names:
            check_versions(names, section, reading)
        moved = move(self.tables, section, reading, self.to.names, self.tie)
        moved = self._respelled(_by_code(moved, self.tables, section, reading, self.code), section, reading)
        problems = [*moved.problems, *_lost(section, moved.copies)]
        if problems:
            raise Refused(
                f"the checkpoint does not fit {names.model}: {plural(len(problems), 'problem')}",
                hint=f"compare them: ckpttool diff --model {names.model} CKPT; --rule 'FROM => TO' renames keys",
                problems=problems,
            )
        return moved

    def _respelled(self, moved: FormPlan, section: Section, reading: Reading) -> FormPlan:
        """With call variants settled: an unflattened program has all of them, an exported one has none."""
        dropped, problems = settle(reading.match.variants, reading.match.names, section)
        outputs = list(moved.plan.outputs)
        if self.to is ModelForm.EXPORTED:
            outputs, more, others = collapse(outputs, self.tables.first, section)
            dropped, problems = dropped + more, problems + others
        elif self.to is ModelForm.UNFLATTENED:
            outputs = expand(outputs, self.tables.first)
        plan = replace(moved.plan, outputs=tuple(outputs), dropped=(*moved.plan.dropped, *dropped))
        return replace(moved, plan=plan, problems=(*moved.problems, *problems))

    def _notes(self, reading: Reading) -> list[str]:
        notes = []
        if reading.ambiguous:
            notes.append(
                "the keys fit the serialized and the runtime form, whose values differ: read as serialized, which is "
                "what state_dict() writes (--from runtime says otherwise)"
            )
        if not self.tables.names.roundtrips:
            notes.append("this model does not read back all that it writes: see `ckpttool trace`")
        return notes


@dataclass(frozen=True, slots=True)
class ToModel:
    """From one model's runtime names to the form `to` of another model with the same tensors."""

    tables: NameTables
    to: ModelForm
    code: ModelOperand | None = None

    def apply(self, draft: Draft) -> Draft:
        """Raises `Refused` where the tensors are not that model's."""
        names, section = self.tables.names, draft.evaluated()
        reading = read(self.tables, section, RUNTIME)
        moved = move(self.tables, section, reading, self.to.names)
        moved = _by_code(moved, self.tables, section, reading, self.code)
        problems = [*moved.problems, *self._misfits(section, reading), *_lost(section, moved.copies)]
        if problems:
            raise Refused(
                f"the tensors do not fit {names.model}: {plural(len(problems), 'problem')}",
                hint="rename keys with --rule 'FROM => TO', or name the model that has a place for them",
                problems=problems,
            )
        return replace(
            draft,
            plan=compose(draft.plan, moved.plan),
            canonical=self.tables.serialized_names,
            runners=_with_runner(draft.runners, moved.plan, self.code),
            missing=lacking(self.tables, self.to, {output.key for output in moved.plan.outputs}),
        )

    def _misfits(self, section: Section, reading: Reading) -> list[Problem]:
        problems = []
        for entry in section.tensors:
            shape = self.tables.runtime_likeness.get(reading.match.names.get(entry.key, ""), ("", None))[1]
            if shape is not None and shape != entry.shape:
                text = f"shape {list(entry.shape)}, {self.tables.names.model} has {list(shape)}"
                problems.append(Problem(text, entry.key, "shape"))
        return problems


def lacking(tables: NameTables, to: ModelForm, keys: Collection[str]) -> tuple[str, ...]:
    """The names of the form that are not among `keys` and that a load needs.

    Second names of a tensor and buffers that are not saved may be absent; what is saved and is no tensor may not.
    """
    if to.names == SERIALIZED:
        spare = {*tables.spare_keys} - {*tables.names.extra_state}
        return tuple(key for key in tables.serialized_names if key not in keys and key not in spare)
    spare = {*tables.spare_fqns}
    return tuple(name for name in tables.runtime_names if name not in keys and name not in spare)


@dataclass(frozen=True, slots=True)
class Counters:
    """Puts the counters of AveragedModels back, or leaves them out, after the steps through models' names."""

    keep: bool

    def apply(self, draft: Draft) -> Draft:
        """Where they are kept they come first."""
        path, keys = draft.section.path, draft.counters
        if self.keep:
            plan = replace(draft.plan, outputs=(*(Output(path, key, Ref(key)) for key in keys), *draft.plan.outputs))
        else:
            gone = (Dropped(path, key, NO_COUNTER) for key in keys)
            plan = replace(draft.plan, dropped=(*draft.plan.dropped, *gone))
        return replace(
            draft, plan=plan, counters=(), canonical={**draft.canonical, **dict.fromkeys(keys, wrappers.COUNTER)}
        )


def recorded(tables: NameTables, result: Checkpoint, path: str, form: str) -> Checkpoint:
    """`result` with its form recorded where nobody could tell it from the names, dtypes and shapes."""
    section = replace(result.section(path), form=None)
    alike = tables.forms_agree and tables.serialized_names.keys() <= section.by_key().keys()
    told = alike or read(tables, section).form == form
    section = replace(section, form=None if told else form)
    return replace(result, sections=tuple(section if s.path == path else s for s in result.sections))


def _by_code(
    moved: FormPlan, tables: NameTables, section: Section, reading: Reading, code: ModelOperand | None
) -> FormPlan:
    if code is None:
        return moved
    return replace(moved, plan=left_to_code(moved.plan, tables, section, reading, code.arguments))


def _with_runner(runners: Mapping[str, Runner], plan: Plan, code: ModelOperand | None) -> Mapping[str, Runner]:
    return runners if code is None else {**runners, **{run.way: code.run for run in plan.runs}}


def _lost(section: Section, copies: Sequence[tuple[str, str]]) -> list[Problem]:
    """Keys whose values the result would not hold: they are taken for a copy of another key, and are none."""
    have = section.by_key()
    return [
        Problem(f"the model takes it for a copy of {twin}, and its values are others: they would be lost", key)
        for key, twin in copies
        if not same_values(have[key], have[twin])
    ]
