"""Assemble tensors and storages from chunks of others, when they are written."""

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
from ckpttool.io.ranges import read_span

SLAB = 1 << 24  # bytes that are put together before they are passed on


@dataclass(frozen=True, slots=True)
class Box:
    """A box of a tensor: its corner and sizes in elements, and its elements in row-major order."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    data: Span | bytes

    @property
    def first_row(self) -> int:
        return self.offsets[0]

    @property
    def end_row(self) -> int:
        return self.offsets[0] + self.sizes[0]

    def rows(self, first: int, end: int, itemsize: int) -> Span | bytes:
        """Return the box's elements in the tensor's rows `first` to `end`."""
        row = prod(self.sizes[1:]) * itemsize
        begin, length = (first - self.first_row) * row, (end - first) * row
        if isinstance(self.data, Span):
            return Span(self.data.path, self.data.offset + begin, length)
        return self.data[begin : begin + length]


def assembled(shape: tuple[int, ...], itemsize: int, boxes: Sequence[Box]) -> Iterator[Part]:
    """Yield the parts of a tensor that the boxes cover without overlapping, rows at a time. No box is empty."""
    if len(boxes) == 1:
        yield boxes[0].data
        return
    row = prod(shape[1:]) * itemsize
    waiting = sorted(boxes, key=lambda box: box.offsets, reverse=True)
    members: list[Box] = []  # the boxes of the rows between two edges
    for first, end in pairwise(sorted({edge for box in boxes for edge in (box.first_row, box.end_row)})):
        members = [box for box in members if box.end_row > first]
        while waiting and waiting[-1].first_row == first:
            members.append(waiting.pop())
        if len(members) == 1:
            yield members[0].rows(first, end, itemsize)
            continue
        step = max(1, SLAB // row)
        for start in range(first, end, step):
            yield _slab(shape, itemsize, start, min(start + step, end), members)


def _slab(shape: tuple[int, ...], itemsize: int, first: int, end: int, members: Sequence[Box]) -> memoryview:
    row = prod(shape[1:]) * itemsize
    slab = bytearray((end - first) * row)
    for box in members:
        rows = box.rows(first, end, itemsize)
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
    """Return the elements of a row at which runs of a box's elements begin, and the length of the runs."""
    starts, run, is_full, step = [0], 1, True, 1
    for extent, offset, size in zip(reversed(shape), reversed(offsets), reversed(sizes)):
        if is_full:
            starts, run, is_full = [offset * step], size * step, size == extent
        else:
            starts = [(offset + index) * step + start for index in range(size) for start in starts]
        step *= extent
    return starts, run


def row_major(entry: TensorEntry) -> TensorEntry:
    """Return the entry with its elements in row-major order; a strided view is gathered when it is written."""
    if entry.storage is None or entry.is_contiguous:
        return entry
    from ckpttool.evaluate.numpy_eval import TILE, in_order

    tiles = 3 * min(entry.nbytes, TILE)  # one that is read, in its new order, and the one before it
    storage = Storage(Lazy(entry.nbytes, lambda: in_order(entry), memory=tiles + 2 * entry.storage.held))
    return replace(entry, stride=contiguous_stride(entry.shape), offset=0, storage=storage)


def window(entry: TensorEntry, start: int, count: int) -> Part:
    """Return elements `start` to `start + count` of a contiguous entry."""
    assert entry.storage is not None
    assert entry.is_contiguous
    size = itemsize(entry.dtype)
    return _cut(entry.storage.data, (entry.offset + start) * size, count * size)


def across(entries: Iterable[TensorEntry], start: int, count: int) -> list[Part]:
    """Return elements `start` to `start + count` of entries laid end to end, each in row-major order."""
    parts, at = [], 0
    for entry in map(row_major, entries):
        low, high = max(start, at), min(start + count, at + entry.numel)
        if low < high:
            parts.append(window(entry, low - at, high - low))
        at += entry.numel
    return parts


def concatenated(parts: Sequence[Part]) -> Storage:
    """Return one storage of these bytes; a span of a file if they are one, else read when it is written."""
    if len(parts) == 1 and isinstance(parts[0], (Span, Lazy)):
        return Storage(parts[0])
    memory = max((part.held for part in parts if isinstance(part, Lazy)), default=0)
    return Storage(Lazy(sum(map(length_of, parts)), lambda: parts, memory=memory))


def in_own_storage(entry: TensorEntry) -> TensorEntry:
    """Return the same values in a new storage: torch.load would tie views of one, and add up their ``step += 1``."""
    if entry.storage is None:
        return entry
    ordered = row_major(entry)
    return replace(ordered, storage=concatenated([window(ordered, 0, ordered.numel)]), offset=0, payload=None)


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
    """The parts that were produced for the first window, and how many of their bytes no window has read."""

    parts: list[Part]
    left: int


_KEPT = 1 << 28  # bytes of tensors that are kept for their other windows
_kept: WeakKeyDictionary[Lazy, _Produced] = WeakKeyDictionary()
_lock = RLock()


def _produced(part: Lazy, nbytes: int) -> Iterable[Part]:
    """Produce the parts for a window of `nbytes`, once for all windows as long as there is memory to keep them."""
    with _lock:
        produced = _kept.get(part)
        if produced is None:
            if part.length > _KEPT - sum(one.length for one in _kept):
                return part.produce()
            parts = part.produce()
            kept = parts if isinstance(parts, list) else [p if isinstance(p, (Span, Lazy)) else bytes(p) for p in parts]
            produced = _kept[part] = _Produced(kept, part.length)
        produced.left -= nbytes
        if produced.left <= 0:
            del _kept[part]
        return produced.parts
