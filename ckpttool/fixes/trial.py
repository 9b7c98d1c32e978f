"""Try a fix on the index: would the diff's question then be answered yes?"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, replace
from typing import Any, get_args, get_type_hints

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.errors import CkptError
from ckpttool.core.expression import refs
from ckpttool.core.options import Option, OutputOptions
from ckpttool.core.text import Info, shell
from ckpttool.core.values import dataclass
from ckpttool.diffing.options import DiffOptions
from ckpttool.diffing.result import HARMLESS, Diff, Entry
from ckpttool.diffing.run import run
from ckpttool.naming.call_variants import aliases
from ckpttool.naming.convert import MADE_AGAIN
from ckpttool.operands.model import ModelOperand, operand_of
from ckpttool.operands.output import operand, outputs, target_for
from ckpttool.remapping import run as remap
from ckpttool.remapping.options import RemapOptions
from ckpttool.remapping.plan import Remap
from ckpttool.remapping.steps import NO_COUNTER

PLACEHOLDERS = ("MODEL", "OLD", "OPTIMIZER", "OLD_OPTIMIZER", "PROGRAM.pt2", "CKPT")  # for what only the user knows
_OUTPUT = frozenset(field.name for field in fields(OutputOptions))


def command(verb: str, operands: tuple[str, ...], options: Any) -> str:
    """``ckpttool VERB OPERANDS OPTIONS`` for the options that are not as they are by default, those of the output last.

    An object of the caller's has no words: the name of its option stands for it (``MODEL``).
    """
    return shell("ckpttool", verb, *operands, *_words(options, output=False), *_words(options, output=True))


def _words(options: Any, *, output: bool) -> Iterator[str]:
    hints = get_type_hints(type(options), include_extras=True)
    for field in fields(options):
        value = getattr(options, field.name)
        if (field.name in _OUTPUT) is not output or value == field.default:
            continue
        mark = next(part for part in get_args(hints[field.name]) if isinstance(part, Option))
        if value is True:
            yield mark.flags[0]
            continue
        for one in value if isinstance(value, (list, tuple)) else (value,):
            yield from (mark.flags[0], _text(one, mark))


def _text(value: Any, mark: Option) -> str:
    if isinstance(value, Mapping):
        return json.dumps(dict(value))
    return str(value) if isinstance(value, (str, int)) else str(mark.metavar)


def untried(fix: Iterable[str]) -> list[Info]:
    """Return a note on the commands that name what only the user knows: they were not tried."""
    words = [word for line in fix for word in shlex.split(line)]
    names = [name for name in PLACEHOLDERS if name in words]
    stand = "stands" if len(names) == 1 else "stand"
    return [Info(f"not tried, since it depends on what {' and '.join(names)} {stand} for")] if names else []


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

    def of_names(self, left: Checkpoint, right: Checkpoint | None) -> Diff:
        """The same question of other checkpoints, without their bytes: no rename changes these, nor suggestions."""
        options = replace(self.options, values=False, rtol=0.0, atol=0.0)
        return run(self._narrowed(left), right, options, self.model, infers=False)

    def remaining(self, diff: Diff) -> int:
        """How many differences are left that a remap could mend: those of values alone it leaves as they are."""
        alone = sum(entry.left == entry.right for entry in self.of_values(diff))
        return sum(entry.status not in HARMLESS for entry in diff.entries) - alone

    def of_values(self, diff: Diff) -> list[Entry]:
        """The tensors of two checkpoints that have other values, under one name or two."""
        return [] if self.right is None else [entry for entry in diff.entries if entry.status == "value"]

    def _narrowed(self, left: Checkpoint) -> Checkpoint:
        """Of an output what was asked about: the one optimizer, with the model beside it where a model is asked."""
        if self.picked is None:
            return left
        if self.right is not None:
            return replace(left, sections=(replace(left.section(self.picked), path=""),))
        kept = (s for s in left.sections if s.kind != "optimizer" or s.path == self.picked)
        return replace(left, sections=tuple(kept))

    def model_with(self, optimizer: object) -> ModelOperand:
        """The model, which there is, with an optimizer of it, or none."""
        assert self.model is not None
        return self.model.with_optimizer(optimizer)


@dataclass(frozen=True, slots=True)
class Attempt:
    """A command that works, and the answer to the question once it has run.

    `drops`: it leaves tensors out; `infers`: its rules are what names and shapes suggest.
    """

    command: str
    after: Diff
    drops: bool = False
    infers: bool = False


def try_remap(question: Question, options: RemapOptions, word: str, most: int | None = None) -> Attempt | None:
    """The remap of the left checkpoint that `options` ask for; None where it is refused, or no format can hold it, or
    where it leaves `most` differences and more, or loses something.

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
    try:
        model = operand_of(read)
        to_model = remap.loading_model(read, model)
        done = remap.plan_remap(source, read, model, to_model)
    except CkptError:
        return None
    if _loses(source, done, question.model):
        return None
    named = operand(source.source, source.format)
    for out in outputs(named, word):
        try:
            target = target_for(out, source)
            fitted = remap.fitted(done, target, read, to_model or model)
            after = question.of_names(replace(fitted, source=out, format=target.format.name), question.right)
            if not (after.identical or most is None or _helps(question, options, after, most)):
                return None
            target.lay_out(fitted)
        except CkptError:
            continue
        line = command("remap", (named,), replace(options, out=out, partial=bool(done.missing)))
        return Attempt(line, after, drops=bool(options.drop), infers=bool(options.rule))
    return None


def _loses(source: Checkpoint, done: Remap, model: ModelOperand | None) -> bool:
    """Return whether the output lacks the values of a tensor of the source, under any name.

    A counter of AveragedModel counts as kept, and so do a buffer that is not persistent and a key that the model's own
    saving computes from other tensors: its code makes them again.
    """
    if any(one.dropped for one in done.optimizers):
        return True
    made_again = () if model is None else tuple(t.fqn for t in model.names().runtime if not t.persistent)
    kept = {(output.section, key) for output in done.plan.outputs for key in refs(output.source)}
    gone = [one for one in done.plan.dropped if one.reason not in (NO_COUNTER, MADE_AGAIN)]
    paths = {section.path: section for section in source.sections}
    twins = {path: aliases(paths[path]) for path in {one.section for one in gone} if path in paths}
    for one in gone:
        first = twins.get(one.section, {})
        own = first.get(one.key, one.key)
        same = (key for key in (own, *(key for key, other in first.items() if other == own)) if key != one.key)
        again = any(one.key == fqn or one.key.endswith(f".{fqn}") for fqn in made_again)
        if not again and not any((one.section, key) in kept for key in same):
            return True
    return False


def _helps(question: Question, options: RemapOptions, after: Diff, most: int) -> bool:
    """Whether fewer than `most` differences are left, and none of what is missing may be among what it leaves out."""
    loses = options.drop and any(entry.status == "missing" for entry in after.entries)
    return not loses and question.remaining(after) < most
