"""One way to mend, tried on the index: what it would write is asked about as the diff was."""

from __future__ import annotations

from dataclasses import replace

from ckpttool.checkpoint import Checkpoint
from ckpttool.edits import run as remap
from ckpttool.edits.mend.command import command
from ckpttool.edits.remap.options import RemapOptions
from ckpttool.errors import CkptError
from ckpttool.names import Names
from ckpttool.operands.model import ModelOperand
from ckpttool.operands.output import target_for
from ckpttool.operands.printed import operand, outputs
from ckpttool.queries.diff.options import DiffOptions
from ckpttool.queries.diff.result import HARMLESS, Diff
from ckpttool.queries.diff.run import run
from ckpttool.values import dataclass


@dataclass(frozen=True, slots=True)
class Question:
    """What a diff was asked. `model` is read once, however often the question is asked of other checkpoints.

    `picked` is the path of the one optimizer that is asked about, where a command changes the whole file.
    """

    left: Checkpoint | None
    right: Checkpoint | None
    options: DiffOptions
    model: ModelOperand | None
    picked: str | None = None

    def of_names(self, left: Checkpoint | None, right: Checkpoint | None) -> Diff:
        """The same question of other checkpoints, without their bytes: no rename changes these, nor suggestions."""
        options = replace(self.options, values=False, rtol=0.0, atol=0.0)
        return run(self._narrowed(left), right, options, self.model, infers=False)

    def _narrowed(self, left: Checkpoint | None) -> Checkpoint | None:
        """Of an output what was asked about: the one optimizer, with the model beside it where a model is asked."""
        if left is None or self.picked is None:
            return left
        if self.right is not None:
            return replace(left, sections=(replace(left.section(self.picked), path=""),))
        kept = (s for s in left.sections if s.kind != "optimizer" or s.path == self.picked)
        return replace(left, sections=tuple(kept))

    @property
    def is_about_models(self) -> bool:
        """Whether a model's tensors are compared, and no optimizers."""
        if self.options.optimizer is not None and self.right is None:
            return False
        return self.left is not None and bool(self.left.state_dicts)

    def model_with(self, optimizer: object) -> ModelOperand | None:
        """The model with an optimizer of it, or none."""
        return None if self.model is None else self.model.with_optimizer(optimizer)

    @property
    def names(self) -> Names | None:
        """The model's names, where there is a model."""
        return None if self.model is None else self.model.names()


@dataclass(frozen=True, slots=True)
class Attempt:
    """A command that works, and the answer to the question once it has run.

    `drops`: it leaves tensors out; `infers`: its rules are what names and shapes suggest.
    """

    command: str
    after: Diff
    drops: bool = False
    infers: bool = False

    @property
    def left_to_do(self) -> int:
        """How many differences there still are."""
        return remaining(self.after)


def remaining(diff: Diff) -> int:
    """How many differences stand between left and right."""
    return sum(entry.status not in HARMLESS for entry in diff.entries)


def try_remap(question: Question, options: RemapOptions, word: str) -> Attempt | None:
    """The remap of the left checkpoint that `options` ask for; None where it is refused, or no format can hold it.

    `options` are as they are to be printed; they are carried out with what is read already. `word` is for the name of
    the output, of which the ending may change to that of a format that holds more.
    """
    source = question.left
    assert source is not None
    read = replace(
        options,
        dry_run=True,
        model=None if options.model is None else question.model_with(options.optimizer),
        like=None if options.like is None else question.right,
    )
    named = operand(source.source, source.format)
    for out in outputs(named, word):
        try:
            made = remap.run(source, replace(read, out=out)).result
            made = replace(made, source=out, format=target_for(out, source).format.name)
            after = question.of_names(made, question.right)
        except CkptError:
            continue
        line = command("remap", (named,), replace(options, out=out))
        return Attempt(line, after, drops=bool(options.drop), infers=bool(options.rule))
    return None
