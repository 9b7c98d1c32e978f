"""Bytes that are taken over without copying them: the new file and its source share blocks until one of them changes.

XFS and btrfs can (`FICLONERANGE`), where a span lies at the same place within a block in both files; safetensors'
headers are padded so that it does.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from ckpttool.checkpoint import Span
from ckpttool.io import sources
from ckpttool.io.paths import is_url
from ckpttool.io.pieces import BLOCK, LEAST, Piece, Pieces

_CLONE_RANGE = 0x4020940D  # linux/fs.h: FICLONERANGE

Segment = tuple[int, Pieces]  # pieces, and the offset in the file where the first of them belongs


def share(descriptor: int, pieces: Pieces, at: int = 0) -> list[Segment]:
    """Lets the open file, empty from byte `at` on, share what it can with its pieces' sources; what is left to write.

    Raises `CkptError` where a source is no longer what it was when its index was read.
    """
    segments: list[tuple[int, list[Piece]]] = [(at, [])]
    able = True
    for piece in pieces:
        span = piece.data
        if able and isinstance(span, Span) and piece.crc is None and _lies_alike(span, at):
            skip = -at % BLOCK
            count = (span.length - skip) // BLOCK * BLOCK
            able = _clone(descriptor, Span(span.path, span.offset + skip, count), at + skip)
            if able:
                rest = Span(span.path, span.offset + skip + count, span.length - skip - count)
                segments[-1][1].append(replace(piece, data=Span(span.path, span.offset, skip)))
                segments.append((at + skip + count, [replace(piece, data=rest)]))
                at += piece.nbytes
                continue
        segments[-1][1].append(piece)
        at += piece.nbytes
    return [(offset, own) for offset, own in segments if any(piece.nbytes for piece in own)]


def _lies_alike(span: Span, at: int) -> bool:
    return span.length >= LEAST and span.offset % BLOCK == at % BLOCK and not is_url(span.path)


def _clone(descriptor: int, span: Span, at: int) -> bool:
    """Whether the file now has the span's blocks, from byte `at` on."""
    try:
        import fcntl

        with _opened(span.path) as source:
            fcntl.ioctl(descriptor, _CLONE_RANGE, struct.pack("=qQQQ", source, span.offset, span.length, at))
    except (ImportError, OSError):  # not on this platform or file system, or from one to another
        return False
    return True


@contextmanager
def _opened(path: str) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    try:
        sources.note_streamed(path)
        sources.check_open(path, descriptor)
        yield descriptor
    finally:
        os.close(descriptor)
