"""Write pieces into an open file: share blocks with sources, and write while the disk follows."""

from __future__ import annotations

import os
import struct
from dataclasses import replace

from ckpttool.core.checkpoint import Span
from ckpttool.io import handles, progress, sources, syscalls
from ckpttool.io.files import sources_unchanged
from ckpttool.io.paths import is_url
from ckpttool.io.pieces import BLOCK as FILE_BLOCK
from ckpttool.io.pieces import LEAST, Digest, Piece, Pieces, amounts, nbytes_of, stream

# Bytes of a write, at multiples of it in the file: as fast as `cp`, which lets the kernel copy in
# this size. Larger writes make the kernel look for larger pages, which took two to five times as
# long on a machine whose free memory is split up or lent out; smaller ones cost more calls.
BLOCK = 1 << 16
FLUSHED = 1 << 23  # bytes that are written before the disk starts with them
# The part of the memory up to which an output, a file or a folder, stays in the page cache for its
# next reader. More would displace other data, and needs fresh memory all the time, while evicted
# pages are at hand: 8 GiB took half as long.
KEPT = 0.25
BEHIND = 32 * FLUSHED  # bytes before the last ones that are evicted if the disk has them by now
_CLONE_RANGE = 0x4020940D  # linux/fs.h: FICLONERANGE


def fill(
    descriptor: int,
    pieces: Pieces,
    digest: Digest | None = None,
    at: int = 0,
    *,
    flush: bool = False,
) -> None:
    """Write the pieces into the open file, which is empty from byte `at` on; share blocks with
    sources if possible.

    With `flush` the disk writes meanwhile, so that a following `os.fsync` is short. With a `digest`
    all bytes are read. Raises OSError, and `CkptError` if a source changes meanwhile.
    """
    size = nbytes_of(pieces)
    evict = progress.written() + size > KEPT * syscalls.memory()
    with sources_unchanged():
        segments = _share(descriptor, pieces, at) if digest is None else [(at, pieces)]
        progress.count_written(size - sum(nbytes_of(rest) for _, rest in segments))
        for offset, rest in segments:
            blocks = _Blocks(descriptor, offset, nbytes_of(rest), flush, evict)
            for data in stream(rest):
                blocks.write(data)
                if digest is not None:
                    digest.update(data)
                progress.count_written(len(data))
                del data  # see `stream`
            blocks.finish()
    progress.count_made(*amounts(pieces))


def _share(descriptor: int, pieces: Pieces, at: int) -> list[tuple[int, Pieces]]:
    """Share blocks with the sources; return the pieces left to write, with the offset of the first
    of each segment::

        the span    |  · ·|█ █ █ █ █ █ █ █|· ·  |      █ is shared, · is written
        block edges   |   |       |       |   |

    Raises `CkptError` if a source is no longer what it was when its index was read.
    """
    segments: list[tuple[int, list[Piece]]] = [(at, [])]
    able = True
    for piece in pieces:
        span, rest = piece.data, piece
        if able and isinstance(span, Span) and piece.crc is None and _can_share(span, at):
            skip = -at % FILE_BLOCK
            count = (span.length - skip) // FILE_BLOCK * FILE_BLOCK
            end = skip + count
            able = _clone(descriptor, _part(span, skip, end), at + skip)
            if able:
                segments[-1][1].append(replace(piece, data=_part(span, 0, skip)))
                segments.append((at + end, []))
                rest = replace(piece, data=_part(span, end, span.length))
        segments[-1][1].append(rest)
        at += piece.nbytes
    return [(offset, rest) for offset, rest in segments if nbytes_of(rest)]


def _part(span: Span, start: int, end: int) -> Span:
    return Span(span.path, span.offset + start, end - start)


def _can_share(span: Span, at: int) -> bool:
    """Return True for a large local span that begins at the same place in a block as byte `at`."""
    is_aligned = span.offset % FILE_BLOCK == at % FILE_BLOCK
    return is_aligned and span.length >= LEAST and not is_url(span.path)


def _clone(descriptor: int, span: Span, at: int) -> bool:
    """Return True if the file now has the blocks of the span, from byte `at` on."""
    try:
        import fcntl

        source = handles.acquire(span.path)
        try:
            sources.note_streamed(span.path)
            sources.check_open(span.path, source.descriptor)
            place = struct.pack("=qQQQ", source.descriptor, span.offset, span.length, at)
            fcntl.ioctl(descriptor, _CLONE_RANGE, place)
        finally:
            handles.release(source)
    except (ImportError, OSError):  # not on this platform or file system, or on two of them
        return False
    return True


class _Blocks:
    """Write `length` bytes of a file from byte `at` on, in aligned blocks."""

    def __init__(self, descriptor: int, at: int, length: int, flush: bool, evict: bool) -> None:
        self._descriptor = descriptor
        self._evict = evict
        self._waiting = bytearray(BLOCK)
        self._count = 0  # bytes that wait for a full block
        self._flush = flush
        self._at = self._flushed = at
        if length >= LEAST:
            syscalls.reserve(descriptor, at, length)
        if at:
            os.lseek(descriptor, at, os.SEEK_SET)

    def write(self, data: bytes | memoryview) -> None:
        """Take the next bytes of the file. Raises OSError."""
        view, at = memoryview(data), 0
        if self._count:
            at = min(BLOCK - self._count, len(view))
            self._wait(view[:at])
            if self._count < BLOCK:
                return
            self.finish()
        while len(view) - at >= BLOCK:
            self._put(view[at : at + BLOCK])
            at += BLOCK
        self._wait(view[at:])

    def finish(self) -> None:
        """Write the bytes that wait. Raises OSError."""
        self._put(memoryview(self._waiting)[: self._count])
        self._count = 0

    def _wait(self, view: memoryview) -> None:
        self._waiting[self._count : self._count + len(view)] = view
        self._count += len(view)

    def _put(self, view: memoryview) -> None:
        syscalls.write_all(self._descriptor, view)
        self._at += len(view)
        if self._flush and self._at - self._flushed >= FLUSHED:
            syscalls.write_back(self._descriptor, self._flushed, self._at - self._flushed)
            if self._evict and self._flushed:
                syscalls.evict(
                    self._descriptor, max(0, self._flushed - BEHIND), min(self._flushed, BEHIND)
                )
            self._flushed = self._at
