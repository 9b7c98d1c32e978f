"""The commands that mend what a diff found between optimizers, as lines that can be pasted into a shell."""

from __future__ import annotations

from collections.abc import Iterable

from ckpttool.operands.checkpoint import split
from ckpttool.operands.model import ModelOperand
from ckpttool.operands.printed import outputs
from ckpttool.optimizer_state import GROUPS
from ckpttool.queries.diff.optimizer_load import OptimizerFit, Remedy
from ckpttool.queries.diff.result import Entry
from ckpttool.words import shell

Commands = tuple[str, ...]
Fit = Iterable[Entry]


def optimizer(model: ModelOperand, source: str, section: str, fit: OptimizerFit) -> Commands:
    """For an optimizer's state that another optimizer is to load."""
    ckpt, picked = split(source)
    made = model.optimizer if isinstance(model.optimizer, str) else "OPTIMIZER"
    by_optimizer = () if model.optimizer is None else ("--optimizer", made)
    to_optimizer = () if model.optimizer is None else ("--to-optimizer", made)
    words: dict[Remedy | None, tuple[tuple[str, ...], str]] = {
        "by_name": ((*model.words, *by_optimizer, "--optimizer-keys", fit.form), "ordered"),
        "regroup": ((*model.words, *to_optimizer), "mapped"),
        "old_model": ((*_saver(by_optimizer, fit), *model.words_of("--to-model"), *to_optimizer), "mapped"),
    }
    if fit.remedy == "afresh" and (section or picked):
        words["afresh"] = ("--drop", section or picked or ""), "afresh"
    if fit.remedy not in words:
        return ()
    options, word = words[fit.remedy]
    return (_remap(ckpt, *options, out=next(outputs(ckpt, word))),)


def _saver(optimizer: tuple[str, ...], fit: OptimizerFit) -> tuple[str, ...]:
    """The options that name what saved the file, and leave out what the new model has no place for."""
    of_old = {True: optimizer, False: ("--optimizer", "OLD_OPTIMIZER"), None: ()}[fit.same_groups]
    return ("--model", "OLD", *of_old, *(word for key in fit.foreign_keys for word in ("--drop", key)))


def optimizers(left: str, named: bool, form: str, wanted: str, model: ModelOperand | None, fit: Fit) -> Commands:
    """For an optimizer in one form, order or grouping, where the other is in another.

    `named`: it is known whose state the left's ids are. What the command was not told, the placeholders stand for.
    """
    moved = any(
        entry.status == "order" or (entry.status == "renamed" and entry.right[0].startswith(GROUPS)) for entry in fit
    )
    if form == wanted and not moved:
        return ()
    by_model = ("--model", "MODEL") if model is None else model.words
    made = model.optimizer if model is not None and isinstance(model.optimizer, str) else None
    if moved:
        words = (*by_model, "--to-optimizer", made or "OPTIMIZER")
    else:
        words = () if model is None and named else by_model
        words += () if made is None else ("--optimizer", made)
    words += () if form == wanted else ("--optimizer-keys", wanted)
    return (_remap(split(left)[0], *words, out=next(outputs(left, wanted))),)


def _remap(ckpt: str, *words: str, out: str) -> str:
    return shell("ckpttool", "remap", ckpt, *words, "-o", out)
