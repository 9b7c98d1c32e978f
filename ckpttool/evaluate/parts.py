"""Storages made of several pieces of others, one after another. Between the index and `execute`: no byte moves yet."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Union

from ckpttool.checkpoint import Lazy, Span, Storage, TensorEntry
from ckpttool.dtypes import itemsize
from ckpttool.expression import Op, Ref, Special
from ckpttool.io.pieces import Piece
from ckpttool.io.ranges import stream

_ROW_MAJOR = Special("memory_format", "contiguous_format")

Part = Union[Span, Lazy, bytes]


def row_major(entry: TensorEntry) -> TensorEntry:
    """The entry with its elements in row-major order; those of a strided view are gathered when they are written."""
    if entry.storage is None or entry.is_contiguous:
        return entry
    from ckpttool.evaluate import with_torch  # gathering a view is what needs torch

    copy = Op("aten.clone.default", (Ref(entry.key),), (("memory_format", _ROW_MAJOR),))
    return with_torch.entry_of(entry.key, copy, {entry.key: entry})


def window(entry: TensorEntry, start: int, count: int) -> Part:
    """Elements `start` to `start + count` of a contiguous entry, in row-major order."""
    assert entry.storage is not None
    assert entry.is_contiguous
    size = itemsize(entry.dtype)
    data = entry.storage.data
    first, nbytes = (entry.offset + start) * size, count * size
    if isinstance(data, Span):
        return Span(data.path, data.offset + first, nbytes)
    return Lazy(nbytes, lambda: _cut(data.produce(), first, nbytes))


def across(entries: Iterable[TensorEntry], start: int, count: int) -> list[Part]:
    """Elements `start` to `start + count` of contiguous entries that are laid end to end."""
    parts, at = [], 0
    for entry in entries:
        low, high = max(start, at), min(start + count, at + entry.numel)
        if low < high:
            parts.append(window(entry, low - at, high - low))
        at += entry.numel
    return parts


def concatenated(parts: Sequence[Part]) -> Storage:
    """One storage of these bytes; a span of a file where they lie in one piece, else read when it is written."""
    if len(parts) == 1 and not isinstance(parts[0], bytes):
        return Storage(parts[0])
    return Storage(Lazy(sum(map(_nbytes, parts)), lambda: _read(parts)))


def _nbytes(part: Part) -> int:
    return len(part) if isinstance(part, bytes) else part.length


def _read(parts: Sequence[Part]) -> Iterator[bytes]:
    """The bytes of the parts. Chunks are copies: whoever collects them must not see the reader's buffer change."""
    return map(bytes, stream([Piece(part) for part in parts]))


def _cut(chunks: Iterable[bytes | memoryview], start: int, nbytes: int) -> Iterator[memoryview]:
    """Bytes `start` to `start + nbytes` of the chunks."""
    for chunk in chunks:
        view = memoryview(chunk)[start : start + nbytes]
        if view:
            yield view
        start = max(0, start - len(chunk))
        nbytes -= len(view)
        if not nbytes:
            return
