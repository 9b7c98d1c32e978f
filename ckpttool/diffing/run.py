"""The whole of `diff`: which question is asked, and its answer; exit status 0 is `Diff.identical`."""

from __future__ import annotations

from dataclasses import replace

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.errors import CkptError
from ckpttool.diffing.checkpoints import checkpoints
from ckpttool.diffing.manifest import compare_manifest, is_about_manifest
from ckpttool.diffing.optimizer import optimizer_alone
from ckpttool.diffing.options import DiffOptions
from ckpttool.diffing.result import NO_VALUES, Diff
from ckpttool.diffing.sections import Values
from ckpttool.operands.model import ModelOperand, operand_of

BESIDE = "the models are the same, and what stands beside them is not"


def run(
    left: Checkpoint | None,
    right: Checkpoint | None,
    options: DiffOptions,
    model: ModelOperand | None = None,
    values: Values | None = None,
    *,
    infers: bool = True,
) -> Diff:
    """What differs, and why; what mends it is found by `edits.mend`, but for optimizers.

    `left` is what there is, `right` what is expected. With a model alone: its serialized keys against its runtime
    names. With a model and `left`: the checkpoint against what the model loads; `identical` exactly where a strict load
    succeeds (and converts no dtype, unless that is to be ignored). With a model's optimizer: the state of the saved one
    against it. `model` is that of the options, where it has been read already, and `values` what compares values as
    they say; unless it `infers`, no other names are looked for. Raises `CkptError` where this asks for nothing.
    """
    model = operand_of(options) if model is None else model
    values, ignore_dtype = values or options.comparison, options.ignore_dtype
    if options.whole and (left is None or right is None or is_about_manifest(left, right)):
        raise CkptError("--whole compares two checkpoints", hint="ckpttool diff LEFT RIGHT --values --whole")
    if left is not None and right is not None and is_about_manifest(left, right):
        if model is not None:
            raise CkptError("a manifest is compared as it is, without a model", hint="leave --model out")
        return replace(compare_manifest(left, right, values), scope=options.scope)
    if left is not None and right is not None:
        found = replace(checkpoints(left, right, model, values, ignore_dtype, infers), scope=options.scope)
        counts = options.whole and found.aside and found.identical
        return replace(found, identical=False, beyond=BESIDE) if counts else found
    if model is None or right is not None or values is not None:
        raise CkptError("nothing to compare", hint="ckpttool diff LEFT RIGHT, or ckpttool diff --model MODEL [CKPT]")
    from ckpttool.diffing.model import load, names_alone, optimizer

    if left is None:
        return replace(names_alone(model), scope=NO_VALUES)
    if model.optimizer is None and optimizer_alone(left) is None:
        return replace(load(model, left, ignore_dtype), scope=NO_VALUES)
    return replace(optimizer(model, left, ignore_dtype), scope=NO_VALUES)
