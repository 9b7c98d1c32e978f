"""Write files and folders: complete or not at all, and never over a source that nobody asked to
change.

A file is staged next to its place, flushed, and moved into it with one call. The files of a folder
are staged together; then the whole folder is exchanged with the old one in one call, or the files
are moved in a transaction.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Union, cast

from ckpttool.core.checkpoint import Span
from ckpttool.core.errors import CkptError, Problem
from ckpttool.core.values import dataclass
from ckpttool.io import handles, progress, sources, syscalls, transaction
from ckpttool.io.files import exists, is_dir, size, sources_stay
from ckpttool.io.paths import is_url, parent
from ckpttool.io.pieces import BLOCK as FILE_BLOCK
from ckpttool.io.pieces import (
    LEAST,
    Digest,
    Files,
    Link,
    Piece,
    Pieces,
    Ready,
    amounts,
    nbytes_of,
    new_digest,
    stream,
)
from ckpttool.io.syscalls import NOT_HERE, confirm, exchange, put, sync_folder, uninterrupted
from ckpttool.io.temporary import staged_file, staged_folder
from ckpttool.io.transaction import Replaced, forget_undo, locked, record_of, recover

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


@contextmanager
def failing(out: str) -> Iterator[None]:
    """Turn an OSError inside, after which `out` is as it was, into a `CkptError`."""
    try:
        yield
    except OSError as error:
        reason = "the disk is full" if error.errno == errno.ENOSPC else error.strerror or str(error)
        raise CkptError(
            f"{out}: {reason}", hint="it is as it was; free some space, or write elsewhere"
        ) from error


def check_space(out: str, folder: Path, nbytes: int) -> None:
    import shutil

    free = shutil.disk_usage(folder).free
    if nbytes > free:
        raise CkptError(
            f"{out} needs {nbytes:,} bytes, {free:,} are free",
            hint="free some space, or write elsewhere",
        )


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
    with sources_stay():
        segments = _share(descriptor, pieces, at) if digest is None else [(at, pieces)]
        progress.has_written(size - sum(nbytes_of(rest) for _, rest in segments))
        for offset, rest in segments:
            blocks = _Blocks(descriptor, offset, nbytes_of(rest), flush, evict)
            for data in stream(rest):
                blocks.write(data)
                if digest is not None:
                    digest.update(data)
                progress.has_written(len(data))
                del data  # see `stream`
            blocks.finish()
    progress.has_made(*amounts(pieces))


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
        self._at, self._flushed = at, at if flush else at + length
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
        if self._at - self._flushed >= FLUSHED:
            syscalls.write_back(self._descriptor, self._flushed, self._at - self._flushed)
            if self._evict and self._flushed:
                syscalls.evict(
                    self._descriptor, max(0, self._flushed - BEHIND), min(self._flushed, BEHIND)
                )
            self._flushed = self._at


NEW = "new"  # the new files in a staging folder
Contents = Mapping[str, Union[Pieces, Link, Ready]]

_STAYS = NOT_HERE | {errno.EBUSY, errno.EXDEV, errno.EACCES, errno.EROFS}


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """How an output is written.

    `replace`: existing files may be replaced, also files that appear meanwhile. `in_place`: the
    output is a source, and must still be what was read. Nobody who cannot read `readers_of` and the
    sources can read the output. `digests` gets a hash of each local file that is copied.
    """

    replace: bool = True
    in_place: bool = False
    readers_of: Collection[str] = ()
    fsync: bool = True
    digests: MutableMapping[str, Digest] | None = None

    def new_digest(self, path: str) -> Digest | None:
        """Return the digest that all bytes of the file are to update, if there is one."""
        if self.digests is None:
            return None
        return self.digests.setdefault(path, new_digest())


DEFAULT = WriteOptions()


# Files


def preflight(out: str, source: Iterable[str], *, force: bool, in_place: bool) -> None:
    """Raise `CkptError` if the file `out` cannot or must not be written. Called before any work is
    done.

    `source` are the files that are read; `force` never allows writing over one of them, `in_place`
    does.
    """
    path = Path(out)
    if is_url(out):
        _check_url(out, in_place)
    elif not path.parent.is_dir():
        raise CkptError(f"{out}: no such folder: {path.parent}", hint=f"mkdir -p {path.parent}")
    elif path.is_symlink():
        _check_link(path, force)
    if is_dir(out):
        raise CkptError(f"{out} is a folder", hint="name a file")
    if not is_url(out):
        if path.exists() and not path.is_file():
            raise CkptError(f"{out} is not a regular file", hint="name a file that can be replaced")
        if not os.access(path.resolve().parent, os.W_OK):
            raise CkptError(
                f"{path.resolve().parent}: not writable",
                hint="choose another folder for the output",
            )
    if not in_place:
        check_no_source(out, source)
    if not (force or in_place) and exists(out):
        raise CkptError(f"{out} exists", hint="pass --force to overwrite it, or name another file")


def _check_url(out: str, in_place: bool) -> None:
    from ckpttool.io import write_remote as remote

    remote.check_url(out, in_place=in_place)


def _check_link(path: Path, force: bool) -> None:
    link, folder = path.lstat(), path.parent.stat()
    shared = folder.st_mode & stat.S_ISVTX and folder.st_mode & stat.S_IWOTH
    # as the kernel's fs.protected_symlinks
    if shared and link.st_uid not in (os.geteuid(), folder.st_uid):
        raise CkptError(
            f"{path} is a link that another user made, in a folder of all", hint="name another file"
        )
    try:
        path.stat()
    except FileNotFoundError:
        if not force:
            raise CkptError(
                f"{path} is a link to a file that does not exist: {os.readlink(path)}",
                hint="pass --force to write the file that it points to, or name another file",
            ) from None
    except OSError as error:
        raise CkptError(
            f"{path}: {error.strerror}", hint=f"look at the links: ls -l {path}"
        ) from error


def check_no_source(out: str, source: Iterable[str]) -> None:
    """Raise `CkptError` if the file is a source, maybe under another name."""
    if is_one_of(out, source):
        raise CkptError(f"{out} is the source itself", hint=_another("file", out))


def _another(what: str, out: str) -> str:
    return f"name another {what}" + ("" if is_url(out) else ", or pass --in-place")


def is_one_of(out: str, files: Iterable[str]) -> bool:
    """Return True if the file is one of these, maybe under another name."""
    if is_url(out):
        return out.rstrip("/") in {name.rstrip("/") for name in files}
    return os.path.exists(out) and any(
        os.path.samefile(out, name) for name in files if os.path.exists(name)
    )


def write_file(content: Pieces, out: str, options: WriteOptions = DEFAULT) -> None:
    """Write `content` to `out`, which appears complete or not at all.

    An existing `out` is replaced atomically: a process that has it mapped keeps the old bytes.
    Raises `CkptError` on a source that changed while it was read, and on a full or failing disk;
    `out` is then as it was.
    """
    if is_url(out):
        from ckpttool.io import write_remote as remote

        remote.write(content, out, replace=options.replace)
        return
    path = Path(os.path.realpath(out))
    with failing(out), ExitStack() as stack:
        recover(path.parent, [path.name])
        check_space(out, path.parent, nbytes_of(content))
        descriptor, staged = stack.enter_context(staged_file(path))
        fill(descriptor, content, options.new_digest(out), flush=options.fsync)
        read = sources.streamed()
        if not options.in_place and is_one_of(out, read):
            raise CkptError(f"{out} is a source itself", hint="name another file")
        syscalls.set_mode(descriptor, path, (*options.readers_of, *read))
        if options.fsync:
            os.fsync(descriptor)
        _put(staged, path, out, options)


def _put(staged: Path, path: Path, out: str, options: WriteOptions) -> None:
    """Move the file into its place. The lock keeps out a process that edits the old file where it
    lies.
    """
    try:
        with ExitStack() as stack:
            if options.in_place and path.exists():
                stack.enter_context(locked(path))
                sources.check_unchanged({str(path), os.path.abspath(out)})
            stack.enter_context(uninterrupted())
            handles.close(str(path))
            put(staged, path, replace=options.replace)
            sources.forget(str(path))
            forget_undo(path)
    except FileExistsError as error:
        raise CkptError(
            f"{out} exists: another process has written it meanwhile",
            hint="pass --force to overwrite it, or name another file",
        ) from error
    if options.fsync:
        confirm(out, path.parent)


# Folders


def preflight_folder(
    out: str, present: Collection[str], source: str, *, force: bool, in_place: bool
) -> None:
    """Raise `CkptError` if a checkpoint cannot or must not be written into the folder `out`.

    `present` are the files of a checkpoint that is there already, `source` the path that is read.
    """
    if is_url(out):
        _check_url(out, in_place)
        is_source = is_one_of(out, (source, parent(source)))
    else:
        home = source if os.path.isdir(source) else os.path.dirname(source) or "."
        is_source = os.path.isdir(out) and os.path.isdir(home) and os.path.samefile(out, home)
    if (exists(out) or os.path.islink(out)) and not is_dir(out):
        raise CkptError(f"{out} is a file", hint="name a folder")
    if not is_url(out):
        place = Path(out) if os.path.isdir(out) else Path(out).parent
        if not place.is_dir():
            raise CkptError(f"{out}: no such folder: {place}", hint=f"mkdir -p {place}")
        if not os.access(place, os.W_OK):
            raise CkptError(f"{place}: not writable", hint="choose another folder for the output")
    if is_source and not in_place:
        raise CkptError(f"{out} is the folder of the source", hint=_another("folder", out))
    if not present:
        return
    hint = ""
    if is_url(out):
        hint = (
            "name another folder, or remove it first: a store cannot replace several files at once"
        )
    elif not force and not in_place:
        hint = "pass --force to replace it, or name another folder"
    if hint:
        raise CkptError(f"{out} holds a checkpoint: {min(present)}", hint=hint)


def home_of(folder: str | Path) -> Path:
    """Return where new files are staged: next to a folder that can be replaced, else in it."""
    place = Path(os.path.realpath(folder))
    return place.parent if not place.is_dir() or _can_move(place) else place


def _can_move(folder: Path) -> bool:
    try:
        current = Path.cwd()
    except OSError:  # it was removed
        return False
    return (
        os.access(folder.parent, os.W_OK)
        and not os.path.ismount(folder)
        and not current.is_relative_to(folder)
    )


def write_folder(
    files: Contents,
    out: str,
    options: WriteOptions = DEFAULT,
    *,
    stale: Collection[str] = (),
) -> None:
    """Write `files` into the folder `out`, all of them or none.

    In a folder that exists, `files` replace the files of their names and those named `stale`;
    everything else stays. In a folder of a store nothing is replaced. If the platform can, the
    whole folder is exchanged with a new one in one call. Else the files are moved in a transaction;
    meanwhile the last of `files`, which makes the set complete, is missing. Raises `CkptError` on a
    source that changed while it was read, a folder that another process changed, a full disk; `out`
    is then as it was.
    """
    if is_url(out):
        from ckpttool.io import write_remote as remote

        remote.write_folder(cast(Files, files), out)  # ranks send to a store, so nothing is `Ready`
        return
    folder = Path(os.path.realpath(out))
    with failing(out):
        recover(folder.parent, ())
        recover(folder)
        new: dict[str, Pieces | Link | Ready] = {}
        nbytes = 0  # to write
        for name, content in files.items():
            if isinstance(content, Link):
                if is_one_of(str(folder / name), [content.path]):
                    continue
                nbytes += size(content.path)
            elif not isinstance(content, Ready):
                nbytes += nbytes_of(content)
            new[name] = content
        check_space(out, folder if folder.is_dir() else folder.parent, nbytes)
        names = (*new, *sorted({*stale}.difference(files)))
        before = _state(folder, names)
        there = [name for name in names if os.path.lexists(folder / name)]
        if there and not options.replace:
            raise CkptError(
                f"{out} holds files that would be replaced",
                hint="pass --force to replace them, or name another folder",
                problems=[Problem("exists", name) for name in there],
            )
        read: set[str] = set()
        with staged_folder(home_of(folder), folder.name) as staging:
            (staging / NEW).mkdir()
            for name, content in new.items():
                _make(name, content, staging / NEW, out, options, read)
            syscalls.set_folder_mode(staging / NEW, (*options.readers_of, *read))
            if options.fsync:
                _sync_all(staging / NEW)
            _switch(staging, out, folder, names, before, options)
    sources.forget(str(folder))
    for name in names:
        forget_undo(folder / name)
    if options.fsync:
        confirm(out, folder.parent)


def _make(
    name: str,
    content: Pieces | Link | Ready,
    new: Path,
    out: str,
    options: WriteOptions,
    read: set[str],
) -> None:
    """Make the file of that name in the folder `new`; `read` gets its sources. Raises OSError and
    `CkptError`.
    """
    place, replaced = new / name, Path(os.path.realpath(out)) / name
    place.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, Ready):
        os.rename(content.path, place)
        read.update(content.read)
        with open(place, "rb") as file:
            syscalls.set_mode(file.fileno(), replaced, (*options.readers_of, *content.read))
        return
    if isinstance(content, Link):
        path = content.path if is_url(content.path) else os.path.realpath(content.path)
        content = [Piece(Span(path, 0, size(path)))]
    descriptor = os.open(place, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        fill(descriptor, content, options.new_digest(os.path.join(out, name)), flush=options.fsync)
        streamed = sources.streamed()
        read.update(streamed)
        # a file without tensors, an index, says as much as all of them
        syscalls.set_mode(descriptor, replaced, (*options.readers_of, *(streamed or read)))
        if options.fsync:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _state(folder: Path, names: Iterable[str]) -> list[tuple[int, ...] | None]:
    """Return what tells whether another process changed the folder or these files."""
    return [_id(folder), *(_id(folder / name) for name in names)]


def _id(path: Path) -> tuple[int, ...] | None:
    try:
        state = path.lstat()
    except OSError:
        return None
    is_file = not path.is_dir()  # the times of a folder change with every file that is put into it
    return (state.st_dev, state.st_ino, *((state.st_size, state.st_mtime_ns) if is_file else ()))


def _sync_all(folder: Path) -> None:
    for home, _, _ in os.walk(folder):
        sync_folder(Path(home))


def _switch(
    staging: Path,
    out: str,
    folder: Path,
    names: Sequence[str],
    before: object,
    options: WriteOptions,
) -> None:
    """Make the new files the folder's own. Raises OSError, and `CkptError` if outrun."""
    outrun = CkptError(
        f"{out} was changed by another process meanwhile",
        hint="nothing was written: look at it, then run it again, with --force to replace what is"
        " there",
    )
    if before == [None] * (1 + len(names)):
        try:
            with uninterrupted():
                os.rename(staging / NEW, folder)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise outrun from error
            raise
        return
    handles.close(str(folder))
    with locked(folder, wait=True):
        if _state(folder, names) != before:
            raise outrun
        rows = transaction.replaced_rows(staging / NEW, folder, names)
        if not rows:
            return
        if staging.parent == folder or not _exchange(
            staging / NEW, out, folder, rows, options.fsync
        ):
            transaction.replace_files(staging / NEW, folder, rows, fsync=options.fsync)
            if options.fsync:
                confirm(out, folder)


def _exchange(new: Path, out: str, folder: Path, rows: Sequence[Replaced], fsync: bool) -> bool:
    """Complete the new folder with everything that stays, and exchange it with the old one; False
    if impossible.
    """
    skip = {row.name for row in rows} | {record_of(folder / row.name).name for row in rows}
    try:
        _link_all(folder, new, skip)
        if fsync:
            _sync_all(new)
        with uninterrupted():
            exchange(new, folder)
            try:  # take along what came into the old folder meanwhile
                _link_all(new, folder, skip)
            except OSError as error:
                try:
                    exchange(new, folder)
                except OSError:
                    raise CkptError(
                        f"{out} is replaced and complete, but not what another process put into it"
                        " meanwhile",
                        hint="check the disk, then what else writes into that folder",
                    ) from error
                raise
    except OSError as error:
        if error.errno not in _STAYS:
            raise
        return False
    return True


def _link_all(old: Path, new: Path, skip: set[str], inside: str = "") -> None:
    """Link every file that stays into the new folder, subfolders too, with the bits of the old
    folders.
    """
    for entry in [*os.scandir(old)]:
        name, place = inside + entry.name, new / entry.name
        if name in skip:
            continue
        if entry.is_dir(follow_symlinks=False):
            place.mkdir(exist_ok=True)
            _link_all(Path(entry.path), place, skip, f"{name}/")
        elif _id(place) != _id(Path(entry.path)):
            if os.path.lexists(place):
                os.unlink(place)
            os.link(entry.path, place, follow_symlinks=False)
    before, after = old.stat(), new.stat()
    if (before.st_uid, before.st_gid) != (after.st_uid, after.st_gid):
        with suppress(OSError):
            os.chown(new, before.st_uid, before.st_gid)
    import shutil

    shutil.copystat(old, new)
    os.utime(new)
