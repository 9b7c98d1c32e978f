"""The only byte mover: writes pieces to a temporary sibling, flushes it to disk and renames it into place."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from io import FileIO
from pathlib import Path

from ckpttool.errors import CkptError
from ckpttool.io.files import sources_stay
from ckpttool.io.paths import is_url
from ckpttool.io.pieces import Pieces, Progress
from ckpttool.io.ranges import stream

# Bytes a write, at multiples of it in the file: as fast as `cp`, which lets the kernel copy in this size. Larger writes
# make the kernel look for larger pages, which took two to five times as long on a machine whose free memory is split up
# or lent out; smaller ones cost more calls.
BLOCK = 1 << 16


def preflight(out: str, source: Iterable[str], *, force: bool, in_place: bool) -> None:
    """Raises `CkptError` where `out` cannot or must not be written. Called before any work is done."""
    if is_url(out):
        from ckpttool.io import write_remote

        write_remote.preflight(out, source, force=force, in_place=in_place)
        return
    path = Path(out)
    if not path.parent.is_dir():
        raise CkptError(f"{out}: no such folder: {path.parent}", hint=f"mkdir -p {path.parent}")
    if path.is_dir():
        raise CkptError(f"{out} is a folder", hint="name a file")
    if not os.access(path.parent, os.W_OK):
        raise CkptError(f"{path.parent}: not writable", hint="choose another folder for the output")
    if path.exists() and not path.is_file():
        raise CkptError(f"{out} is no regular file", hint="name a file that can be replaced")
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
    if is_url(out):
        from ckpttool.io import write_remote

        return write_remote.write(pieces, out, progress)
    path = Path(os.path.realpath(out))
    nbytes = sum(piece.nbytes for piece in pieces)
    try:
        free = shutil.disk_usage(path.parent).free
        if nbytes > free:
            raise CkptError(
                f"{out} needs {nbytes:,} bytes, {free:,} are free", hint="free some space, or write elsewhere"
            )
        _write_sibling(pieces, path, fsync, progress)
    except OSError as error:
        reason = "the disk is full" if error.errno == errno.ENOSPC else error.strerror or str(error)
        raise CkptError(f"{out}: {reason}", hint="nothing was changed; free some space or write elsewhere") from error
    return nbytes


def _write_sibling(pieces: Pieces, path: Path, fsync: bool, progress: Progress | None) -> None:
    """Writes a file next to `path` and renames it, or leaves nothing behind."""
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name[:50]}.", suffix=".tmp", dir=path.parent)
    try:
        with open(descriptor, "wb", buffering=0) as file, sources_stay():
            blocks = _Blocks(file)
            for data in stream(pieces):
                blocks.write(data)
                if progress is not None:
                    progress(len(data))
            blocks.finish()
            os.fchmod(file.fileno(), _mode(path))
            if fsync:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    if fsync:
        sync_folder(path.parent)


class _Blocks:
    """Writes a file block by block; what is less than a block waits for more."""

    def __init__(self, file: FileIO) -> None:
        self._file = file
        self._waiting = bytearray(BLOCK)
        self._count = 0  # bytes that wait

    def write(self, data: bytes | memoryview) -> None:
        """Takes the next bytes of the file. Raises OSError."""
        view, at = memoryview(data), 0
        if self._count:
            at = min(BLOCK - self._count, len(view))
            self._keep(view[:at])
            if self._count < BLOCK:
                return
            self.finish()
        while len(view) - at >= BLOCK:
            self._put(view[at : at + BLOCK])
            at += BLOCK
        self._keep(view[at:])

    def finish(self) -> None:
        """Writes what waits. Raises OSError."""
        self._put(memoryview(self._waiting)[: self._count])
        self._count = 0

    def _keep(self, view: memoryview) -> None:
        self._waiting[self._count : self._count + len(view)] = view
        self._count += len(view)

    def _put(self, view: memoryview) -> None:
        while view:  # a raw file may take less than it was given
            view = view[self._file.write(view) :]


def _mode(path: Path) -> int:
    """The permission bits of the file that is replaced, or those that any new file gets."""
    if path.exists():
        return path.stat().st_mode & 0o7777
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


def sync_folder(folder: Path) -> None:
    """Makes the rename itself durable, where the platform lets a folder be opened."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
