"""What two checkpoints that no model explains may have in common under other names: the question put to `inference`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ckpttool.checkpoint import Checkpoint, Section
from ckpttool.evaluate.digests import Digests
from ckpttool.formats.remarks import is_placeholder
from ckpttool.naming.inference.search import infer
from ckpttool.naming.inference.values import Inference, Side
from ckpttool.operands.checkpoint import model_section
from ckpttool.queries.diff.computed import unpairable
from ckpttool.queries.diff.result import KIND, Entry

_DEFINED = frozenset({"torch_zip", "torch_legacy", "torchscript", "pt2", "memory"})  # keys in the order of definition
_OPEN = frozenset({"missing", "unexpected", "shape"})


def known(entries: Iterable[Entry]) -> dict[str, str]:
    """Keys of the left -> keys of the right that are one tensor's by name, but for those of another shape."""
    both = (entry for entry in entries if len(entry.left) == len(entry.right) == 1)
    return {e.left[0]: e.right[0] for e in both if e.status != "shape" or e.reason == KIND}


def suggestions(left: Checkpoint, right: Checkpoint, entries: Sequence[Entry], values: bool) -> Inference:
    """Pairs of what `entries` leave open; with `values` also by what the tensors hold, which is read for it."""
    if not _OPEN & {entry.status for entry in entries}:
        return Inference()
    seconds = {key for entry in entries if entry.status == "alias" for key in (*entry.left, *entry.right)}
    mine, theirs = (
        _side(one, model_section(one), seconds | out, values) for one, out in zip((left, right), unpairable(entries))
    )
    return infer(mine, theirs, known(entries))


def _side(checkpoint: Checkpoint, section: Section, left_out: set[str], values: bool) -> Side:
    tensors = [entry for entry in section.tensors if entry.key not in left_out and not is_placeholder(entry)]
    return Side(tensors, checkpoint.format in _DEFINED, Digests(section.by_key()) if values else None)
