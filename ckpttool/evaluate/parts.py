"""Storages made of several pieces of others, one after another. No byte moves yet."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from threading import RLock
from weakref import WeakKeyDictionary

from ckpttool.checkpoint import Lazy, Part, Span, Storage, TensorEntry, contiguous_stride, length_of
from ckpttool.dtypes import itemsize
from ckpttool.evaluate import with_numpy
from ckpttool.values import dataclass


def row_major(entry: TensorEntry) -> TensorEntry:
    """The entry with its elements in row-major order; those of a strided view are gathered when they are written."""
    if entry.storage is None or entry.is_contiguous:
        return entry
    tiles = 3 * min(entry.nbytes, with_numpy.TILE)  # one that is read, in its new order, and the one before it
    storage = Storage(Lazy(entry.nbytes, lambda: with_numpy.in_order(entry), memory=tiles + 2 * entry.storage.held))
    return replace(entry, stride=contiguous_stride(entry.shape), offset=0, storage=storage)


def window(entry: TensorEntry, start: int, count: int) -> Part:
    """Elements `start` to `start + count` of a contiguous entry, in row-major order."""
    assert entry.storage is not None
    assert entry.is_contiguous
    size = itemsize(entry.dtype)
    return _within(entry.storage.data, (entry.offset + start) * size, count * size)


def across(entries: Iterable[TensorEntry], start: int, count: int) -> list[Part]:
    """Elements `start` to `start + count` of entries that are laid end to end, each in row-major order."""
    parts, at = [], 0
    for entry in map(row_major, entries):
        low, high = max(start, at), min(start + count, at + entry.numel)
        if low < high:
            parts.append(window(entry, low - at, high - low))
        at += entry.numel
    return parts


def concatenated(parts: Sequence[Part]) -> Storage:
    """One storage of these bytes; a span of a file where they lie in one piece, else read when it is written."""
    if len(parts) == 1 and isinstance(parts[0], (Span, Lazy)):
        return Storage(parts[0])
    memory = max((part.held for part in parts if isinstance(part, Lazy)), default=0)
    return Storage(Lazy(sum(map(length_of, parts)), lambda: parts, memory=memory))


def in_own_storage(entry: TensorEntry) -> TensorEntry:
    """The same values in a storage of their own: torch.load would tie what shares one, and ``step += 1`` add up."""
    if entry.storage is None:
        return entry
    whole = row_major(entry)
    return replace(whole, storage=concatenated([window(whole, 0, whole.numel)]), offset=0, payload=None)


def _within(part: Part, start: int, nbytes: int) -> Part:
    """Bytes `start` to `start + nbytes` of the part."""
    if isinstance(part, Span):
        return Span(part.path, part.offset + start, nbytes)
    if isinstance(part, Lazy):
        if nbytes == part.length:
            return part
        return Lazy(nbytes, lambda: _cut(_produced(part, nbytes), start, nbytes), reads=part.reads, memory=part.memory)
    return part[start : start + nbytes]


@dataclass(slots=True, eq=False)
class _Produced:
    """What was produced for the first window, and how many of its bytes no window has had."""

    parts: list[Part]
    left: int


_KEPT = 1 << 28  # bytes of tensors that are kept for their other windows
_kept: WeakKeyDictionary[Lazy, _Produced] = WeakKeyDictionary()
_lock = RLock()


def _produced(part: Lazy, nbytes: int) -> Iterable[Part]:
    """Produce the parts for a window of `nbytes`, once for all windows as long as there is memory to keep them."""
    with _lock:
        found = _kept.get(part)
        if found is None:
            if part.length > _KEPT - sum(one.length for one in _kept):
                return part.produce()
            parts = part.produce()
            own = parts if isinstance(parts, list) else [p if isinstance(p, (Span, Lazy)) else bytes(p) for p in parts]
            found = _kept[part] = _Produced(own, part.length)
        found.left -= nbytes
        if found.left <= 0:
            del _kept[part]
        return found.parts


def _cut(parts: Iterable[Part], start: int, nbytes: int) -> Iterator[Part]:
    """Bytes `start` to `start + nbytes` of the parts, of which those before them are not read."""
    for part in parts:
        length = length_of(part)
        count = min(length - start, nbytes)
        if count > 0:
            yield _within(part, start, count)
            nbytes -= count
        start = max(0, start - length)
        if not nbytes:
            return
