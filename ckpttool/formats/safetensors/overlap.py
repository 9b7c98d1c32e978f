"""Which tensors share bytes: a writer whose format gives every tensor bytes of its own has to know."""

from __future__ import annotations

from collections.abc import Iterable

from ckpttool.checkpoint import TensorEntry, own_storages
from ckpttool.dtypes import itemsize


def overlapping(tensors: Iterable[TensorEntry]) -> dict[str, str]:
    """Key -> an earlier key whose bytes it shares, wholly or in part; empty if and only if no two tensors share bytes.

    Of many that share the same bytes not every pair is named. A view with gaps counts with all bytes from its first
    element to its last.
    """
    tensors = tuple(tensors)
    if own_storages(tensors):
        return {}
    by_storage: dict[int, list[tuple[int, int, tuple[int, str]]]] = {}
    for position, entry in enumerate(tensors):
        begin, end = _extent(entry)
        if begin < end:
            by_storage.setdefault(id(entry.storage), []).append((begin, end, (position, entry.key)))
    found: list[tuple[int, str, str]] = []
    for group in by_storage.values():
        group.sort()
        _, reach, widest = group[0]
        for begin, end, current in group[1:]:
            if begin < reach:
                (_, first), (position, key) = sorted([widest, current])
                found.append((position, key, first))
            if end > reach:
                reach, widest = end, current
    return {key: other for _, key, other in sorted(found)}


def _extent(entry: TensorEntry) -> tuple[int, int]:
    """First byte and end of the elements in their storage; nothing for a tensor without elements or storage."""
    if entry.storage is None or not entry.numel:
        return 0, 0
    return entry.offset * itemsize(entry.dtype), entry.end * itemsize(entry.dtype)
