"""Answer the question that the operands and options of `diff` ask."""

from __future__ import annotations

from dataclasses import fields, replace

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.errors import CkptError
from ckpttool.core.pickle_imports import note_on_dangerous
from ckpttool.core.text import shell
from ckpttool.diffing.options import CompareOptions, DiffOptions
from ckpttool.diffing.pairs import Values
from ckpttool.diffing.result import NO_VALUES, Diff
from ckpttool.operands.model import ModelOperand, operand_of

OTHERS_DIFFER = "other sections or entries, not the models"
ALSO_OTHERS_DIFFER = "other sections or entries too"


def run(
    left: Checkpoint | None,
    right: Checkpoint | None,
    options: DiffOptions,
    model: ModelOperand | None = None,
    values: Values | None = None,
    *,
    infers: bool = True,
) -> Diff:
    """Return what differs, and why; `ckpttool.fixes` adds the commands.

    `left` is what you have, `right` is what is expected. With a model alone: its serialized keys
    and its runtime names. With a model and `left`: the checkpoint and what the model loads;
    `identical` exactly if a strict load succeeds (and converts no dtype, unless that is ignored).
    With an optimizer of the model: the saved state and what it loads. Pass `model` and `values` if
    they were read from the options already; unless it `infers`, likely renames are not searched.
    Raises `CkptError` if there is nothing to compare.
    """
    diff = _compared(left, right, options, model, values, infers)
    notes = list(diff.notes)
    for checkpoint in (left, right):
        if checkpoint is not None:
            notes += note_on_dangerous(checkpoint.imports, checkpoint.source)
    return replace(diff, notes=tuple(notes))


def _compared(
    left: Checkpoint | None,
    right: Checkpoint | None,
    options: DiffOptions,
    model: ModelOperand | None,
    values: Values | None,
    infers: bool,
) -> Diff:
    model = operand_of(options) if model is None else model
    values = values or options.comparison
    if options.whole and (left is None or right is None):
        raise CkptError(
            "--whole compares two checkpoints", hint="ckpttool diff LEFT RIGHT --values --whole"
        )
    if left is not None and right is not None:
        from ckpttool.diffing.checkpoints import checkpoints

        compares = CompareOptions(
            **{field.name: getattr(options, field.name) for field in fields(CompareOptions)}
        )
        diff = checkpoints(left, right, model, values, compares, infers)
        diff = replace(diff, scope=options.scope)
        if options.whole and diff.has_other_notes:
            failure = OTHERS_DIFFER if diff.identical else ALSO_OTHERS_DIFFER
            return replace(diff, identical=False, other_failure=failure)
        return diff
    if model is None or right is not None or values is not None:
        raise _nothing_to_compare(left, model is not None and values is not None)
    from ckpttool.diffing.model import load

    if left is None:
        from ckpttool.diffing.names import names_alone

        diff = names_alone(model)
    elif model.optimizer is None and (left.state_dicts or len(left.optimizers) != 1):
        diff = load(model, left, options.ignore_dtype)
    else:
        from ckpttool.diffing.optimizer import optimizer

        diff = optimizer(model, left, options.ignore_dtype)
    return replace(diff, scope=NO_VALUES)


def _nothing_to_compare(left: Checkpoint | None, of_values: bool) -> CkptError:
    """Return the error for one operand; `of_values`: for the values of a model."""
    if of_values:
        message = "--values compares two checkpoints: a model's code has no values"
        return CkptError(message, hint="ckpttool diff LEFT RIGHT --values")
    hint = "ckpttool diff LEFT RIGHT, or ckpttool diff --model MODEL [CKPT]"
    if left is not None and not left.in_memory:
        line = shell("ckpttool", "diff", left.source)
        hint = f"{line} RIGHT, or {line} --model MODEL"
    return CkptError("nothing to compare", hint=hint)
