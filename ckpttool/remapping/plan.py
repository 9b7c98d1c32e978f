"""Plan a remap on the index: what to drop, then each step of the request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from ckpttool.core.checkpoint import Checkpoint, Section
from ckpttool.core.errors import CkptError, Problem, Refused
from ckpttool.core.plan import Dropped, Plan
from ckpttool.core.tables import by_path
from ckpttool.core.text import Info, dotted, plural, shell
from ckpttool.core.values import dataclass
from ckpttool.evaluate.apply import apply
from ckpttool.kinds.packed import unpacked
from ckpttool.kinds.quantized import problems_of_parts
from ckpttool.naming.match import match
from ckpttool.naming.model_change import ModelChange
from ckpttool.naming.wrappers import Chain, is_lightning
from ckpttool.operands.model import ModelOperand
from ckpttool.operands.same_model import left_as_they_are, of_one_model
from ckpttool.remapping.drafting import drafts_of
from ckpttool.remapping.dropping import drop
from ckpttool.remapping.result import Remap
from ckpttool.remapping.steps import Draft, Request, identity_plan
from ckpttool.remapping.through_models import with_form_recorded, without_pruning


def check_quantized(drafts: Sequence[Draft]) -> None:
    """Raise `Refused` if the plan of a section separates the parts of quantized weights, or casts
    them.
    """
    problems: list[Problem] = []
    for draft in drafts:
        problems += problems_of_parts(draft.section, draft.plan.outputs)
    if problems:
        raise Refused(
            "the numbers of quantized weights mean nothing without their scales:"
            f" {plural(len(problems), 'problem')}",
            hint="rename all parts of a weight together ('FROM.{x*} => TO.{x*}'); to change the"
            " dtype, load the model with the library that quantized it, and save it dequantized",
            problems=problems,
        )


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A source that is ready for the steps.

    `original` is the source as it was read. `source` is without what is `dropped`, and the state
    dicts in it are not packed. `paths` are the sections that change.
    """

    original: Checkpoint
    source: Checkpoint
    dropped: Sequence[Dropped]
    notes: Sequence[Info]
    paths: Sequence[str] = ()

    @property
    def sections(self) -> list[Section]:
        """The sections that change."""
        sections = by_path(self.source.sections)
        return [sections[path] for path in self.paths]


def remap(source: Checkpoint, request: Request) -> Remap:
    """Plan the remap and apply it on the index. Raise `Refused` if it would lose, collide or
    guess.
    """
    prepared = _prepare(source, request)
    if not request.changes:
        return _unchanged(prepared, request.options.sections)
    if request.saved is not None and prepared.source.optimizers:
        _check_pruned_state(prepared.source, prepared.sections, request.saved)
    lightning = is_lightning(source)  # also if the key that shows it is dropped
    drafts = drafts_of(prepared.source, prepared.sections, request, lightning)
    check_quantized(drafts)
    return _finish(prepared, drafts, request)


def _prepare(original: Checkpoint, request: Request) -> _Prepared:
    """Leave out what `--drop` names, and unpack the state dicts."""
    options = request.options
    source, dropped = original, list[Dropped]()
    if options.drop:
        source, dropped = drop(source, options.drop)
    arrays = [section.path for section in source.sections if section.packed_as == "arrays"]
    source, _, notes = unpacked(source, arrays)
    if not request.changes:
        return _Prepared(original, source, dropped, notes)
    paths = [section.path for section in _changed_sections(source, request)]
    if options.form is not None or request.loads is not None:  # forms are of state dicts
        source, attributes, more_notes = unpacked(source, paths)
        dropped, notes = [*dropped, *attributes], [*notes, *more_notes]
    return _Prepared(original, source, dropped, notes, paths)


def _finish(prepared: _Prepared, drafts: Sequence[Draft], request: Request) -> Remap:
    """Return the remap that does what the finished drafts of the sections say."""
    options, source, paths = request.options, prepared.source, prepared.paths
    plan = _joined(drafts)
    result = _applied(plan, source, drafts, request)
    change = ModelChange(drafts[0].section, drafts[0].plan)
    model: ModelChange | None = change
    # what optimizers follow if tensors of the model are left out
    narrowed = with_dropped_tensors(change, prepared.original, prepared.dropped)
    if options.select is not None:
        model, narrowed = None, narrowed or change
    return Remap(
        result,
        _with_dropped(plan, source, paths, prepared.dropped),
        source_form=drafts[0].form,
        form=None if options.form is None else str(options.form),
        notes=(*prepared.notes, *_notes(drafts), *left_as_they_are(source, prepared.sections)),
        ruled=drafts[0].ruled,
        model=model,
        narrowed=narrowed,
        sections=tuple(paths) if len(paths) > 1 else (),
        missing=_missing(drafts, request, prepared.dropped),
    )


def _changed_sections(source: Checkpoint, request: Request) -> tuple[Section, ...]:
    """Return the sections that change: the model's, or all state dicts if they are cast."""
    if request.dtype is not None and request.saved is None:
        return source.state_dicts
    names = None if request.saved is None else request.saved.names()
    return of_one_model(source, request.options.sections, names)


def _unchanged(prepared: _Prepared, sections: str | None) -> Remap:
    """Return the remap that only leaves out what is dropped."""
    source = prepared.source
    if sections is not None:
        of_one_model(source, sections)  # raises if one of them is not a state dict
    model = _unchanged_model(source)
    return Remap(
        source,
        replace(identity_plan(source.sections), dropped=tuple(prepared.dropped)),
        notes=tuple(prepared.notes),
        model=model,
        narrowed=with_dropped_tensors(model, prepared.original, prepared.dropped),
    )


def _joined(drafts: Sequence[Draft]) -> Plan:
    """Return the plans of all sections as one."""
    plans = [draft.plan for draft in drafts]
    return Plan(
        outputs=tuple(chain.from_iterable(plan.outputs for plan in plans)),
        dropped=tuple(chain.from_iterable(plan.dropped for plan in plans)),
        modules=tuple(chain.from_iterable(plan.modules for plan in plans)),
        runs=tuple(chain.from_iterable(plan.runs for plan in plans)),
    )


def _applied(
    plan: Plan, source: Checkpoint, drafts: Sequence[Draft], request: Request
) -> Checkpoint:
    """Return the source as the plan leaves it, with the form recorded if the keys alone do not tell
    it.
    """
    runners: dict[Any, Any] = {}
    for draft in drafts:
        runners.update(draft.runners)
    result = apply(plan, source, runners)
    options = request.options
    if request.loads is not None:
        return _without_runtime_names(result, drafts)
    is_wrapped = isinstance(options.form, Chain)
    if request.saved is None or options.select is not None or is_wrapped:
        return result
    for draft in drafts:
        path, names = draft.section.path, request.form_by_model.names
        result = with_form_recorded(request.saved.tables, result, path, names)
    return result


def _without_runtime_names(result: Checkpoint, drafts: Sequence[Draft]) -> Checkpoint:
    """Return `result` without the record that the state dicts of the `drafts` had runtime names:
    another model loads them.
    """
    paths = {draft.section.path for draft in drafts}
    sections = []
    for section in result.sections:
        if section.path in paths:
            section = replace(section, has_runtime_names=False)
        sections.append(section)
    return replace(result, sections=tuple(sections))


def _with_dropped(
    plan: Plan, source: Checkpoint, paths: Sequence[str], dropped: Sequence[Dropped]
) -> Plan:
    """Return the plan with what is dropped, and with all outputs of other sections from which
    something is.
    """
    touched = {drop.section for drop in dropped}.difference(paths)
    rest = identity_plan(other for other in source.sections if other.path in touched)
    outputs = (*plan.outputs, *rest.outputs)
    return replace(plan, outputs=outputs, dropped=(*plan.dropped, *dropped))


def _notes(drafts: Sequence[Draft]) -> list[str]:
    """Return the notes of the first section, and what the others add."""
    first, *others = drafts
    notes = list(first.notes)
    for draft in others:
        for note in draft.notes:
            if note not in first.notes:
                notes.append(f"{draft.section.path}: {note}")
    return notes


def _missing(
    drafts: Sequence[Draft], request: Request, dropped: Sequence[Dropped]
) -> tuple[str, ...]:
    """Return the missing keys of all sections below their paths."""
    missing = []
    for draft in drafts:
        path = draft.section.path
        left_out = [drop.key for drop in dropped if drop.section == path]
        missing += [dotted(path, key) for key in _not_left_out(draft, request, left_out)]
    return tuple(missing)


def _check_pruned_state(
    source: Checkpoint, sections: Sequence[Section], model: ModelOperand
) -> None:
    """Raise `Refused` if pruned weights would be computed next to optimizers, which have the state
    of their parts.

    The parts are also registered in another order than the weights.
    """
    problems = []
    for section in sections:
        plan = without_pruning(section, model.tables)
        for output in () if plan is None else plan.computed:
            problems.append(Problem("computed from its mask", output.key))
    if not problems:
        return
    drops: list[str] = []
    for section in source.optimizers:
        drops += ["--drop", section.path]
    raise Refused(
        "the model in this file is pruned, and its optimizer state belongs to the weights before"
        " the masks",
        hint=f"leave it out: {shell(*drops)}",
        problems=problems,
    )


def _not_left_out(draft: Draft, request: Request, dropped: Sequence[str]) -> list[str]:
    """Return the missing keys of a section, except keys that --drop or --select leaves out."""
    model = request.loads or request.saved
    if model is None or not draft.missing:
        return []
    tables = model.tables
    model_names = tables.canonical_names(request.model_form.names)
    left_out = {
        *dropped,
        *match(dropped, model_names).names.values(),
        *match(dropped, tables.serialized_names).names.values(),
    }
    below = "" if request.options.select is None else f"{request.options.select}."
    return [key for key in draft.missing if key not in left_out and key.startswith(below)]


def _unchanged_model(source: Checkpoint) -> ModelChange | None:
    """Return the model of the source with all its keys; None if it is not known which it is."""
    if not source.state_dicts:
        return None
    try:
        section = of_one_model(source)[0]
    except CkptError:
        return None
    return ModelChange(section, identity_plan([section]))


def with_dropped_tensors(
    change: ModelChange | None, original: Checkpoint, dropped: Sequence[Dropped]
) -> ModelChange | None:
    """Return the change with the tensors that are `dropped` of the original; None if no tensor is
    left out.
    """
    if change is None:
        return None
    path = change.section.path
    of_section = [drop for drop in dropped if drop.section == path]
    if not of_section and not change.plan.dropped:
        return None
    plan = replace(change.plan, dropped=(*change.plan.dropped, *of_section))
    return ModelChange(original.section(path), plan)
