"""Values over a checkpoint's keys, and their hashes, streamed: what tells whether tensors that differ are the same."""

from __future__ import annotations

from collections.abc import Mapping

from ckpttool.checkpoint import ExtraEntry, TensorEntry
from ckpttool.evaluate import without_torch
from ckpttool.evaluate.compare import digest
from ckpttool.expression import Expression, Ref


class Digests:
    """Hashes of the values over one section's keys, each read when it is first asked for."""

    def __init__(self, entries: Mapping[str, TensorEntry | ExtraEntry]) -> None:
        self._entries = entries
        self._known: dict[Expression, bytes | None] = {}

    def __call__(self, value: Expression) -> bytes | None:
        """The hash of the value's bytes in row-major order; None where it is no dense tensor."""
        if value not in self._known:
            entry = made(value, self._entries)
            self._known[value] = None if entry is None else digest(entry)
        return self._known[value]


def made(value: Expression, entries: Mapping[str, TensorEntry | ExtraEntry]) -> TensorEntry | None:
    """The tensor that has the value, computed when it is read; None for a key that holds no dense tensor."""
    found = without_torch.entry_of("", value, entries)
    if found is None and not isinstance(value, Ref):
        from ckpttool.evaluate import with_torch

        found = with_torch.entry_of("", value, entries)
    return found
