"""Tensors and storages assembled from chunks of others when they are needed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from math import prod
from threading import RLock
from weakref import WeakKeyDictionary

from ckpttool.core.checkpoint import Lazy, Part, Span, Storage, TensorEntry, contiguous_stride, length_of
from ckpttool.core.dtypes import itemsize
from ckpttool.core.values import dataclass
from ckpttool.evaluate import numpy_eval
from ckpttool.io.ranges import read_span

SLAB = 1 << 24  # bytes that are put together before they are handed on


@dataclass(frozen=True, slots=True)
class Box:
    """A box of a tensor, its corner and sizes in elements, and where its own elements lie in row-major order."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    data: Span | bytes

    def rows(self, first: int, last: int, itemsize: int) -> Span | bytes:
        """The box's own elements of the tensor's rows `first` to `last`: they lie side by side."""
        row = prod(self.sizes[1:]) * itemsize
        begin, length = (first - self.offsets[0]) * row, (last - first) * row
        if isinstance(self.data, Span):
            return Span(self.data.path, self.data.offset + begin, length)
        return self.data[begin : begin + length]


def assembled(shape: tuple[int, ...], itemsize: int, boxes: Sequence[Box]) -> Iterator[Part]:
    """The parts of the tensor that the boxes cover without overlapping; none of them is empty."""
    if len(boxes) == 1:
        yield boxes[0].data
    elif boxes:
        yield from _in_rows(shape, itemsize, boxes)


def _in_rows(shape: tuple[int, ...], itemsize: int, boxes: Sequence[Box]) -> Iterator[Part]:
    """The tensor, rows of its first dimension at a time."""
    row = prod(shape[1:]) * itemsize
    for first, last, members in _bands(boxes):
        if len(members) == 1:
            yield members[0].rows(first, last, itemsize)
            continue
        step = max(1, SLAB // row)
        for start in range(first, last, step):
            end = min(start + step, last)
            yield _slab(shape, itemsize, start, end, members)


def _bands(boxes: Sequence[Box]) -> Iterator[tuple[int, int, list[Box]]]:
    """Ranges of rows that lie in the same boxes, in order."""
    ordered = sorted(boxes, key=lambda box: box.offsets)
    edges = sorted({edge for box in boxes for edge in (_top(box), _bottom(box))})
    active: list[Box] = []
    following = iter(ordered)
    box = next(following, None)
    for first, last in pairwise(edges):
        active = [other for other in active if _bottom(other) > first]
        while box is not None and _top(box) == first:
            active.append(box)
            box = next(following, None)
        yield first, last, active


def _top(box: Box) -> int:
    return box.offsets[0]


def _bottom(box: Box) -> int:
    return box.offsets[0] + box.sizes[0]


def _slab(shape: tuple[int, ...], itemsize: int, first: int, last: int, members: Sequence[Box]) -> memoryview:
    row = prod(shape[1:]) * itemsize
    slab = bytearray((last - first) * row)
    for box in members:
        rows = box.rows(first, last, itemsize)
        data = memoryview(read_span(rows) if isinstance(rows, Span) else rows)
        starts, run = _runs(shape[1:], box.offsets[1:], box.sizes[1:])
        at, length = 0, run * itemsize
        for base in range(0, len(slab), row):
            for start in starts:
                target = base + start * itemsize
                slab[target : target + length] = data[at : at + length]
                at += length
    return memoryview(slab)


def _runs(shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[list[int], int]:
    """Where in one row the elements of a box begin, and how many lie side by side there; in elements."""
    starts, run, whole = [0], 1, True
    step = 1
    for extent, offset, size in zip(reversed(shape), reversed(offsets), reversed(sizes)):
        if whole:
            starts, run, whole = [offset * step], size * step, size == extent
        else:
            starts = [(offset + index) * step + start for index in range(size) for start in starts]
        step *= extent
    return starts, run


def row_major(entry: TensorEntry) -> TensorEntry:
    """The entry with its elements in row-major order; those of a strided view are gathered when they are written."""
    if entry.storage is None or entry.is_contiguous:
        return entry
    tiles = 3 * min(entry.nbytes, numpy_eval.TILE)  # one that is read, in its new order, and the one before it
    storage = Storage(Lazy(entry.nbytes, lambda: numpy_eval.in_order(entry), memory=tiles + 2 * entry.storage.held))
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
