"""The whole of `diff`: which question is asked, and its answer; exit status 0 is `Diff.identical`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated

from ckpttool.checkpoint import Checkpoint, Section
from ckpttool.errors import CkptError
from ckpttool.evaluate.compare import difference
from ckpttool.names import Names
from ckpttool.naming.optimizers.forms import form_of
from ckpttool.operands.checkpoint import model_section
from ckpttool.operands.model import ModelOperand, operand_of
from ckpttool.options import OptimizerOptions, option
from ckpttool.queries.diff import mend
from ckpttool.queries.diff.keys import Values, compare
from ckpttool.queries.diff.names import NON_PERSISTENT, compare_load, compare_names, compare_through, loads
from ckpttool.queries.diff.optimizer import (
    compare_optimizers,
    compare_with_optimizer,
    differing_optimizers,
    optimizer_alone,
    optimizer_section,
)
from ckpttool.queries.diff.reasons import hidden_segments
from ckpttool.queries.diff.result import HARMLESS, Diff


@dataclass(frozen=True, kw_only=True)
class DiffOptions(OptimizerOptions):
    """All options of a diff that say what is compared."""

    values: Annotated[bool, option("--values", help="Compare the bytes of the tensors too.")] = False
    rtol: Annotated[float, option("--rtol", least=0, help="Relative tolerance of --values.")] = 0.0
    atol: Annotated[float, option("--atol", least=0, help="Absolute tolerance of --values.")] = 0.0
    ignore_dtype: Annotated[bool, option("--ignore-dtype", help="Another dtype is no difference.")] = False

    @property
    def comparison(self) -> Values | None:
        """What compares two tensors of one dtype and shape, where values are asked for."""
        if self.values or self.rtol or self.atol:
            return partial(difference, rtol=self.rtol, atol=self.atol)
        return None


def run(left: Checkpoint | None, right: Checkpoint | None, options: DiffOptions) -> Diff:
    """What differs, why, and the commands that mend it.

    `left` is what there is, `right` what is expected. With a model alone: its serialized keys against its runtime
    names. With a model and `left`: the checkpoint against what the model loads; `identical` exactly where a strict load
    succeeds (and converts no dtype, unless that is to be ignored). With a model's optimizer: the state of the saved one
    against it. Raises `CkptError` where this asks for nothing.
    """
    model = operand_of(options)
    values, ignore_dtype = options.comparison, options.ignore_dtype
    if left is not None and right is not None:
        return _checkpoints(left, right, model, values, ignore_dtype)
    if model is None or right is not None or values is not None:
        raise CkptError("nothing to compare", hint="ckpttool diff LEFT RIGHT, or ckpttool diff --model MODEL [CKPT]")
    if left is None:
        return _names(model)
    return _load(model, left, ignore_dtype) if model.optimizer is None else _optimizer(model, left)


def _names(model: ModelOperand) -> Diff:
    """A model alone: its serialized keys against its runtime names."""
    names = model.names()
    entries = compare_names(names)
    lost = any(e.status == "not_serialized" and e.reason != NON_PERSISTENT for e in entries)
    identical = not lost and all(entry.status in HARMLESS for entry in entries)
    notes = (
        ()
        if names.roundtrips
        else tuple(f"does not load what it saves: {text}" for text in map(str, names.roundtrip_problems))
    )
    fix = () if identical else mend.names(model, entries)
    return Diff(f"{names.model} (serialized)", f"{names.model} (runtime)", identical, entries, fix, notes)


def _load(model: ModelOperand, checkpoint: Checkpoint, ignore_dtype: bool) -> Diff:
    """A checkpoint against what the model loads; for a model's code the answer is torch's own."""
    section = model_section(checkpoint)
    names, verdict = model.names(), None
    if model.is_definition:
        from ckpttool.tracing.trace import load_verdict

        verdict = load_verdict(model.definition(), section)
    entries = compare_load(names, section, verdict)
    fits = loads(entries) if verdict is None else verdict.ok
    converts = any(e.status == "dtype" for e in entries) if verdict is None else bool(verdict.dtype_changes)
    identical = fits and (ignore_dtype or not converts)
    notes = [f"torch: {text}" for text in (() if verdict is None else verdict.errors)]
    found = sum(entry.status in ("same", "renamed", "dtype", "shape") and bool(entry.left) for entry in entries)
    if not found:
        notes.insert(0, f"0 of {len(section.tensors)} tensors matched: loading with strict=False would load nothing")
    fix = () if identical else mend.load(model, checkpoint.source, entries)
    return Diff(checkpoint.source, f"{model.title} (what it loads)", identical, entries, fix, tuple(notes))


def _optimizer(model: ModelOperand, checkpoint: Checkpoint) -> Diff:
    """A saved optimizer against the one that is to load it."""
    names, section = model.names(), optimizer_section(checkpoint)
    if section is None:
        raise CkptError(f"{checkpoint.source} holds no optimizer, or several", hint="name one: CKPT::optimizer")
    entries, notes = compare_with_optimizer(section, names)
    identical = all(entry.status in HARMLESS for entry in entries)
    fix = () if identical else mend.optimizer(model, checkpoint.source)
    right = f"{model.optimizer if isinstance(model.optimizer, str) else names.optimizer_class} (of {names.model})"
    return Diff(checkpoint.source, right, identical, entries, fix, notes)


def _checkpoints(
    left: Checkpoint, right: Checkpoint, model: ModelOperand | None, values: Values | None, ignore_dtype: bool
) -> Diff:
    """Two checkpoints, read through a model where one is given."""
    names = None if model is None else model.names()
    saved = optimizer_alone(left), optimizer_alone(right)
    if saved[0] is not None and saved[1] is not None:
        return _optimizers(left, right, (saved[0], saved[1]), model, names, values)
    mine, theirs = model_section(left), model_section(right)
    entries = compare(mine, theirs, values) if names is None else compare_through(names, mine, theirs, values)
    harmless = HARMLESS | {"dtype"} if ignore_dtype else HARMLESS
    identical = all(entry.status in harmless for entry in entries)
    hidden = () if names is not None else hidden_segments(entries)
    notes = (*hidden, *differing_optimizers(left, right, names))
    fix = mend.checkpoints(left, right, entries, bool(hidden))
    return Diff(left.source, right.source, identical, entries, fix, notes)


def _optimizers(
    left: Checkpoint,
    right: Checkpoint,
    sections: tuple[Section, Section],
    model: ModelOperand | None,
    names: Names | None,
    values: Values | None,
) -> Diff:
    """Two saved optimizers."""
    entries, notes = compare_optimizers(*sections, names, values)
    identical = all(entry.status in HARMLESS for entry in entries)
    fix = mend.optimizers(left.source, form_of(sections[0]), form_of(sections[1]), model)
    return Diff(left.source, right.source, identical, entries, fix, notes)
