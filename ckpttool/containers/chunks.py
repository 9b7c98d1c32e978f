"""Chunks of a larger tensor: check that they cover it, and assemble its bytes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise
from math import prod
from typing import Union

from ckpttool.core.checkpoint import Part, Span, TensorEntry
from ckpttool.core.values import dataclass
from ckpttool.evaluate.compare import elements
from ckpttool.io.pieces import read_span

SLAB = 1 << 24  # bytes that are assembled in memory at a time

Data = Union[Span, bytes]  # elements in row-major order


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor: its first index and its size in each dimension (torch:
    ``ChunkStorageMetadata``).
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def cover_problem(shape: tuple[int, ...], chunks: Collection[Chunk]) -> str | None:
    """Return why the chunks do not hold each element of the tensor exactly once; None if they
    do.
    """
    for chunk in chunks:
        ranks_fit = len(chunk.offsets) == len(chunk.sizes) == len(shape)
        if not ranks_fit or any(
            at + size > extent for at, size, extent in zip(chunk.offsets, chunk.sizes, shape)
        ):
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
    along = max(range(len(shape)), key=lambda dim: len({chunk.offsets[dim] for chunk in filled}))
    active: list[Chunk] = []
    for chunk in sorted(filled, key=lambda chunk: chunk.offsets[along]):
        begin = chunk.offsets[along]
        active = [other for other in active if other.offsets[along] + other.sizes[along] > begin]
        for other in active:
            dims = zip(chunk.offsets, chunk.sizes, other.offsets, other.sizes)
            if all(a < b + b_size and b < a + a_size for a, a_size, b, b_size in dims):
                return "two of its chunks overlap"
        active.append(chunk)
    return None


def row_major_data(entry: TensorEntry) -> Data:
    """Return the place of the entry's elements in row-major order; their bytes if the entry is a
    strided view.
    """
    return entry.span if entry.span is not None else b"".join(map(bytes, elements(entry)))


def assemble(
    shape: tuple[int, ...], itemsize: int, chunks: Sequence[tuple[Chunk, Data]]
) -> Iterator[Part]:
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
    chunks: Sequence[tuple[Chunk, Data]],
) -> Iterator[tuple[int, int, list[tuple[Chunk, Data]]]]:
    """Yield ranges of rows (first dimension) that the same chunks hold, in order."""
    edges = {chunk.offsets[0] for chunk, _ in chunks} | {
        chunk.offsets[0] + chunk.sizes[0] for chunk, _ in chunks
    }
    waiting = sorted(chunks, key=lambda pair: pair[0].offsets, reverse=True)
    active: list[tuple[Chunk, Data]] = []
    for first, last in pairwise(sorted(edges)):
        active = [
            (chunk, data) for chunk, data in active if chunk.offsets[0] + chunk.sizes[0] > first
        ]
        while waiting and waiting[-1][0].offsets[0] == first:
            active.append(waiting.pop())
        yield first, last, active


def _rows(member: tuple[Chunk, Data], first: int, last: int, itemsize: int) -> Data:
    chunk, data = member
    row = prod(chunk.sizes[1:]) * itemsize
    begin, length = (first - chunk.offsets[0]) * row, (last - first) * row
    if isinstance(data, Span):
        return Span(data.path, data.offset + begin, length)
    return data[begin : begin + length]


def _slab(
    shape: tuple[int, ...],
    itemsize: int,
    first: int,
    last: int,
    members: Sequence[tuple[Chunk, Data]],
) -> memoryview:
    import numpy as np

    element = np.dtype((np.void, itemsize))
    slab = np.zeros((last - first, *shape[1:]), element)
    for chunk, data in members:
        rows = _rows((chunk, data), first, last, itemsize)
        elements = np.frombuffer(read_span(rows) if isinstance(rows, Span) else rows, element)
        box = [
            slice(None),
            *(slice(at, at + size) for at, size in zip(chunk.offsets[1:], chunk.sizes[1:])),
        ]
        slab[tuple(box)] = elements.reshape(last - first, *chunk.sizes[1:])
    return slab.reshape(-1).view(np.uint8).data
