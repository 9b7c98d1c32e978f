"""A tensor that lies in boxes, in several places: put in row-major order when it is needed.

However large the tensor is, a part of it is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import prod

from ckpttool.checkpoint import Part, Span
from ckpttool.io.ranges import read_span
from ckpttool.values import dataclass

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
