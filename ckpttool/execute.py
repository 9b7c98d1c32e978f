"""The only byte mover: writes pieces to a temporary sibling, flushes it to disk and renames it into place."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from ckpttool.checkpoint import Lazy, Span
from ckpttool.errors import CkptError
from ckpttool.pieces import Piece, Pieces

CHUNK = 1 << 20  # bytes a read; larger ones were no faster, and memory stays flat
Progress = Callable[[int], None]


def preflight(out: str, source: Iterable[str], *, force: bool, in_place: bool) -> None:
    """Raises `CkptError` where `out` cannot or must not be written. Called before any work is done."""
    path = Path(out)
    if not path.parent.is_dir():
        raise CkptError(f"{out}: no such folder: {path.parent}", hint=f"mkdir -p {path.parent}")
    if path.is_dir():
        raise CkptError(f"{out} is a folder", hint="name a file")
    if not os.access(path.parent, os.W_OK):
        raise CkptError(f"{path.parent}: not writable", hint="choose another folder for the output")
    if path.exists():
        if any(os.path.samefile(path, name) for name in source if os.path.exists(name)):
            if not in_place:
                raise CkptError(f"{out} is the source itself", hint="name another file, or pass --in-place")
        elif not force:
            raise CkptError(f"{out} exists", hint="pass --force to overwrite it, or name another file")


def write(pieces: Pieces, out: str, *, fsync: bool = True, progress: Progress | None = None) -> int:
    """Writes `pieces` to `out`, which appears complete or not at all; returns its size in bytes.

    An existing `out` is replaced atomically, so readers that have it mapped keep the old bytes. Raises `CkptError` on
    a source that changed while it was read, and on a full or failing disk; `out` is then as it was.
    """
    path = Path(os.path.realpath(out))
    nbytes = sum(piece.nbytes for piece in pieces)
    free = shutil.disk_usage(path.parent).free
    if nbytes > free:
        raise CkptError(f"{out}: needs {nbytes:,} bytes, {free:,} are free", hint="free some space, or write elsewhere")
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name[:100]}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb", buffering=CHUNK) as file:
            for data in _stream(pieces):
                file.write(data)
                if progress is not None:
                    progress(len(data))
            file.flush()
            os.fchmod(file.fileno(), _mode(path))
            if fsync:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        reason = "the disk is full" if error.errno == errno.ENOSPC else error.strerror or str(error)
        raise CkptError(f"{out}: {reason}", hint="nothing was changed; free some space or write elsewhere") from error
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)
    if fsync:
        _sync_folder(path.parent)
    return nbytes


def _mode(path: Path) -> int:
    """The permission bits of the file that is replaced, or those that any new file gets."""
    if path.exists():
        return path.stat().st_mode & 0o7777
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


def _sync_folder(folder: Path) -> None:
    """Makes the rename itself durable, where the platform lets a folder be opened."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _stream(pieces: Pieces) -> Iterator[bytes | memoryview]:
    reader = SpanReader()
    try:
        for piece in pieces:
            for data in _data(piece, reader):
                if piece.crc is not None:
                    piece.crc.value = zlib.crc32(data, piece.crc.value)
                yield data
    finally:
        reader.close()


def _data(piece: Piece, reader: SpanReader) -> Iterator[bytes | memoryview]:
    if isinstance(piece.data, bytes):
        yield piece.data
    elif isinstance(piece.data, Span):
        yield from reader.chunks(piece.data)
    else:
        yield from _computed(piece.data)


def _computed(lazy: Lazy) -> Iterator[bytes | memoryview]:
    written = 0
    for data in lazy.produce():
        written += len(data)
        yield data
    if written != lazy.length:
        raise CkptError(
            f"computed {written:,} bytes where {lazy.length:,} were planned", hint="this is a bug: report it"
        )


class SpanReader:
    """Reads spans in chunks through one reused buffer; keeps the last file open."""

    def __init__(self) -> None:
        self._path = ""
        self._descriptor = -1
        self._buffer = memoryview(bytearray(CHUNK))

    def chunks(self, span: Span) -> Iterator[memoryview]:
        """The span's bytes. Each chunk is valid until the next one is asked for. Raises `CkptError` at an early end."""
        self._open(span.path)
        offset, left = span.offset, span.length
        while left:
            count = os.preadv(self._descriptor, [self._buffer[: min(left, CHUNK)]], offset)
            if not count:
                raise CkptError(
                    f"{span.path} ends at byte {offset:,}", hint="it was truncated while it was read: copy it again"
                )
            yield self._buffer[:count]
            offset, left = offset + count, left - count

    def _open(self, path: str) -> None:
        if path == self._path:
            return
        self.close()
        try:
            self._descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        except OSError as error:
            raise CkptError(
                f"{path}: {error.strerror}", hint="the source must stay where it is until the output is written"
            ) from error
        self._path = path

    def close(self) -> None:
        """Closes the file that is open."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._path, self._descriptor = "", -1


def same_bytes(left: Span, right: Span) -> bool:
    """Whether two spans hold the same bytes, streamed."""
    if left == right:
        return True
    if left.length != right.length:
        return False
    readers = SpanReader(), SpanReader()
    try:
        return all(a == b for a, b in zip(readers[0].chunks(left), readers[1].chunks(right)))
    finally:
        for reader in readers:
            reader.close()
