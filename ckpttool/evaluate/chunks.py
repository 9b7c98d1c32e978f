"""Windows of tensors, and storages that concatenate them when they are written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from threading import RLock
from weakref import WeakKeyDictionary

from ckpttool.core.checkpoint import Lazy, Part, Span, Storage, TensorEntry, length_of
from ckpttool.core.dtypes import itemsize
from ckpttool.core.strides import contiguous_stride
from ckpttool.core.values import dataclass


def row_major(entry: TensorEntry) -> TensorEntry:
    """Return the entry with its elements in row-major order; a strided view is gathered when it is
    written.
    """
    if entry.storage is None or entry.is_contiguous:
        return entry
    from ckpttool.evaluate.numpy_eval import TILE, in_order

    tiles = 3 * min(entry.nbytes, TILE)  # one that is read, in its new order, and the one before it
    lazy = Lazy(entry.nbytes, lambda: in_order(entry), memory=tiles + 2 * entry.storage.held)
    storage = Storage(lazy, entry.storage)
    return replace(entry, stride=contiguous_stride(entry.shape), offset=0, storage=storage)


def window(entry: TensorEntry, start: int, count: int) -> Part:
    """Return elements `start` to `start + count` of a contiguous entry."""
    assert entry.storage is not None
    assert entry.is_contiguous
    size = itemsize(entry.dtype)
    return _cut(entry.storage.data, (entry.offset + start) * size, count * size)


def across(entries: Iterable[TensorEntry], start: int, count: int) -> list[Part]:
    """Return elements `start` to `start + count` of entries laid end to end, each in row-major
    order.

    entries  |── a ──|──── b ────|── c ──|
    window        |──────────────|            the end of a, and all of b
    """
    parts, begin = [], 0
    for entry in map(row_major, entries):
        end = begin + entry.numel
        low, high = max(start, begin), min(start + count, end)
        if low < high:
            parts.append(window(entry, low - begin, high - low))
        begin = end
    return parts


def concatenated(parts: Sequence[Part], origin: Storage | None = None) -> Storage:
    """Return one storage of these bytes, which are in `origin` now; a span of a file if they are
    one, else read when it is written.
    """
    if len(parts) == 1 and isinstance(parts[0], (Span, Lazy)):
        return Storage(parts[0], origin)
    memory = max((part.held for part in parts if isinstance(part, Lazy)), default=0)
    return Storage(Lazy(sum(map(length_of, parts)), lambda: parts, memory=memory), origin)


def in_own_storage(entry: TensorEntry) -> TensorEntry:
    """Return the same values in a new storage: torch.load would tie views of one, and add up their
    ``step += 1``.
    """
    if entry.storage is None:
        return entry
    ordered = row_major(entry)
    storage = concatenated([window(ordered, 0, ordered.numel)], entry.storage)
    return replace(ordered, storage=storage, offset=0, payload=None)


def _cut(part: Part, start: int, nbytes: int) -> Part:
    """Return bytes `start` to `start + nbytes` of the part."""
    if isinstance(part, Span):
        return Span(part.path, part.offset + start, nbytes)
    if not isinstance(part, Lazy):
        return part[start : start + nbytes]
    if nbytes == part.length:
        return part
    lazy = part

    def produce() -> Iterator[Part]:
        skipped, left = start, nbytes
        for piece in _produced(lazy, nbytes):
            count = min(length_of(piece) - skipped, left)
            if count > 0:
                yield _cut(piece, skipped, count)
                left -= count
            skipped = max(0, skipped - length_of(piece))
            if not left:
                return

    return Lazy(nbytes, produce, reads=part.reads, memory=part.memory)


@dataclass(slots=True, eq=False)
class _Produced:
    """The parts that were produced for the first window, and how many of their bytes no window has
    read.
    """

    parts: list[Part]
    left: int


_KEPT = 1 << 28  # bytes of tensors that are kept for their other windows
_kept: WeakKeyDictionary[Lazy, _Produced] = WeakKeyDictionary()
_lock = RLock()


def _produced(part: Lazy, nbytes: int) -> Iterable[Part]:
    """Produce the parts for a window of `nbytes`, once for all windows as long as there is memory
    to keep them.
    """
    with _lock:
        produced = _kept.get(part)
        if produced is None:
            if part.length > _KEPT - sum(kept.length for kept in _kept):
                return part.produce()
            parts = part.produce()
            if not isinstance(parts, list):
                parts = [_copied(piece) for piece in parts]
            produced = _kept[part] = _Produced(parts, part.length)
        produced.left -= nbytes
        if produced.left <= 0:
            del _kept[part]
        return produced.parts


def _copied(piece: Part) -> Part:
    """Return a piece that stays valid when the next one is produced."""
    return piece if isinstance(piece, (Span, Lazy)) else bytes(piece)
