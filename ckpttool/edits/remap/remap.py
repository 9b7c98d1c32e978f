"""A remap on the index: what to drop, then the steps of the request folded into one plan, which is carried out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce

from ckpttool.checkpoint import Checkpoint, Section
from ckpttool.edits.remap.by_model import recorded
from ckpttool.edits.remap.draft import Draft, carried
from ckpttool.edits.remap.drop import drop, without
from ckpttool.edits.remap.optimizer import OptimizerRequest, remap_optimizers
from ckpttool.edits.remap.request import RemapRequest
from ckpttool.edits.remap.result import Remap
from ckpttool.evaluate.apply import NO_CODE, Runner, apply
from ckpttool.naming.model_form import Form
from ckpttool.naming.name_tables import NameTables
from ckpttool.naming.optimizers.saved_order import in_order_of
from ckpttool.naming.wrappers import chain
from ckpttool.naming.wrappers.chain import Chain, Evidence
from ckpttool.naming.wrappers.table import strip
from ckpttool.operands.checkpoint import model_section
from ckpttool.optimizer_state import ID
from ckpttool.plan import Dropped, Plan

_NOTHING = RemapRequest()


def remap(source: Checkpoint, asked: RemapRequest = _NOTHING, drops: Sequence[str] = ()) -> Remap:
    """Makes and carries out the plan. Raises `Refused`, all problems at once, where it would lose, collide or guess."""
    source, dropped = drop(source, drops) if drops else (source, [])
    if not asked.changes:
        return Remap(source, replace(carried(source.sections), dropped=tuple(dropped)))
    section = model_section(source)
    begin = _draft(section, asked.source_form, chain.is_lightning(source.others, section.path))
    draft = reduce(lambda draft, step: step.apply(draft), asked.steps(), begin)
    result = _recorded(apply(draft.plan, source, draft.runners), asked, section.path)
    touched = {gone.section for gone in dropped} - {section.path}
    rest = carried(other for other in source.sections if other.path in touched)
    outputs = (*draft.plan.outputs, *rest.outputs)
    plan = replace(draft.plan, outputs=outputs, dropped=(*draft.plan.dropped, *dropped))
    notes = (*draft.notes, *_not_narrowed(source, asked))
    return Remap(result, plan, draft.form, None if asked.to is None else str(asked.to), notes)


def _draft(section: Section, form: Form | None, lightning: bool) -> Draft:
    """Where a remap begins: every key keeps its name. Wrappers are where the user says so, or else where keys show."""
    keys = list(section.by_key())
    if form is None:
        wrappers = chain.infer(keys, lightning=lightning)
    elif isinstance(form, Chain):
        wrappers = chain.declared(form, keys)
    else:  # these are names without wrappers
        wrappers = Evidence((), (), frozenset())
    canonical = {key: strip(key, wrappers.paths) for key in keys}
    return Draft(section, carried([section]), wrappers, canonical, wrappers.form)


def _recorded(result: Checkpoint, asked: RemapRequest, path: str) -> Checkpoint:
    if asked.names is None or asked.to_names is not None or asked.select is not None or isinstance(asked.to, Chain):
        return result
    tables = NameTables(asked.names)
    return recorded(tables, result, path, asked.form_by_model(tables).names)


def _not_narrowed(source: Checkpoint, asked: RemapRequest) -> list[str]:
    paths = [section.path for section in source.sections if section.kind == "optimizer"]
    still = []
    if asked.select is not None:
        still.append("the state of all parameters")
    if _changes_values(asked):
        still.append("the state of the parameters as they were before the rules file")
    return [f"{path} still holds {what} (--drop {path} leaves it out)" for path in paths for what in still]


def _changes_values(asked: RemapRequest) -> bool:
    """Whether the file of rules does more than rename."""
    if not asked.rule_steps:
        return False
    from ckpttool.edits.rules.steps import Rename

    return not all(isinstance(step, Rename) for step in asked.rule_steps)


def with_optimizers(done: Remap, wanted: OptimizerRequest) -> Remap:
    """`done` with the optimizers of its result as `wanted`; the plan is silent on those that change.

    A model beside ids gets the order of the model that these are now those of: else its keys would speak against them.
    """
    result, optimizers = remap_optimizers(done.result, wanted)
    target = wanted.to_names or wanted.names
    if target is not None and any(one.to == ID for one in optimizers):
        ordered = (in_order_of(one, target) if one.kind == "state_dict" else one for one in result.sections)
        result = replace(result, sections=tuple(ordered))
    notes = [note for one in optimizers for note in one.notes]
    changed = {one.section for one in optimizers}
    plan = replace(done.plan, outputs=tuple(o for o in done.plan.outputs if o.section not in changed))
    return replace(done, result=result, plan=plan, optimizers=optimizers, notes=(*done.notes, *notes))


def by_plan(source: Checkpoint, plan: Plan, runners: Mapping[str, Runner] = NO_CODE) -> Remap:
    """Carries out a plan that was saved; what it drops outside of state dicts are whole sections and other contents.

    `runners`, by way, are the models' code for its runs. Raises `Refused` where one of them is not there.
    """
    paths = {*source.others, *source.beside, *(section.path for section in source.sections)}
    paths.update(found.path for found in source.unreached)
    whole = [d for d in plan.dropped if not d.section and d.key in paths and not _holds(source, d)]
    rest = replace(plan, dropped=tuple(d for d in plan.dropped if d not in whole))
    return Remap(apply(rest, without(source, [d.key for d in whole]), runners), plan)


def _holds(source: Checkpoint, dropped: Dropped) -> bool:
    return any(section.path == dropped.section and dropped.key in section.by_key() for section in source.sections)
