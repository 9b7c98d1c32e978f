"""What the model's definition would mend, where nobody has named it: the commands with ``MODEL`` in its place."""

from __future__ import annotations

from collections.abc import Iterator

from ckpttool.checkpoint import Section, TensorEntry
from ckpttool.edits.mend.attempt import Question
from ckpttool.edits.mend.command import command
from ckpttool.edits.remap.options import RemapOptions
from ckpttool.edits.swap.options import SwapOptions
from ckpttool.operands.checkpoint import model_section
from ckpttool.operands.printed import operand, outputs
from ckpttool.queries.diff.result import Diff

_MODEL = "MODEL"


def with_a_model(question: Question, diff: Diff) -> tuple[str, ...]:
    """Commands for two checkpoints of which only the model's code could tell how they relate; none where it is named.

    They are given where all that differs looks like a state_dict hook's work, or a rank's, with the same shapes.
    """
    if question.model is not None:
        return ()
    left, right = question.left, question.right
    assert left is not None
    assert right is not None
    source = operand(left.source, left.format)
    tied = bool(model_section(left).aliases() or model_section(right).aliases())
    if left.format == "rank_files" or _lacks_second_names(diff):
        return (_remap(source, "serialized", tied),)
    hidden = _hidden_on(model_section(left), model_section(right), diff)
    if hidden is None:
        return ()
    if "pt2" in (left.format, right.format):
        program, weights = (right, left) if right.format == "pt2" else (left, right)
        options = SwapOptions(model=_MODEL, out=next(outputs(program.source, "swapped")))
        return (command("swap-weights", (program.source, operand(weights.source, weights.format)), options),)
    return (_remap(source, "exported" if hidden == "left" else "serialized", tied),)


def _lacks_second_names(diff: Diff) -> bool:
    """Whether all that the left lacks are second names of tensors that it has: the model ties them."""
    lacking = any(entry.status == "alias" and not entry.left for entry in diff.entries)
    return lacking and {entry.status for entry in diff.entries} <= {"same", "alias", "extra_state"}


def _remap(source: str, to: str, tied: bool) -> str:
    """The command; where tensors are `tied`, into a torch file, which holds each of their names."""
    *_, out = outputs(source, to) if tied else (next(outputs(source, to)),)
    return command("remap", (source,), RemapOptions(model=_MODEL, to=to, out=out))


def _hidden_on(left: Section, right: Section, diff: Diff) -> str | None:
    """The side whose keys lack a segment that the other has, where that is all that differs; else None."""
    mine = [key for entry in diff.entries if entry.status == "unexpected" for key in entry.left]
    theirs = [key for entry in diff.entries if entry.status == "missing" for key in entry.right]
    others = {entry.status for entry in diff.entries} - {"same", "alias", "extra_state", "missing", "unexpected"}
    if others or not mine or len(mine) != len(theirs):
        return None
    if _all_hidden(left, mine, right, theirs):
        return "left"
    return "right" if _all_hidden(right, theirs, left, mine) else None


def _all_hidden(short: Section, shorter: list[str], long: Section, longer: list[str]) -> bool:
    have, want = short.by_key(), long.by_key()
    rest = set(shorter)
    for key in longer:
        hits = [name for name in _one_less(key) if name in rest]
        if len(set(hits)) != 1 or _likeness(have[hits[0]]) != _likeness(want[key]):
            return False
        rest.discard(hits[0])
    return True


def _one_less(key: str) -> Iterator[str]:
    parts = key.split(".")
    return (".".join(parts[:i] + parts[i + 1 :]) for i in range(len(parts)))


def _likeness(entry: object) -> object:
    return (entry.dtype, entry.shape) if isinstance(entry, TensorEntry) else None
