"""The only byte mover: writes pieces to a temporary sibling, flushes it to disk and renames it into place."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from ckpttool.errors import CkptError
from ckpttool.files import is_url, sources_stay
from ckpttool.pieces import Pieces
from ckpttool.spans import stream

BUFFER = 1 << 17  # bytes: smaller pieces are gathered before they are written, larger ones go straight to the file
Progress = Callable[[int], None]


def preflight(out: str, source: Iterable[str], *, force: bool, in_place: bool) -> None:
    """Raises `CkptError` where `out` cannot or must not be written. Called before any work is done."""
    if is_url(out):
        from ckpttool import upload

        upload.preflight(out, source, force=force, in_place=in_place)
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
        from ckpttool import upload

        return upload.write(pieces, out, progress)
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
        with os.fdopen(descriptor, "wb", buffering=BUFFER) as file, sources_stay():
            for data in stream(pieces):
                file.write(data)
                if progress is not None:
                    progress(len(data))
            file.flush()
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
