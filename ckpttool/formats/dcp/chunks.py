"""The bytes of a tensor that was saved in chunks: found in their files when they are needed, and put in order.

However large the tensor is, a part of it is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from ckpttool import dtypes
from ckpttool.checkpoint import Checkpoint, Lazy, Span
from ckpttool.errors import CkptError
from ckpttool.formats.containers.zip_archive import read_archive
from ckpttool.formats.dcp.metadata import Chunk, Place, TensorItem
from ckpttool.formats.torch import zip_file as torch_zip
from ckpttool.io.paths import join
from ckpttool.io.ranges import SpanReader, read_span

SLAB = 1 << 24  # bytes that are put together before they are handed on


def tensor_data(folder: str, key: str, item: TensorItem) -> Lazy:
    """The bytes of the tensor in row-major order. Producing them raises `CkptError` where a chunk is not what
    ``.metadata`` says of it."""
    return Lazy(item.nbytes, lambda: _produce(folder, key, item))


def _produce(folder: str, key: str, item: TensorItem) -> Iterator[bytes]:
    chunks = [chunk for chunk in item.chunks if prod(chunk.sizes)]
    parts = [_Part(chunk, _located(folder, key, item.dtype, chunk)) for chunk in chunks]
    if len(parts) == 1:
        yield from _bytes(parts[0].data)
    elif parts:
        yield from _assembled(item.shape, dtypes.itemsize(item.dtype), parts)


# Finding a chunk in its file


def saved(folder: str, place: Place) -> Checkpoint:
    """The index of what torch.save wrote at `place`."""
    path = join(folder, place.name)
    return torch_zip.read_from(read_archive(path, place.offset, place.length), path)


def _located(folder: str, key: str, dtype: str, chunk: Chunk) -> Span | bytes:
    """Where the chunk's elements lie in row-major order; the bytes themselves where they have another order."""
    path = join(folder, chunk.place.name)
    if chunk.place.raw:
        return Span(path, chunk.place.offset, chunk.place.length)
    found = [entry for section in saved(folder, chunk.place).sections for entry in section.tensors]
    entry = found[0] if len(found) == 1 else None
    if entry is None or (entry.dtype, entry.shape) != (dtype, chunk.sizes) or entry.storage is None:
        have = "no tensor" if entry is None else f"{entry.dtype} {list(entry.shape)}"
        raise CkptError(
            f"{path}: {have} where .metadata says that a chunk of {key} lies ({dtype} {list(chunk.sizes)})",
            hint="the folder holds files of two checkpoints, or is damaged: copy it again",
        )
    if entry.span is not None:
        return entry.span
    from ckpttool.evaluate import with_torch  # torch puts the elements of a transposed chunk in order

    return bytes(with_torch.to_bytes(with_torch.load(entry)))


# Putting chunks in order


@dataclass(frozen=True, slots=True)
class _Part:
    chunk: Chunk
    data: Span | bytes

    def rows(self, first: int, last: int, itemsize: int) -> Span | bytes:
        """The part's own elements of the tensor's rows `first` to `last`: they lie side by side."""
        row = prod(self.chunk.sizes[1:]) * itemsize
        begin, length = (first - self.chunk.offsets[0]) * row, (last - first) * row
        if isinstance(self.data, Span):
            return Span(self.data.path, self.data.offset + begin, length)
        return self.data[begin : begin + length]


def _assembled(shape: tuple[int, ...], itemsize: int, parts: Sequence[_Part]) -> Iterator[bytes]:
    """The tensor, rows of its first dimension at a time."""
    row = prod(shape[1:]) * itemsize
    for first, last, members in _bands(parts):
        if len(members) == 1:
            yield from _bytes(members[0].rows(first, last, itemsize))
            continue
        step = max(1, SLAB // row)
        for start in range(first, last, step):
            end = min(start + step, last)
            yield _slab(shape, itemsize, start, end, members)


def _bands(parts: Sequence[_Part]) -> Iterator[tuple[int, int, list[_Part]]]:
    """Ranges of rows that lie in the same parts, in order."""
    ordered = sorted(parts, key=lambda part: part.chunk.offsets)
    edges = sorted({edge for part in parts for edge in (_top(part), _bottom(part))})
    active: list[_Part] = []
    following = iter(ordered)
    part = next(following, None)
    for first, last in pairwise(edges):
        active = [other for other in active if _bottom(other) > first]
        while part is not None and _top(part) == first:
            active.append(part)
            part = next(following, None)
        yield first, last, active


def _top(part: _Part) -> int:
    return part.chunk.offsets[0]


def _bottom(part: _Part) -> int:
    return part.chunk.offsets[0] + part.chunk.sizes[0]


def _slab(shape: tuple[int, ...], itemsize: int, first: int, last: int, members: Sequence[_Part]) -> bytes:
    row = prod(shape[1:]) * itemsize
    slab = bytearray((last - first) * row)
    for part in members:
        rows = part.rows(first, last, itemsize)
        data = memoryview(read_span(rows) if isinstance(rows, Span) else rows)
        starts, run = _runs(shape[1:], part.chunk.offsets[1:], part.chunk.sizes[1:])
        at, length = 0, run * itemsize
        for base in range(0, len(slab), row):
            for start in starts:
                target = base + start * itemsize
                slab[target : target + length] = data[at : at + length]
                at += length
    return bytes(slab)


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


def _bytes(data: Span | bytes) -> Iterator[bytes]:
    if isinstance(data, bytes):
        yield data
        return
    reader = SpanReader(data.length)
    try:
        for chunk in reader.chunks(data):
            yield bytes(chunk)
    finally:
        reader.close()
