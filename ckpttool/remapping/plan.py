"""Plan a remap on the index: what to drop, then each step of the request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from ckpttool.core.checkpoint import Checkpoint, Section
from ckpttool.core.errors import CkptError, Problem, Refused
from ckpttool.core.names import SERIALIZED
from ckpttool.core.plan import Dropped, Plan
from ckpttool.core.tables import by_path
from ckpttool.core.text import Info, dotted, plural, shell
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
from ckpttool.remapping.steps import Draft, Request, carried
from ckpttool.remapping.through_models import recorded, without_pruning


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


def remap(source: Checkpoint, request: Request) -> Remap:
    """Plan the remap and apply it on the index. Raise `Refused` if it would lose, collide or
    guess.
    """
    options = request.options
    lightning = is_lightning(source)  # also if the key that shows it is dropped
    before = source
    dropped: list[Dropped] = []
    if options.drop:
        source, dropped = drop(source, options.drop)
    arrays = [section.path for section in source.sections if section.packed_as == "arrays"]
    source, _, of_arrays = unpacked(source, arrays)
    if not request.changes:
        unchanged = _unchanged(before, source, dropped, options.sections)
        return replace(unchanged, notes=tuple(of_arrays))
    paths = [section.path for section in _changed_sections(source, request)]
    of_packed: list[Info] = []
    if options.form is not None or request.loads is not None:  # forms are of state dicts
        source, attributes, of_packed = unpacked(source, paths)
        dropped += attributes
    all_sections = by_path(source.sections)
    sections = [all_sections[path] for path in paths]
    if request.saved is not None and source.optimizers:
        _check_pruned_state(source, sections, request.saved)
    drafts = drafts_of(source, sections, request, lightning)
    check_quantized(drafts)
    plan = _joined(drafts)
    result = _applied(plan, source, drafts, request)
    plan = _with_dropped(plan, source, paths, dropped)
    whole = ModelChange(drafts[0].section, drafts[0].plan)
    narrowed = _narrowing(before, whole, dropped)
    is_whole = options.select is None
    return Remap(
        result,
        plan,
        drafts[0].form,
        None if options.form is None else str(options.form),
        (*of_arrays, *of_packed, *_notes(drafts), *left_as_they_are(source, sections)),
        ruled=drafts[0].ruled,
        model=whole if is_whole else None,
        narrowed=narrowed if is_whole else narrowed or whole,
        sections=tuple(paths) if len(paths) > 1 else (),
        missing=_missing(drafts, request, dropped),
    )


def _changed_sections(source: Checkpoint, request: Request) -> tuple[Section, ...]:
    """Return the sections that change: the model's, or all state dicts if they are cast."""
    if request.dtype is not None and request.saved is None:
        return source.state_dicts
    names = None if request.saved is None else request.saved.names()
    return of_one_model(source, request.options.sections, names)


def _unchanged(
    before: Checkpoint, source: Checkpoint, dropped: Sequence[Dropped], sections: str | None
) -> Remap:
    """Return the remap that only leaves out what is `dropped`; `source` is `before` without it."""
    if sections is not None:
        of_one_model(source, sections)  # raises where one of them is none
    model = _as_it_is(source)
    plan = replace(carried(source.sections), dropped=tuple(dropped))
    return Remap(source, plan, model=model, narrowed=_narrowing(before, model, dropped))


def _joined(drafts: Sequence[Draft]) -> Plan:
    """Return the plans of all sections as one."""
    plans = [draft.plan for draft in drafts]
    return Plan(
        tuple(chain.from_iterable(plan.outputs for plan in plans)),
        tuple(chain.from_iterable(plan.dropped for plan in plans)),
        tuple(chain.from_iterable(plan.modules for plan in plans)),
        tuple(chain.from_iterable(plan.runs for plan in plans)),
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
    keeps_model = request.loads is None and options.select is None
    if request.loads is not None:
        return _of_other_model(result, drafts)
    if request.saved is None or not keeps_model or isinstance(options.form, Chain):
        return result
    for draft in drafts:
        path, names = draft.section.path, request.form_by_model.names
        result = recorded(request.saved.tables, result, path, names)
    return result


def _of_other_model(result: Checkpoint, drafts: Sequence[Draft]) -> Checkpoint:
    """Return `result`, in which another model loads the state dicts of the `drafts`."""
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
    touched = {gone.section for gone in dropped}.difference(paths)
    rest = carried(other for other in source.sections if other.path in touched)
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
        left_out = [gone.key for gone in dropped if gone.section == path]
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
    is_serialized = request.model_form.names == SERIALIZED
    model_names = tables.serialized_names if is_serialized else tables.runtime_names
    left_out = {
        *dropped,
        *match(dropped, model_names).names.values(),
        *match(dropped, tables.serialized_names).names.values(),
    }
    below = "" if request.options.select is None else f"{request.options.select}."
    return [key for key in draft.missing if key not in left_out and key.startswith(below)]


def _as_it_is(source: Checkpoint) -> ModelChange | None:
    if not source.state_dicts:
        return None
    try:
        section = of_one_model(source)[0]
    except CkptError:
        return None
    return ModelChange(section, carried([section]))


def _narrowing(
    source: Checkpoint, effect: ModelChange | None, dropped: Sequence[Dropped]
) -> ModelChange | None:
    """Return `effect` with the tensors that `--drop` left out of `source`; None if no tensor is
    left out.
    """
    path = "" if effect is None else effect.section.path
    of_section = tuple(gone for gone in dropped if gone.section == path)
    if effect is None or not (of_section or effect.plan.dropped):
        return None
    plan = replace(effect.plan, dropped=(*effect.plan.dropped, *of_section))
    return ModelChange(source.section(path), plan)
