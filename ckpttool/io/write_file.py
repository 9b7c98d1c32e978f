"""The only byte mover: writes pieces to a temporary sibling, flushes it to disk, puts it into place with one call."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ckpttool.core.errors import CkptError
from ckpttool.io import old_files, permissions, progress, reflink, sources
from ckpttool.io.atomic_replace import confirm, put
from ckpttool.io.edit_journal import locked
from ckpttool.io.files import sources_stay
from ckpttool.io.interrupts import uninterrupted
from ckpttool.io.journal import recover
from ckpttool.io.paths import is_url
from ckpttool.io.pieces import LEAST, Held, Pieces, Ready, amounts, nbytes_of
from ckpttool.io.ranges import Digest, stream
from ckpttool.io.reflink import share
from ckpttool.io.temporary import staged_file

# Bytes a write, at multiples of it in the file: as fast as `cp`, which lets the kernel copy in this size. Larger writes
# make the kernel look for larger pages, which took two to five times as long on a machine whose free memory is split up
# or lent out; smaller ones cost more calls.
BLOCK = 1 << 16
FLUSHED = 1 << 23  # bytes that are written before the disk is asked to begin with them
# What one output writes, a file or a folder, stays in the page cache for who reads it next, up to this part of the
# memory. More would drive out what others have there, and takes fresh memory all the time, where evicted pages are at
# hand: 8 GiB took half as long.
KEPT = 0.25
BEHIND = 32 * FLUSHED  # bytes before the last ones in which what the disk has by now is looked for


def preflight(out: str, source: Iterable[str], *, force: bool, in_place: bool) -> None:
    """Raises `CkptError` where `out` cannot or must not be written. Called before any work is done.

    `source` are files that are read; `force` never allows to write over one of them, `in_place` does.
    """
    if is_url(out):
        from ckpttool.io import write_remote

        write_remote.preflight(out, source, force=force, in_place=in_place)
        return
    path = Path(out)
    if not path.parent.is_dir():
        raise CkptError(f"{out}: no such folder: {path.parent}", hint=f"mkdir -p {path.parent}")
    _check_link(path, force=force)
    if path.is_dir():
        raise CkptError(f"{out} is a folder", hint="name a file")
    if path.exists() and not path.is_file():
        raise CkptError(f"{out} is no regular file", hint="name a file that can be replaced")
    if not os.access(path.resolve().parent, os.W_OK):
        raise CkptError(f"{path.resolve().parent}: not writable", hint="choose another folder for the output")
    if not in_place:
        check_no_source(out, source)
    if path.exists() and not (force or in_place):
        raise CkptError(f"{out} exists", hint="pass --force to overwrite it, or name another file")


def check_no_source(out: str, source: Iterable[str]) -> None:
    """Raises `CkptError` where the file is one of those that are read."""
    if is_one_of(out, source):
        raise CkptError(f"{out} is the source itself", hint="name another file, or pass --in-place")


def is_one_of(out: str, files: Iterable[str]) -> bool:
    """Whether the file is one of these, maybe under another name."""
    return os.path.exists(out) and any(os.path.samefile(out, name) for name in files if os.path.exists(name))


def _check_link(path: Path, *, force: bool) -> None:
    """Raises `CkptError` for symbolic links as OUT that are not to be followed."""
    if not path.is_symlink():
        return
    link, folder = path.lstat(), path.parent.stat()
    shared = folder.st_mode & stat.S_ISVTX and folder.st_mode & stat.S_IWOTH
    if shared and link.st_uid not in (os.geteuid(), folder.st_uid):  # as the kernel's fs.protected_symlinks
        raise CkptError(f"{path} is a link that another user made, in a folder of all", hint="name another file")
    try:
        path.stat()
    except FileNotFoundError:
        target = os.readlink(path)
        if not force:
            raise CkptError(
                f"{path} is a link to what is not there: {target}",
                hint="pass --force to write what it points to, or name another file",
            ) from None
    except OSError as error:
        raise CkptError(f"{path}: {error.strerror}", hint=f"look at the links: ls -l {path}") from error


def write(
    pieces: Pieces,
    out: str,
    *,
    replace: bool = True,
    in_place: bool = True,
    keep: bool = False,
    readers_of: Collection[str] = (),
    fsync: bool = True,
    digest: Digest | None = None,
    held: Held | None = None,
) -> None:
    """Writes `pieces` to `out`, which appears complete or not at all.

    An existing `out` is replaced atomically, so readers that have it mapped keep the old bytes; without `replace` it is
    left alone, also where it comes into being meanwhile, and without `in_place` so is a source. Who may not read
    `readers_of`, or a file that tensors are read from, may not read `out`. `keep`: what is replaced is kept for undo.
    `digest` gets every byte that is written; in `held` is noted what the store's checksums prove of an `out` that is a
    URL. Raises `CkptError` on a source that changed while it was read, and on a full or failing disk; `out` is then as
    it was.
    """
    if is_url(out):
        from ckpttool.io import write_remote

        write_remote.write(pieces, out, replace=replace, held=held)
        return
    path = Path(os.path.realpath(out))
    with failing(out):
        check_space(out, path.parent, nbytes_of(pieces))
        recover(path.parent, [path.name])
        with staged_file(path) as (descriptor, staged):
            fill(descriptor, pieces, digest, flush=fsync)
            read = sources.streamed()
            if not in_place and is_one_of(out, read):
                raise CkptError(f"{out} is a source itself", hint="name another file")
            permissions.settle_file(descriptor, path, (*readers_of, *read))
            if fsync:
                os.fsync(descriptor)
            _put(staged, path, out, replace=replace, in_place=in_place, keep=keep, fsync=fsync)


def put_ready(
    ready: Ready, out: str, *, replace: bool, in_place: bool, keep: bool, readers_of: Collection[str], fsync: bool
) -> None:
    """`write` of a file that is made already, and is flushed to its disk."""
    path = Path(os.path.realpath(out))
    with failing(out):
        recover(path.parent, [path.name])
        if not in_place and is_one_of(out, ready.read):
            raise CkptError(f"{out} is a source itself", hint="name another file")
        permissions.settle_path(Path(ready.path), path, (*readers_of, *ready.read))
        _put(Path(ready.path), path, out, replace=replace, in_place=in_place, keep=keep, fsync=fsync)


@contextmanager
def failing(out: str) -> Iterator[None]:
    """Raises `CkptError` for an OSError inside, where `out` is as it was."""
    try:
        yield
    except OSError as error:
        reason = "the disk is full" if error.errno == errno.ENOSPC else error.strerror or str(error)
        raise CkptError(f"{out}: {reason}", hint="it is as it was; free some space, or write elsewhere") from error


def check_space(out: str, folder: Path, nbytes: int) -> None:
    """Raises `CkptError` where the folder's disk has no room for `nbytes`."""
    import shutil

    free = shutil.disk_usage(folder).free
    if nbytes > free:
        raise CkptError(f"{out} needs {nbytes:,} bytes, {free:,} are free", hint="free some space, or write elsewhere")


def _put(staged: Path, path: Path, out: str, *, replace: bool, in_place: bool, keep: bool, fsync: bool) -> None:
    """Moves the file to its place. If that is a source (`in_place`), it must still be what was read.

    Nobody who edits the file where it lies does so meanwhile: both take the same lock.
    """
    there = path.exists()
    try:
        with ExitStack() as stack:
            if in_place and there:
                stack.enter_context(locked(path))
                sources.check_unchanged({str(path), os.path.abspath(out)})
            stack.enter_context(uninterrupted())
            if keep and there:
                stack.enter_context(old_files.kept(path, staged, fsync=fsync))
            put(staged, path, replace=replace)
            sources.forget(str(path))  # nothing that was known of it is true any more
            if not (keep and there):
                old_files.forget_undo(path)
    except FileExistsError as error:
        raise CkptError(
            f"{out} exists: another process has written it meanwhile",
            hint="pass --force to overwrite it, or name another file",
        ) from error
    if fsync:
        confirm(out, path.parent)


def fill(descriptor: int, pieces: Pieces, digest: Digest | None = None, at: int = 0, *, flush: bool = False) -> None:
    """Makes the open file, empty from byte `at` on, of the pieces; blocks are shared with sources where that can be.

    With `flush` the disk writes meanwhile, so that an `os.fsync` that follows has little to wait for. A `digest` is of
    bytes that were read. Raises OSError, and `CkptError` on a source that changed meanwhile.
    """
    size = nbytes_of(pieces)
    evict = progress.written() + size > KEPT * reflink.memory()
    with sources_stay():
        segments = share(descriptor, pieces, at) if digest is None else [(at, pieces)]
        progress.has_written(size - sum(nbytes_of(own) for _, own in segments))
        for offset, own in segments:
            blocks = _Blocks(descriptor, offset, nbytes_of(own), flush, evict)
            for data in stream(own):
                blocks.write(data)
                if digest is not None:
                    digest.update(data)
                progress.has_written(len(data))
                del data  # see `stream`
            blocks.finish()
    progress.has_made(*amounts(pieces))


class _Blocks:
    """Writes `length` bytes of a file from byte `at` on, block by block; what is less than a block waits for more."""

    def __init__(self, descriptor: int, at: int, length: int, flush: bool, evict: bool) -> None:
        self._descriptor = descriptor
        self._evict = evict  # what is flushed
        self._waiting = bytearray(BLOCK)
        self._count = 0  # bytes that wait
        self._at, self._flushed = at, at if flush else at + length
        if length >= LEAST:
            reflink.reserve(descriptor, at, length)
        if at:
            os.lseek(descriptor, at, os.SEEK_SET)

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
        while view:  # a call may take less than it was given
            count = os.write(self._descriptor, view)
            view, self._at = view[count:], self._at + count
        if self._at - self._flushed >= FLUSHED:
            reflink.write_back(self._descriptor, self._flushed, self._at - self._flushed)
            if self._evict and self._flushed:
                reflink.evict(self._descriptor, max(0, self._flushed - BEHIND), min(self._flushed, BEHIND))
            self._flushed = self._at
