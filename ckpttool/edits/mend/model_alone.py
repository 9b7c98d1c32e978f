"""A model whose serialized keys are not its runtime names: what brings any checkpoint of it to a program."""

from __future__ import annotations

from dataclasses import replace

from ckpttool.edits import run as remap
from ckpttool.edits.mend.attempt import Question
from ckpttool.edits.mend.command import command
from ckpttool.edits.remap.options import RemapOptions
from ckpttool.edits.swap.options import SwapOptions
from ckpttool.errors import CkptError
from ckpttool.operands.names_file import saved_by
from ckpttool.queries.diff.result import Diff
from ckpttool.words import plural, some

_FEW = 3
LOST = (
    "{tensors} in no key that state_dict() writes ({names}), so no command brings them back from a checkpoint of this "
    "model: keep them by a hook of your own, or mend the hook that takes them out"
)


def of_names(question: Question, diff: Diff) -> Diff:
    """`diff` with the commands, where they work for what the model saves; which checkpoint is meant is not known."""
    assert question.model is not None
    names, asked = question.model.names(), question.options
    model = {"model": asked.model, "model_kwargs": asked.model_kwargs, "materialize": asked.materialize}
    try:
        made = remap.run(saved_by(names), RemapOptions(model=names, to="exported", partial=True), may_copy=True).result
    except CkptError as error:
        problems = "; ".join(map(str, error.problems[:_FEW]))
        why = f"no command brings this model's checkpoints to its runtime names: {error.message} ({problems})"
        return replace(diff, notes=(*diff.notes, why))
    have = made.section("").by_key()
    lost = [t.fqn for t in names.runtime if t.persistent and t.alias_of is None and t.fqn not in have]
    notes = diff.notes
    if lost:
        tensors = f"{plural(len(lost), 'tensor')} {'is' if len(lost) == 1 else 'are'}"
        notes = (*notes, LOST.format(tensors=tensors, names=some(lost, _FEW)))
    if not any(entry.status in ("renamed", "transformed") for entry in diff.entries):
        return replace(diff, notes=notes)
    swap = command("swap-weights", ("PROGRAM.pt2", "CKPT"), SwapOptions(**model, out="OUT.pt2"))
    renamed = command("remap", ("CKPT",), RemapOptions(**model, to="exported", out="OUT.pt"))
    return replace(diff, fix=(renamed,) if lost else (swap, renamed), notes=notes)
