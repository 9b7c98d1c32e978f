"""Try a fix on the index: are the two the same afterwards?"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import NamedTuple

from ckpttool.containers.nodes import entries_with_code
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.errors import CkptError
from ckpttool.core.values import dataclass
from ckpttool.diffing.models import OF_PROGRAMS, program_and_weights
from ckpttool.diffing.result import Diff, Fix, statuses_of
from ckpttool.fixes.losses import left_out, loses
from ckpttool.fixes.question import DiffQuestion
from ckpttool.formats.fit import fit, recorded_aliases
from ckpttool.operands.model import ModelOperand, operand_of
from ckpttool.operands.output import FIX, command, outputs, target_for
from ckpttool.remapping import run as remap
from ckpttool.remapping.loads import how_model_loads, loaded_by
from ckpttool.remapping.options import ConvertOptions, RemapOptions
from ckpttool.remapping.output import fitted
from ckpttool.remapping.planning import plan_remap
from ckpttool.remapping.resolve import loading_model
from ckpttool.remapping.result import Remap
from ckpttool.swap import run as swap
from ckpttool.swap.options import SwapOptions


@dataclass(frozen=True, slots=True)
class TriedFix:
    """A command that works, as its options, and the answer after it has run.

    `stateless` are parameters that it leaves out of an optimizer, with their state, `left_out` are
    the paths of tensors and other entries of the state dict that it leaves out. `part`: the operand
    is a section of left. `code` are the paths of entries that it leaves out because loading them
    would run code.
    """

    verb: str
    operands: tuple[str, ...]
    options: RemapOptions | ConvertOptions | SwapOptions
    after: Diff
    stateless: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    part: bool = False
    code: tuple[str, ...] = ()

    @property
    def fix(self) -> Fix:
        """The command line."""
        line = command(self.verb, self.operands, self.options, FIX)
        is_applied = self.after.identical and self.verb != "swap-weights" and not self.stateless
        options = self.options if is_applied else None
        source = self.operands[0] if self.part else ""
        return Fix(line, complete=self.after.identical, tried=True, options=options, source=source)

    @property
    def is_proven(self) -> bool:
        """Whether it fixes everything, and no name is a guess."""
        return self.after.identical and not self.infers

    @property
    def drops(self) -> bool:
        """Whether it leaves tensors out."""
        if not isinstance(self.options, RemapOptions):
            return False
        return not set(self.options.drop or ()) <= set(self.code)

    @property
    def infers(self) -> bool:
        """Whether its rules are inferred from names and shapes."""
        return isinstance(self.options, RemapOptions) and bool(self.options.rule)


def try_remap(
    question: DiffQuestion,
    options: RemapOptions,
    word: str,
    most: int | None = None,
    *,
    loses_state: bool = False,
    loses_keys: bool = False,
    code: tuple[str, ...] = (),
) -> TriedFix | None:
    """Return the remap of the left checkpoint with these options; None if it is refused, if no
    format can hold the result, if it loses something, or if `most` differences or more are left.
    With `loses_state` it may leave parameters of an optimizer out, with `loses_keys` keys of the
    state dict. Entries that would run code when the output is loaded are dropped too; `code` are
    the paths that are dropped already.

    `options` are as printed; what is read already is reused. `word` is part of the output's name,
    whose ending may change to the ending of a format that holds more.
    """
    planned = _planned(question, options)
    if planned is None:
        return None
    source, result = planned.source, planned.result
    stateless = tuple(chain(*(optimizer.dropped for optimizer in result.optimizers)))
    if stateless and not loses_state:
        return None
    if not loses_keys and loses(source, result, question.model, code):
        return None
    for out in outputs(source.source, word):
        try:
            fitted = planned.fitted(out)
            after = _asked_again(question, fitted, options, most)
        except CkptError:
            continue
        if after is None:
            return None
        partial = _is_partial(question, planned, after)
        if planned.is_writable(out, partial):
            printed, operands = replace(options, out=out, partial=partial), (source.source,)
            paths = left_out(result)
            return TriedFix("remap", operands, printed, after, stateless, paths, code=code)
        paths_with_code = dict.fromkeys(path for path, _ in entries_with_code(fitted))
        with_code = tuple(path for path in paths_with_code if path not in code)
        if with_code:
            more = replace(options, drop=(*(options.drop or ()), *with_code))
            return try_remap(
                question,
                more,
                word,
                most,
                loses_state=loses_state,
                loses_keys=loses_keys,
                code=(*code, *with_code),
            )
    return None


class _Planned(NamedTuple):
    """A planned remap; its `options` have what is read already for what they name."""

    source: Checkpoint
    options: RemapOptions
    model: ModelOperand | None
    to_model: ModelOperand | None
    result: Remap

    def fitted(self, out: str) -> Checkpoint:
        """Return the output as its format holds it. Raises `CkptError` if it cannot."""
        target = target_for(out, self.source)
        output = fitted(self.result, target, self.options, self.to_model or self.model)
        return replace(output, source=out, format=target.format.name)

    def is_writable(self, out: str, partial: bool) -> bool:
        """Return whether a dry run of writing it is not refused."""
        options = replace(self.options, out=out, partial=partial)
        try:
            remap.run(self.source, options, model=self.model, planned=self.result, lays_out=False)
        except CkptError:
            return False
        return True


def _planned(question: DiffQuestion, options: RemapOptions) -> _Planned | None:
    """Return the plan of the remap; None if it is refused."""
    source, right = question.opened or (question.left, question.right)
    model = None
    if options.model is not None:
        assert question.model is not None
        source, right = question.left, question.right
        model = question.model.with_optimizer(options.optimizer)
    assert source is not None
    read = replace(options, dry_run=True, model=model)
    if options.like is not None:
        read = replace(read, like=right)
    try:
        model = operand_of(read)
        to_model = loading_model(read, model)
        result = plan_remap(source, read, model, to_model)
    except CkptError:
        return None
    return _Planned(source, read, model, to_model, result)


def _asked_again(
    question: DiffQuestion, fitted: Checkpoint, options: RemapOptions, most: int | None
) -> Diff | None:
    """Return the diff after a remap with these options; None if `most` differences or more are
    left.
    """
    after = question.ask_again(fitted, question.right)
    if not after.identical:
        if most is None:
            return after
        # A key that is missing may be one of those left out.
        if options.drop and "missing" in statuses_of(after.entries):
            return None
        return None if question.remaining(after) >= most else after
    if question.has_unread_values:
        return question.ask_again(fitted, question.right, reads_values=True)
    return after


def _is_partial(question: DiffQuestion, planned: _Planned, after: Diff) -> bool:
    """Return whether the output lacks values of the model that loads it, or the optimizer creates
    some.
    """
    read, missing = planned.options, planned.result.missing
    # else the model of the question loads it
    if not after.identical or question.right is not None:
        model = loaded_by(read, planned.model, planned.to_model)
        loads = how_model_loads(planned.result, read, model)
        missing = missing if loads is None else loads.missing
    if missing:
        return True
    for optimizer in planned.result.optimizers:
        if optimizer.move and optimizer.move.created:
            return True
    return False


def try_cast(question: DiffQuestion, dtype: str) -> TriedFix | None:
    """Return the conversion of the left checkpoint to one dtype; None if it is refused, or if
    anything differs after it.
    """
    source = question.left if question.opened is None else question.opened[0]
    assert source is not None
    reads_values = question.options.comparison is not None
    for out in outputs(source.source, dtype):
        options = ConvertOptions(dtype=dtype, out=out)
        dry = replace(options, dry_run=True)
        try:
            result = remap.run(source, dry.as_remap, conversion=dry).result
            after = question.ask_again(result, question.right, reads_values=reads_values)
        except CkptError:
            continue
        if after.identical:
            return TriedFix("convert", (source.source,), options, after)
    return None


def try_recorded_names(question: DiffQuestion) -> TriedFix | None:
    """Return the conversion to a format that holds second names, and restores the names that the
    file records in its metadata; None if it does not fix everything.
    """
    source = question.left if question.opened is None else question.opened[0]
    assert source is not None
    missing: set[str] = set()
    for entry in question.diff.entries:
        if entry.status in ("missing", "alias"):
            missing.update(entry.right)
    if missing.isdisjoint(recorded_aliases(source)):
        return None
    for out in outputs(source.source, "converted"):
        target = target_for(out, source)
        if target.format.holds.aliases:
            after = question.ask_again(fit(source, target.format), question.right)
            options = ConvertOptions(out=out)
            return (
                TriedFix("convert", (source.source,), options, after) if after.identical else None
            )
    return None


def try_swap(question: DiffQuestion, options: SwapOptions) -> TriedFix | CkptError:
    """Return the swap with these options, or why it is refused."""
    left, right = question.two
    program, weights = program_and_weights(left, right)
    read = replace(options, dry_run=True, model=None if options.model is None else question.model)
    try:
        swapped = swap.run(program.source, weights, read).program
    except CkptError as error:
        return error
    out = next(outputs(program.source, "swapped"))
    swapped = replace(swapped, source=out)
    if program is left:
        after = question.ask_again(swapped, weights)
    else:
        after = question.ask_again(weights, swapped)
    if question.options.comparison is not None and question.model is not None:
        # the swap gives the program the values, which are not read again
        harmless = after.harmless | OF_PROGRAMS
        if all(entry.is_one_of(harmless) for entry in after.entries):
            after = replace(after, identical=True, harmless=harmless)
    operands = program.source, weights.source
    return TriedFix("swap-weights", operands, replace(options, out=out), after)
