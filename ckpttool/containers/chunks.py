"""Chunks of a larger tensor: check that they cover it, and assemble its bytes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise
from math import prod
from operator import add, le
from typing import Union

from ckpttool.core.checkpoint import Part, Span, TensorEntry
from ckpttool.core.strides import Shape
from ckpttool.core.values import dataclass
from ckpttool.evaluate.compare import elements
from ckpttool.io.pieces import read_span

SLAB = 1 << 24  # bytes that are assembled in memory at a time

Data = Union[Span, bytes]  # elements in row-major order
ChunkData = tuple["Chunk", Data]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor: its first index and its size in each dimension (torch:
    ``ChunkStorageMetadata``).
    """

    offsets: tuple[int, ...]
    sizes: Shape


def cover_problem(shape: Shape, chunks: Collection[Chunk]) -> str | None:
    """Return why the chunks do not hold each element of the tensor exactly once; None if they
    do.
    """
    for chunk in chunks:
        if not _is_inside(chunk, shape):
            return (
                f"a chunk at {list(chunk.offsets)} of {list(chunk.sizes)} elements is not"
                f" inside {list(shape)}"
            )
    filled = [chunk for chunk in chunks if 0 not in chunk.sizes]
    covered = sum(prod(chunk.sizes) for chunk in filled)
    if covered != prod(shape):
        return f"its chunks hold {covered:,} elements, it has {prod(shape):,}"
    if len(filled) < 2:
        return None
    # Sweep along the dimension in which the chunks begin at the most places.
    starts = zip(*[chunk.offsets for chunk in filled])
    counts = [len(set(offsets)) for offsets in starts]
    dim = counts.index(max(counts))
    active: list[Chunk] = []
    for chunk in sorted(filled, key=lambda chunk: chunk.offsets[dim]):
        begin = chunk.offsets[dim]
        active = [other for other in active if other.offsets[dim] + other.sizes[dim] > begin]
        if any(_overlap(chunk, other) for other in active):
            return "two of its chunks overlap"
        active.append(chunk)
    return None


def _is_inside(chunk: Chunk, shape: Shape) -> bool:
    if not len(chunk.offsets) == len(chunk.sizes) == len(shape):
        return False
    ends = map(add, chunk.offsets, chunk.sizes)
    return all(map(le, ends, shape))


def _overlap(left: Chunk, right: Chunk) -> bool:
    for start, size, other, other_size in zip(left.offsets, left.sizes, right.offsets, right.sizes):
        if start >= other + other_size or other >= start + size:
            return False
    return True


def row_major_data(entry: TensorEntry) -> Data:
    """Return the place of the entry's elements in row-major order; their bytes if the entry is a
    strided view.
    """
    return entry.span if entry.span is not None else b"".join(map(bytes, elements(entry)))


def assemble(shape: Shape, itemsize: int, chunks: Sequence[ChunkData]) -> Iterator[Part]:
    """Yield the bytes of the tensor that the chunks cover. No chunk is empty."""
    if len(chunks) == 1:
        yield chunks[0][1]
        return
    row = prod(shape[1:]) * itemsize
    for first, last, members in _bands(chunks):
        if len(members) == 1:
            yield _rows(members[0], first, last, itemsize)
            continue
        step = max(1, SLAB // row)
        for start in range(first, last, step):
            yield _slab(shape, itemsize, start, min(start + step, last), members)


def _bands(
    chunks: Sequence[ChunkData],
) -> Iterator[tuple[int, int, list[ChunkData]]]:
    """Yield ranges of rows (first dimension) that the same chunks hold, in order::

    AAAB    rows 0 to 2: A and B
    AAAB
    CCCB    row 2: C and B
    """
    edges: set[int] = set()
    for chunk, _ in chunks:
        edges.update((chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0]))
    waiting = sorted(chunks, key=lambda pair: pair[0].offsets, reverse=True)
    active: list[ChunkData] = []
    for first, last in pairwise(sorted(edges)):
        active = [pair for pair in active if pair[0].offsets[0] + pair[0].sizes[0] > first]
        while waiting and waiting[-1][0].offsets[0] == first:
            active.append(waiting.pop())
        yield first, last, active


def _rows(member: ChunkData, first: int, last: int, itemsize: int) -> Data:
    chunk, data = member
    row = prod(chunk.sizes[1:]) * itemsize
    begin = (first - chunk.offsets[0]) * row
    end = (last - chunk.offsets[0]) * row
    if isinstance(data, Span):
        return Span(data.path, data.offset + begin, end - begin)
    return data[begin:end]


def _slab(
    shape: Shape,
    itemsize: int,
    first: int,
    last: int,
    members: Sequence[ChunkData],
) -> memoryview:
    import numpy as np

    element = np.dtype((np.void, itemsize))
    slab = np.zeros((last - first, *shape[1:]), element)
    for chunk, data in members:
        rows = _rows((chunk, data), first, last, itemsize)
        elements = np.frombuffer(read_span(rows) if isinstance(rows, Span) else rows, element)
        box = [slice(None)]
        for at, size in zip(chunk.offsets[1:], chunk.sizes[1:]):
            box.append(slice(at, at + size))
        slab[tuple(box)] = elements.reshape(last - first, *chunk.sizes[1:])
    return slab.reshape(-1).view(np.uint8).data
