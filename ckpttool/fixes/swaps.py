"""The swap that gives a program the weights of the other checkpoint."""

from __future__ import annotations

from dataclasses import replace

from ckpttool.core.errors import CkptError
from ckpttool.core.text import Note, plural
from ckpttool.fixes.commands import FEW
from ckpttool.fixes.question import DiffQuestion
from ckpttool.fixes.trial import TriedFix, try_swap
from ckpttool.swap.misfit import Misfit
from ckpttool.swap.options import SwapOptions


def swap_fix(question: DiffQuestion) -> tuple[TriedFix | None, list[str]]:
    """Return the swap that works if one of two checkpoints is a program; else why none does, if
    that is final.
    """
    options = SwapOptions(**question.model_options)
    trial = try_swap(question, options)
    for _ in range(2):  # constants, and then another dtype
        if isinstance(trial, Misfit) and trial.advice in ("constants", "cast"):
            constants = options.constants or trial.advice == "constants"
            options = replace(options, constants=constants, cast=trial.advice == "cast")
            trial = try_swap(question, options)
    if isinstance(trial, TriedFix):
        return trial, []
    if question.options.model is None:
        return None, []
    return None, [Note(_refusal(trial), "no-fix")]


def _refusal(error: CkptError) -> str:
    """Return why swap-weights is refused, with the first problems."""
    if not error.problems:
        return error.message
    problems = "; ".join(map(str, error.problems[:FEW]))
    others = len(error.problems) - FEW
    if others > 0:
        problems += f"; and {plural(others, 'problem')} more"
    text = f"swap-weights would be refused: {error.message} ({problems})"
    if isinstance(error, Misfit) and error.advice == "values":
        text += f"; {error.hint}"
    return text
