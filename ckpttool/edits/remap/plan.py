"""The plan of a remap: what to drop, the model's way from one form to another, the user's rules, in this order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ckpttool.checkpoint import Checkpoint, Section
from ckpttool.edits.remap.drop import drop, without
from ckpttool.edits.remap.narrow import select, trained
from ckpttool.edits.remap.optimizer import OptimizerRemap, Wanted, remap_optimizers
from ckpttool.edits.remap.optimizer import to_json as optimizer_json
from ckpttool.edits.rules.patterns import Rule, rename
from ckpttool.edits.rules.steps import Rename, Step, plan_of
from ckpttool.errors import Problem, Refused
from ckpttool.evaluate.apply import apply
from ckpttool.evaluate.compare import same_values
from ckpttool.expression import Ref
from ckpttool.names import RUNTIME, SERIALIZED, Names
from ckpttool.naming.alignment import pairs
from ckpttool.naming.call_variants import collapse, expand, settle
from ckpttool.naming.forms import Move, Reading, move, read
from ckpttool.naming.name_tables import Relation
from ckpttool.naming.wrappers import chain
from ckpttool.naming.wrappers.chain import Evidence
from ckpttool.naming.wrappers.table import strip
from ckpttool.operands.checkpoint import model_section
from ckpttool.plan import Dropped, Output, Plan, compose, in_turn, module_renames
from ckpttool.words import plural

# What the user calls a form -> the form. An exported program has the runtime names since torch 2.6 (pytorch#137609).
FORMS = {SERIALIZED: SERIALIZED, RUNTIME: RUNTIME, "exported": RUNTIME, "unflattened": RUNTIME}

_COUNTER = "AveragedModel's counter, which only that wrapper has"


@dataclass(frozen=True, slots=True)
class Remap:
    """What a remap makes of its source. `result` is the checkpoint to be written; `was` and `to` are forms, or None."""

    result: Checkpoint
    plan: Plan
    was: str | None = None
    to: str | None = None
    notes: tuple[str, ...] = ()
    optimizers: tuple[OptimizerRemap, ...] = ()

    @property
    def counts(self) -> dict[str, int]:
        """How many outputs are renamed, transformed and unchanged."""
        renamed = sum(isinstance(o.source, Ref) and o.source.key != o.key for o in self.plan.outputs)
        transformed = sum(not isinstance(o.source, Ref) for o in self.plan.outputs)
        unchanged = len(self.plan.outputs) - renamed - transformed
        return {"renamed": renamed, "transformed": transformed, "unchanged": unchanged}


@dataclass(frozen=True, slots=True)
class Way:
    """What is asked of the model section's keys.

    `names` are those of the model that saved it; `to` is a form of `FORMS` or a chain of wrappers (`naming.chain`),
    `was` the form that the keys are in, where it is not to be recognised. `to_names` are the names of another model
    that is to load the tensors. `like` is a state dict whose keys' form is taken over. `rules` come last, or the
    `steps` of a rules file.
    `select` narrows to one submodule, under its own names unless `keep_prefix`, and `trainable_only` to what `names`
    say is trained.
    """

    names: Names | None = None
    to: str | None = None
    was: str | None = None
    to_names: Names | None = None
    like: Section | None = None
    rules: Sequence[Rule] = ()
    select: str | None = None
    keep_prefix: bool = False
    trainable_only: bool = False
    steps: Sequence[Step] = ()

    @property
    def changes(self) -> bool:
        """Whether anything is asked at all."""
        return self != Way()


def remap(source: Checkpoint, way: Way = Way(), drops: Sequence[str] = ()) -> Remap:
    """Makes and carries out the plan. Raises `Refused`, all problems at once, where it would lose, collide or guess."""
    source, dropped = drop(source, drops) if drops else (source, [])
    if not way.changes:
        return Remap(source, replace(_carried(source.sections), dropped=tuple(dropped)))
    section = model_section(source)
    touched = {gone.section for gone in dropped} - {section.path}
    rest = _carried(other for other in source.sections if other.path in touched)
    plan, was, notes = _plan(section, way, chain.is_lightning(source.others, section.path))
    notes += _not_narrowed(source, way)
    result = apply(plan, source)
    if way.names is not None and way.to_names is None and way.select is None and (way.to or SERIALIZED) in FORMS:
        result = _recorded(Relation(way.names), result, section.path, FORMS[way.to or SERIALIZED])
    whole = Plan((*plan.outputs, *rest.outputs), (*plan.dropped, *dropped), plan.modules)
    return Remap(result, whole, was, way.to, tuple(notes))


def _plan(section: Section, way: Way, lightning: bool) -> tuple[Plan, str | None, list[str]]:
    """The model's way, then the submodule, the wrappers, the rules; the form that the keys were in; notes."""
    plan, seen, notes = _carried([section]), _evidence(list(section.by_key()), way, lightning), list[str]()
    was, known = seen.form, {key: strip(key, seen.paths) for key in section.by_key()}
    if way.names is not None:
        plan, was, known, notes = _by_models(section, way, way.names, seen)
    if way.select is not None:
        plan, known = _selected(plan, section, way, seen)
    if way.like is not None:
        plan, more = _like(plan, section, way.like)
        notes += more
    elif way.to is not None and (way.names is None or way.to not in FORMS):
        plan = _rewrapped(plan, section, known, way.to)
    if way.rules:
        plan = _renamed(plan, section, rename([output.key for output in plan.outputs], way.rules))
    if way.steps:
        plan = compose(plan, plan_of(way.steps, _evaluated(plan, section)))
    return plan, was, notes


def _evidence(keys: Sequence[str], way: Way, lightning: bool) -> Evidence:
    """Where wrappers stand in the keys: the user says so, or else the keys do."""
    if way.was is None:
        return chain.weigh(keys, lightning=lightning)
    if way.was in FORMS:  # these are names without wrappers
        return Evidence((), (), frozenset())
    return chain.said(chain.parse(way.was), keys)


def _by_models(section: Section, way: Way, names: Names, seen: Evidence) -> tuple[Plan, str, dict[str, str], list[str]]:
    """The way through one model's names, or two; the form the keys were in; key -> canonical name of what comes out."""
    relation = Relation(names)
    form = _model_form(relation, way)
    counters = dict.fromkeys(key for key in _counters(section) if key not in relation.serialized_names)
    rest = replace(section, tensors=tuple(entry for entry in section.tensors if entry.key not in counters))
    said = way.was if way.was in FORMS else None
    plan, reading, notes = _by_model(relation, rest, form, said, tie=way.like is None)
    was = (seen.form or "wrapped") if reading.match.wrapped else reading.form
    if way.trainable_only:
        plan = trained(plan, relation, FORMS[form])
    if way.to_names is not None:
        relation = Relation(way.to_names)
        plan, more = _by_other_model(plan, rest, relation, way)
        notes += more
    if way.like is None and (way.to is None or way.to in FORMS):
        plan = replace(plan, dropped=(*plan.dropped, *(Dropped(section.path, key, _COUNTER) for key in counters)))
    else:
        plan = replace(plan, outputs=(*(Output(section.path, key, Ref(key)) for key in counters), *plan.outputs))
    return plan, was, {**relation.serialized_names, **dict.fromkeys(counters, chain.COUNTER)}, notes


def _selected(plan: Plan, section: Section, way: Way, seen: Evidence) -> tuple[Plan, dict[str, str]]:
    """The plan of one submodule, and key -> canonical name of what it writes."""
    prefix = way.select or ""
    paths = seen.paths if way.names is None else chain.recognise(output.key for output in plan.outputs)
    plan, own = select(plan, paths, prefix)
    canonical = {key: strip(key, paths) for key in own}
    if way.keep_prefix:
        return plan, canonical
    return _renamed(plan, section, own), {own[key]: name.removeprefix(f"{prefix}.") for key, name in canonical.items()}


def _counters(section: Section) -> list[str]:
    return chain.counters([entry.key for entry in section.tensors])


def _like(plan: Plan, section: Section, other: Section) -> tuple[Plan, list[str]]:
    """The plan with the keys of another checkpoint; what that one has not keeps its name, and is noted."""
    keys = [output.key for output in plan.outputs]
    names = pairs(keys, other.by_key())
    own = [key for key in keys if key not in names]
    notes = [f"the other checkpoint has no name for {plural(len(own), 'key')}: {', '.join(own[:5])}"] if own else []
    return _renamed(plan, section, names), notes


def _not_narrowed(source: Checkpoint, way: Way) -> list[str]:
    paths = [section.path for section in source.sections if section.kind == "optimizer"]
    still = []
    if way.select is not None:
        still.append("the state of all parameters")
    if any(not isinstance(step, Rename) for step in way.steps):
        still.append("the state of the parameters as they were before the rules file")
    return [f"{path} still holds {what} (--drop {path} leaves it out)" for path in paths for what in still]


def _model_form(relation: Relation, way: Way) -> str:
    """The form that the model's own step leads to; another model's step begins at the runtime names."""
    if way.to_names is not None:
        return RUNTIME
    if way.like is not None:
        return read(relation, way.like).form
    return SERIALIZED if way.to is None or way.to not in FORMS else way.to


def _by_other_model(plan: Plan, section: Section, relation: Relation, way: Way) -> tuple[Plan, list[str]]:
    """The plan, which leads to one model's runtime names, led on to the keys of another model with the same tensors."""
    at_runtime = _evaluated(plan, section)
    reading = read(relation, at_runtime, RUNTIME)
    moved = move(relation, at_runtime, reading, FORMS.get(way.to or "", SERIALIZED))
    misfits = [
        Problem(f"shape {list(entry.shape)}, {relation.names.model} has {list(shape)}", entry.key)
        for entry in at_runtime.tensors
        if (shape := relation.runtime_likeness.get(reading.match.names.get(entry.key, ""), ("", None))[1]) is not None
        and shape != entry.shape
    ]
    problems = [*moved.problems, *misfits, *_lost(at_runtime, moved.copies)]
    if problems:
        raise Refused(
            f"the tensors do not fit {relation.names.model}: {plural(len(problems), 'problem')}",
            hint="--drop PATTERN leaves out what that model has no place for",
            problems=problems,
        )
    new = reading.match.missing
    notes = [f"new in {relation.names.model}, and not in the checkpoint: {', '.join(new)}"] if new else []
    return compose(plan, moved.plan), notes


def _evaluated(plan: Plan, section: Section) -> Section:
    """The section as `plan` makes it, on the index."""
    return apply(plan, Checkpoint("", "", 0, (section,))).section(section.path)


def _rewrapped(plan: Plan, section: Section, known: Mapping[str, str], to: str) -> Plan:
    """The plan with wrappers' segments taken out of its keys, and those of the chain that is asked for put in.

    `known` maps keys to canonical names.
    """
    keys = [output.key for output in plan.outputs]
    wanted = chain.Chain(()) if to in FORMS else chain.parse(to)
    canonical = {key: known.get(key, key) for key in keys}
    counted = [key for key in _counters(section) if key in canonical]
    names, gone = chain.rewrap(canonical, wanted, counted)
    dropped = [Dropped(section.path, key, _COUNTER) for key in gone]
    kept = tuple(output for output in plan.outputs if output.key in names)
    plan = _renamed(replace(plan, outputs=kept, dropped=(*plan.dropped, *dropped)), section, names)
    made = tuple(Output(section.path, key, source) for key, source in chain.new_counter(wanted, counted).items())
    return replace(plan, outputs=(*made, *plan.outputs))


def with_optimizers(done: Remap, wanted: Wanted) -> Remap:
    """`done` with the optimizers of its result as `wanted`; the plan is silent on those that change."""
    result, optimizers = remap_optimizers(done.result, wanted)
    notes = [note for one in optimizers for note in one.notes]
    changed = {one.section for one in optimizers}
    plan = replace(done.plan, outputs=tuple(o for o in done.plan.outputs if o.section not in changed))
    return replace(done, result=result, plan=plan, optimizers=optimizers, notes=(*done.notes, *notes))


def by_plan(source: Checkpoint, plan: Plan) -> Remap:
    """Carries out a plan that was saved; what it drops outside of state dicts are whole sections and other contents."""
    paths = {*source.others, *(section.path for section in source.sections)}
    whole = [d for d in plan.dropped if not d.section and d.key in paths and not _holds(source, d)]
    rest = replace(plan, dropped=tuple(d for d in plan.dropped if d not in whole))
    return Remap(apply(rest, without(source, [d.key for d in whole])), plan)


def _holds(source: Checkpoint, dropped: Dropped) -> bool:
    return any(section.path == dropped.section and dropped.key in section.by_key() for section in source.sections)


def _carried(sections: Iterable[Section]) -> Plan:
    """The plan that leaves every key its name."""
    return Plan(tuple(Output(section.path, key, Ref(key)) for section in sections for key in section.by_key()))


def _by_model(
    relation: Relation, section: Section, to: str, was: str | None, tie: bool
) -> tuple[Plan, Reading, list[str]]:
    names, target = relation.names, FORMS[to]
    reading = read(relation, section, None if was is None else FORMS[was])
    if not reading.match.names:
        raise Refused(
            f"0 of {len(section.by_key())} keys are names of {names.model}",
            hint=f"compare them: ckpttool diff --model {names.model} CKPT",
            problems=[Problem("no name of this model", key) for key in list(section.by_key())[:10]],
        )
    moved = _respelled(move(relation, section, reading, target, tie), relation, section, reading, to)
    problems = [*moved.problems, *_lost(section, moved.copies)]
    if problems:
        raise Refused(
            f"the checkpoint does not fit {names.model}: {plural(len(problems), 'problem')}",
            hint="--drop PATTERN leaves keys out; `ckpttool diff --model MODEL CKPT` says more",
            problems=problems,
        )
    notes = []
    if reading.match.missing:
        notes.append(f"{plural(len(reading.match.missing), 'name')} of the model not in the checkpoint")
    if reading.ambiguous:
        notes.append(
            "the keys fit the serialized and the runtime form, whose values differ: read as serialized, which is what "
            "state_dict() writes (--from runtime says otherwise)"
        )
    if not names.roundtrips:
        notes.append("this model does not read back all that it writes: see `ckpttool trace`")
    return moved.plan, reading, notes


def _respelled(moved: Move, relation: Relation, section: Section, reading: Reading, to: str) -> Move:
    """The move with its call variants settled: an unflattened program has all of them, an exported one has none."""
    dropped, problems = settle(reading.match.variants, reading.match.names, section)
    outputs = list(moved.plan.outputs)
    if to == "exported":
        outputs, more, others = collapse(outputs, relation.first, section)
        dropped, problems = dropped + more, problems + others
    elif to == "unflattened":
        outputs = expand(outputs, relation.first)
    plan = replace(moved.plan, outputs=tuple(outputs), dropped=(*moved.plan.dropped, *dropped))
    return replace(moved, plan=plan, problems=(*moved.problems, *problems))


def _lost(section: Section, copies: Sequence[tuple[str, str]]) -> list[Problem]:
    """Keys whose values the result would not hold: they are taken for a copy of another key, and are none."""
    have = section.by_key()
    return [
        Problem(f"the model takes it for a copy of {twin}, and its values are others: they would be lost", key)
        for key, twin in copies
        if not same_values(have[key], have[twin])
    ]


def _recorded(relation: Relation, result: Checkpoint, path: str, form: str) -> Checkpoint:
    """`result` with its form recorded where nobody could tell it from the names, dtypes and shapes."""
    section = replace(result.section(path), form=None)
    alike = relation.forms_agree and relation.serialized_names.keys() <= section.by_key().keys()
    told = alike or read(relation, section).form == form
    section = replace(section, form=None if told else form)
    return replace(result, sections=tuple(section if s.path == path else s for s in result.sections))


def _renamed(plan: Plan, section: Section, names: Mapping[str, str]) -> Plan:
    """The plan with its outputs under new names (what has none keeps its own). ``_metadata`` follows."""
    outputs = tuple(replace(output, key=names.get(output.key, output.key)) for output in plan.outputs)
    modules = tuple(plan.modules)
    if section.modules is not None:
        moved = {key: new for key, new in names.items() if key != new}
        before = {m.old: m.new for m in plan.modules}
        paths = (before.get(path, path) for path in section.modules)
        modules = in_turn(modules, module_renames(section.path, paths, moved))
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
        "optimizer": optimizer_json(remapped.optimizers),
        "notes": list(remapped.notes),
    }
