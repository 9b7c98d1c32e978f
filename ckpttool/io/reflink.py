"""Reflink copies: a new file that shares the bytes of its source, and the Linux calls for it."""

from __future__ import annotations

import errno
import os
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from ckpttool.core.checkpoint import Span
from ckpttool.io import sources
from ckpttool.io.paths import is_url
from ckpttool.io.pieces import BLOCK, LEAST, Piece, Pieces

# What a file system or platform says of a call that it does not have.
NOT_HERE = frozenset({errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EPERM, errno.EMLINK})

_AT_FDCWD = -100
_WRITE = 2  # linux/fs.h: SYNC_FILE_RANGE_WRITE


def renameat2(old: Path, new: Path, flags: int) -> None:
    """Moves the file or folder; `flags` say what may happen to what is there."""
    try:
        _call("renameat2", _AT_FDCWD, os.fsencode(old), _AT_FDCWD, os.fsencode(new), flags)
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.fspath(old), None, os.fspath(new)) from None


def fallocate(descriptor: int, mode: int, offset: int, length: int) -> None:
    """Gives the file blocks, or puts some between its own, or takes some out."""
    import ctypes

    _call("fallocate", descriptor, mode, ctypes.c_int64(offset), ctypes.c_int64(length))


def reserve(descriptor: int, offset: int, length: int) -> None:
    """Gives the file its blocks before they are written, where the file system can: a full disk is noticed at once."""
    try:
        fallocate(descriptor, 0, offset, length)
    except OSError as error:
        if error.errno not in (*NOT_HERE, errno.EINTR):
            raise


def write_back(descriptor: int, offset: int, length: int) -> None:
    """Has the disk begin with these bytes of the file, and does not wait; what fails is said by `os.fsync`."""
    import ctypes

    with suppress(OSError):
        _call("sync_file_range", descriptor, ctypes.c_int64(offset), ctypes.c_int64(length), _WRITE)


def evict(descriptor: int, offset: int, length: int) -> None:
    """Takes what the disk has of these bytes out of the page cache; what it has not yet, stays."""
    with suppress(OSError, AttributeError):
        os.posix_fadvise(descriptor, offset, length, os.POSIX_FADV_DONTNEED)


def memory() -> int:
    """Bytes of memory that the machine has; where nobody says, as many as can be."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, AttributeError):
        return sys.maxsize


def _call(name: str, *args: object) -> None:
    if not sys.platform.startswith("linux"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    import ctypes

    library = ctypes.CDLL(None, use_errno=True)
    call = getattr(library, f"{name}64", None) or getattr(library, name, None)
    if call is None or call(*args) != 0:
        number = errno.ENOSYS if call is None else ctypes.get_errno()
        raise OSError(number, os.strerror(number))


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
