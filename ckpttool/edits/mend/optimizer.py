"""What mends a saved optimizer's state: the remap that its remedy is, tried where all that it names is known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckpttool.edits.mend.attempt import Question, try_remap
from ckpttool.edits.mend.command import PLACEHOLDERS, command
from ckpttool.edits.mend.ways import Way
from ckpttool.edits.remap.options import RemapOptions
from ckpttool.operands.checkpoint import open_operand, split
from ckpttool.operands.printed import operand, outputs
from ckpttool.queries.diff.result import Diff, Remedy
from ckpttool.words import some

FOREIGN = "no fix is suggested, since the new model has no place for these keys, and their values would be lost"
UNMENDED = (
    "no remap makes this state fit: load the model alone, and start the optimizer afresh; the file is left as it is"
)


def mended(question: Question, diff: Diff, remedy: Remedy) -> Diff:
    """`diff` with the command that fixes it: tried, unless it names what only the user knows; else a note."""
    assert question.left is not None
    path, picked = split(question.left.source)
    whole = question.left if picked is None else open_operand(path)
    if remedy.foreign_keys:
        lost = f"{FOREIGN}: {some(remedy.foreign_keys)}"
        return replace(diff, notes=(*diff.notes, lost))
    if remedy.way != "afresh":
        word, options = _way(question, remedy)
        if set(PLACEHOLDERS).intersection(v for v in vars(options).values() if isinstance(v, str)):
            named = operand(path, whole.format)
            return replace(diff, fix=(command("remap", (named,), replace(options, out=next(outputs(named, word)))),))
        found = try_remap(replace(question, left=whole, picked=picked), options, word, question.remaining(diff))
        if found is not None:
            return replace(diff, fix=(found.command,))
    return replace(diff, notes=(*diff.notes, UNMENDED))


def _way(question: Question, remedy: Remedy) -> Way:
    """The word for the output's name, and the remap, with placeholders for what the question does not name."""
    asked, made = question.options, None if question.model is None else question.model.optimizer
    model: dict[str, Any] = {"model": asked.model, "model_kwargs": asked.model_kwargs, "materialize": asked.materialize}
    model = {"model": "MODEL"} if asked.model is None else model
    form = remedy.form
    old = {True: made, False: "OLD_OPTIMIZER", None: None}[remedy.same_groups]
    ways: Mapping[str, tuple[str, dict[str, Any]]] = {
        "by_name": ("ordered", {**model, "optimizer": made, "optimizer_keys": form}),
        "regroup": ("mapped", {**model, "to_optimizer": made}),
        "old_model": (
            "mapped",
            {
                "model": "OLD",
                "optimizer": None if made is None else old,
                "to_model": asked.model,
                "to_model_kwargs": asked.model_kwargs,
                "materialize": asked.materialize,
                "to_optimizer": made,
            },
        ),
        "like_right": (form or "ordered", {**model, "to_optimizer": made or "OPTIMIZER", "optimizer_keys": form}),
        "keys_by_model": (form or "", {**model, "optimizer": made, "optimizer_keys": form}),
        "keys": (form or "", {"optimizer_keys": form}),
    }
    word, fields = ways[remedy.way]
    return word, RemapOptions(**fields)
