"""The result of a remap with its optimizers, and their changes in the plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.optimizer_state import ID
from ckpttool.core.plan import OptimizerMove, Output, Plan
from ckpttool.core.text import shell
from ckpttool.naming.model_change import ModelChange
from ckpttool.optimizers import forms
from ckpttool.optimizers.key_order import sorted_like_model
from ckpttool.optimizers.move import remap_optimizers
from ckpttool.optimizers.request import OptimizerRemap, OptimizerRequest
from ckpttool.remapping.result import Remap
from ckpttool.remapping.several_models import OptimizerModels, models_of_optimizers


def with_optimizers(outcome: Remap, source: Checkpoint, request: OptimizerRequest) -> Remap:
    """Return `outcome`, the result for `source`, with the optimizers as requested, and with their
    changes in the plan.

    If ids follow another model's order, the keys next to them get this order too: they are evidence
    for the ids.
    """
    model, ruled = outcome.model, outcome.ruled
    if ruled is not None and request.names is None and model is not None:
        ruled = model  # only the file has names: they change as its keys do
    keys = () if model is None else outcome.result.section(model.section.path).keys
    request = replace(request, ruled=ruled, model=model, narrowed=outcome.narrowed, model_keys=keys)
    by_model = models_of_optimizers(source, outcome, request)
    request = replace(request, by_section=by_model.requests)
    result, optimizers = remap_optimizers(outcome.result, request)
    changed = [optimizer.section for optimizer in optimizers]
    notes = [*outcome.notes, *by_model.notes(changed)]
    if model is None and outcome.narrowed is not None:  # --select
        notes += _on_whole_state(result, (*changed, *by_model.of_others))
    if request.called is not None and (ruled is None or ruled.renames(ruled.section.keys)):
        notes += _left_in_order(result, optimizers, request, by_model)
    if not optimizers:
        return replace(outcome, notes=tuple(notes))
    moves = []
    for optimizer in optimizers:
        notes += optimizer.notes
        if optimizer.move is not None:
            moves.append(optimizer.move)
    result = _in_order(result, optimizers, request, outcome.ruled, ruled, by_model)
    plan = _with_moves(outcome.plan, result, moves)
    return replace(outcome, result=result, plan=plan, optimizers=optimizers, notes=tuple(notes))


def _on_whole_state(result: Checkpoint, apart: Sequence[str]) -> Iterator[str]:
    """Yield a note on each optimizer that is not narrowed to the submodule, but not on `apart`."""
    for section in result.optimizers:
        if section.path not in apart:
            yield f"{section.title} still holds the state of all parameters"


def _in_order(
    result: Checkpoint,
    optimizers: Sequence[OptimizerRemap],
    request: OptimizerRequest,
    by_steps: ModelChange | None,
    ruled: ModelChange | None,
    by_model: OptimizerModels,
) -> Checkpoint:
    """Return the result with the keys of its state dicts in the order of the parameters that the
    ids have. Models with their own optimizers keep theirs.
    """
    others = set(by_model.of_others.values())
    loaded_by = [remap.loaded_by for remap in optimizers if remap.loaded_by is not None]
    keeps_places = ruled is None or ruled.keeps_places
    target = request.names if keeps_places else None
    rename = request.called
    if by_steps is not None:
        rename = by_steps.name_after
    if loaded_by:
        target, rename = loaded_by[0], None
    if target is None or all(optimizer.to != ID for optimizer in optimizers):
        return result
    ordered = []
    for section in result.sections:
        is_ordered = section.kind == "state_dict" and section.path not in others
        ordered.append(sorted_like_model(section, target, rename) if is_ordered else section)
    return replace(result, sections=tuple(ordered))


def _left_in_order(
    result: Checkpoint,
    optimizers: Sequence[OptimizerRemap],
    request: OptimizerRequest,
    by_model: OptimizerModels,
) -> Iterator[str]:
    """Yield a note on each optimizer with ids, whose order rules do not change to the new
    model's.
    """
    out = request.output or "OUT"
    diff = shell("ckpttool", "diff", "--model", "NEW", "--optimizer", "O", out)
    text = f"optimizer ids keep the order of the model that saved them; check with {diff}"
    ordered = {remap.section for remap in optimizers if remap.loaded_by is not None}
    ordered.update(by_model.of_others)
    for section in result.optimizers:
        state = forms.read(section)
        is_empty = state.is_stateless and len(state.groups) < 2
        if state.form == ID and section.path not in ordered and not is_empty:
            yield text if section.title == "optimizer" else f"{section.title}: {text}"


def _with_moves(plan: Plan, result: Checkpoint, moves: Sequence[OptimizerMove]) -> Plan:
    """Return the plan with the changes of optimizers, and with its outputs in the order of the
    result's keys.

    Sections of optimizers have outputs only if entries of them are dropped.
    """
    dropped = {gone.section for gone in plan.dropped}
    changed = {move.section for move in moves} - dropped
    by_section: dict[str, list[Output]] = {}
    for output in plan.outputs:
        if output.section not in changed:
            by_section.setdefault(output.section, []).append(output)
    for section in result.sections:
        if section.kind != "optimizer" and section.path in by_section:
            rank = {key: position for position, key in enumerate(section.keys)}
            by_section[section.path].sort(key=lambda output: rank.get(output.key, 0))
    outputs = chain.from_iterable(by_section.values())
    return replace(plan, outputs=tuple(outputs), optimizers=tuple(moves))
