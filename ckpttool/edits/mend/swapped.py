"""The swap that mends a diff of a program and weights for it."""

from __future__ import annotations

from dataclasses import replace

from ckpttool.checkpoint import Checkpoint
from ckpttool.edits.mend.attempt import Attempt, Question
from ckpttool.edits.mend.command import command
from ckpttool.edits.swap import run as swap
from ckpttool.edits.swap.options import SwapOptions
from ckpttool.edits.swap.swap import Misfit
from ckpttool.errors import CkptError
from ckpttool.operands.printed import operand, outputs
from ckpttool.words import plural


def by_swap(question: Question) -> tuple[list[Attempt], list[str]]:
    """The swap that works, of two checkpoints of which one is a program; else why none does."""
    left, right = question.left, question.right
    assert left is not None
    assert right is not None
    program, weights = (right, left) if right.format == "pt2" else (left, right)
    asked = question.options
    options = SwapOptions(model=asked.model, model_kwargs=asked.model_kwargs, materialize=asked.materialize)
    found = _tried(question, program, weights, options)
    for _ in range(2):  # constants, and then another dtype
        if isinstance(found, Misfit) and found.advice in ("constants", "cast"):
            constants, cast = options.constants or found.advice == "constants", found.advice == "cast"
            options = replace(options, constants=constants, cast=cast)
            found = _tried(question, program, weights, options)
    return ([found], []) if isinstance(found, Attempt) else ([], _refused(found, asked.model is not None))


def _refused(error: CkptError, final: bool) -> list[str]:
    """Why swap-weights would be refused, where that is the last word: without a model it is not."""
    if not final:
        return []
    first = "; ".join(map(str, error.problems[:3]))
    more = f"; and {plural(len(error.problems) - 3, 'problem')} more" if len(error.problems) > 3 else ""
    way = f"; {error.hint}" if isinstance(error, Misfit) and error.advice == "values" else ""
    return [f"swap-weights would be refused: {error.message} ({first}{more}){way}" if first else error.message]


def _tried(question: Question, program: Checkpoint, weights: Checkpoint, options: SwapOptions) -> Attempt | CkptError:
    """The swap that `options` ask for, or why it is refused."""
    read = replace(options, dry_run=True, model=None if options.model is None else question.model)
    try:
        made = swap.run(program.source, weights, read).program
    except CkptError as error:
        return error
    out = next(outputs(program.source, "swapped"))
    made = replace(made, source=out)
    sides = (made, weights) if program is question.left else (weights, made)
    line = command("swap-weights", (program.source, operand(weights.source, weights.format)), replace(options, out=out))
    return Attempt(line, question.of_names(*sides))
