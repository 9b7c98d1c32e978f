"""From the inputs of a remap to its result on the index, for any format. Nothing is written."""

from __future__ import annotations

from dataclasses import replace

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.formats.opening import note_on
from ckpttool.kinds.table import with_kinds
from ckpttool.naming.convert import ModelForm
from ckpttool.operands.model import ModelOperand
from ckpttool.operands.output import target_for
from ckpttool.remapping.by_position import notes_on_lists
from ckpttool.remapping.filling import fill
from ckpttool.remapping.gather_optimizers import with_gathered_optimizers
from ckpttool.remapping.missing import missing_keys, note_on_kept_keys
from ckpttool.remapping.optimizer_request import check_has_optimizer, optimizer_request
from ckpttool.remapping.optimizers import with_optimizers
from ckpttool.remapping.options import RemapOptions
from ckpttool.remapping.plan import remap as remap_index
from ckpttool.remapping.resolve import Inputs, resolve
from ckpttool.remapping.restore import with_lost_versions, with_steps_of_norms
from ckpttool.remapping.result import Remap, changes_content


def plan_remap(
    source: Checkpoint,
    options: RemapOptions,
    model: ModelOperand | None,
    to_model: ModelOperand | None,
    dtype: str | None = None,
) -> Remap:
    """Return the result of `options` for `source` on the index. Raise as `run` does.

    `model` is the model that saved the source, `to_model` the result of `loading_model`, `dtype`
    what floating-point tensors are cast to.
    """
    inputs = resolve(source, options, model, to_model, dtype)
    check_has_optimizer(inputs)
    outcome = remap_index(inputs.whole, inputs.request)
    if inputs.saved is not None and inputs.saved.pretrained:
        outcome = replace(outcome, source_form=str(ModelForm.PRETRAINED))
    if inputs.gathered is not None and inputs.names is not None:
        outcome = with_gathered_optimizers(outcome, inputs.gathered, inputs.names)
    outcome = replace(outcome, missing=missing_keys(outcome, inputs))
    if inputs.fillers:
        outcome = fill(outcome, inputs.fillers, inputs.request, inputs.named_by)
    outcome = _with_versions(outcome, inputs)
    outcome = replace(outcome, notes=(*_notes_of_source(outcome, inputs.source), *outcome.notes))
    if outcome.result.optimizers or options.optimizer_keys is not None:
        outcome = with_optimizers(outcome, inputs.whole, optimizer_request(inputs))
        outcome = replace(outcome, notes=(*outcome.notes, *note_on_kept_keys(outcome, inputs)))
    other_names = None if inputs.other_model is None else inputs.to_names
    lists = notes_on_lists(outcome, inputs.names, other_names, inputs.request.rename_by_rules)
    changes = inputs.gathered is not None or changes_content(inputs.source, outcome)
    result = with_kinds(outcome.result)
    return replace(outcome, result=result, notes=(*outcome.notes, *lists), changes_content=changes)


def _with_versions(outcome: Remap, inputs: Inputs) -> Remap:
    """Return the result with what older versions of its modules did not save."""
    if not inputs.request.changes or inputs.gathered is not None:
        return outcome
    outcome = with_steps_of_norms(outcome)
    out = inputs.options.target(inputs.source.source)
    if out is not None and not target_for(out, inputs.source).format.holds.versions:
        return outcome
    return with_lost_versions(outcome, inputs.request, inputs.other_model or inputs.saved)


def _notes_of_source(outcome: Remap, source: Checkpoint) -> tuple[str, ...]:
    """Return the notes of the source; other files of its folder that are dropped are not noted."""
    if outcome.result.other_files == source.other_files:
        return source.notes
    about_files = note_on(source.other_files)
    notes = [note for note in source.notes if note not in about_files]
    return (*notes, *note_on(outcome.result.other_files))
