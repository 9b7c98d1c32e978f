"""Write the files of a folder: all of them, or none.

They are staged together. Then the whole folder is exchanged with the old one in one call, or the
files are moved in a transaction.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Union, cast

from ckpttool.core.checkpoint import Span
from ckpttool.core.errors import CkptError, Problem
from ckpttool.io import handles, sources, syscalls, transaction
from ckpttool.io.files import size
from ckpttool.io.fill import fill
from ckpttool.io.paths import is_url
from ckpttool.io.pieces import Files, Link, Piece, Pieces, Ready, nbytes_of
from ckpttool.io.preflight import is_one_of
from ckpttool.io.syscalls import NOT_HERE, confirm, exchange, sync_folder, uninterrupted
from ckpttool.io.temporary import remove_left, staged_folder
from ckpttool.io.transaction import Replaced, forget_undo, locked, record_of, recover
from ckpttool.io.write import DEFAULT, WriteOptions, check_space, explained

NEW = "new"  # the new files in a staging folder
Contents = Mapping[str, Union[Pieces, Link, Ready]]
# the folder cannot be exchanged as a whole: its files are moved one by one
_NOT_EXCHANGEABLE = NOT_HERE | {errno.EBUSY, errno.EXDEV, errno.EACCES, errno.EROFS}


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
    with explained(out):
        remove_left(folder.parent)
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
    skip = {row.name for row in rows} | {str(record_of(Path(row.name))) for row in rows}
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
        if error.errno not in _NOT_EXCHANGEABLE:
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
