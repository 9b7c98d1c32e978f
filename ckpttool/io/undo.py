"""Edit files where they lie, if that needs no copy, and undo such an edit."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Literal

from ckpttool.core.errors import CkptError
from ckpttool.core.values import dataclass
from ckpttool.io import progress, sources, transaction
from ckpttool.io.files import exists, places
from ckpttool.io.patch import hashed, of_pieces
from ckpttool.io.paths import is_url, parent
from ckpttool.io.pieces import Edited, Link
from ckpttool.io.syscalls import NOT_HERE, confirm, uninterrupted
from ckpttool.io.transaction import Change, Replaced, changed_since, locked, nothing, record_of, unlink
from ckpttool.io.write import WriteOptions, failing, write_folder

_LINKED = "it has a second name (a hard link), which keeps the old content"
_SHARED = "its shards are links to files that other folders may share"
_READ_ONLY = "it is read-only"
_MOVED = "more changes than names, or it is in a format that has no place for new ones"
_MAPPED = "its header has no room, and a process has the file mapped, whose data would move"
_NO_ROOM = "its header has no room, and the file system cannot move the data by changing its extents"


@dataclass(frozen=True, slots=True)
class Written:
    """How a file is written in place: `nbytes` change where they lie, or it is written completely.

    `reason` says why it is a copy. `kept` are the old bytes that are kept for undo.
    """

    way: Literal["edited", "copied"]
    nbytes: int = 0
    reason: str = ""
    kept: int = 0

    def __str__(self) -> str:
        if self.way == "copied":
            return f"completely: {self.reason}"
        return f"in place, {self.nbytes:,} bytes of it" if self.nbytes else "not at all: nothing of it changes"


def edit(files: Mapping[str, Edited] | None, folder: str, *, keep: bool, fsync: bool, dry_run: bool = False) -> Written:
    """Edit the files of the folder, all or none, without moving a byte that stays.

    `keep`: the old bytes are kept for undo. A `dry_run` changes nothing, and cannot tell whether the file system can
    make room for a longer header of safetensors.

    If that is not possible, nothing is done, and the result says why. Raises `CkptError` if the disk fails, or if
    another process was faster: all is as it was.
    """
    if files is None:
        return Written("copied", reason=_MOVED)
    changes: dict[str, Change] = {}
    with failing(os.path.join(folder, [*files][-1])):
        homes = set()
        for name, file in files.items():
            path = Path(os.path.realpath(os.path.join(folder, name)))
            state = path.stat()
            homes.add(path.parent)
            patch = of_pieces(file.pieces, str(path), state.st_size)
            reason = ""
            if len(files) > 1 and os.path.islink(os.path.join(folder, name)):
                reason = _SHARED
            elif state.st_nlink > 1:
                reason = _LINKED
            elif not (state.st_mode & stat.S_IWUSR and os.access(path, os.W_OK)):
                reason = _READ_ONLY
            elif len(homes) > 1:
                reason = _MOVED
            if reason or patch is None:
                return Written("copied", reason=reason or _MOVED)
            changes[path.name] = Change(patch, hashed(file.before), hashed(file.index))
        if all(change.before == change.index for change in changes.values()):
            return Written("edited", 0)  # the record of the last edit stays
        (place,) = homes
        patches = [change.patch for change in changes.values()]
        nbytes = sum(len(patch.head) + len(patch.tail) for patch in patches)
        done = Written("edited", nbytes, kept=sum(patch.before - patch.length for patch in patches))
        if dry_run:
            return done
        if any(change.patch.shift and _is_mapped(place / name) for name, change in changes.items()):
            return Written("copied", reason=_MAPPED)
        transaction.recover(place, changes)
        try:
            transaction.edit(place, changes, keep=keep, fsync=fsync)
        except OSError as error:
            if error.errno in NOT_HERE and any(patch.shift for patch in patches):
                return Written("copied", reason=_NO_ROOM)
            raise
    progress.has_written(nbytes)
    return done


def _is_mapped(path: Path) -> bool:
    """Return True if a process that this user can see has the file mapped: the data would move under its reader."""
    state = path.stat()
    device = f"{os.major(state.st_dev):02x}:{os.minor(state.st_dev):02x} {state.st_ino} ".encode()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):  # it has ended, or is another user's
            if device in maps.read_bytes():
                return True
    return False


Way = Literal["undone", "rolled back", "finished"]


def undo(path: str, last: Callable[[], str], *, fsync: bool, force: bool) -> Way:
    """Roll back an interrupted edit of the path or URL, or else revert its last edit in place.

    `last` finds the file, or the folder, that has the record of that edit. `force`: a process of another machine or
    container that began something has ended. Raises `CkptError` if there is nothing to undo any more.
    """
    if is_url(path):
        from ckpttool.io import remote_journal as remote
        from ckpttool.io.remote import forget

        forget(path)
        found = remote.roll_back(path if exists(path) else parent(path), force=force)
        forget(path)
        if not found:
            raise CkptError(f"{path}: nothing to undo", hint="files of a URL are never edited in place")
        return "rolled back" if all(found.values()) else "finished"
    with failing(path):
        begun = [
            one
            for folder, names in places(path).items()
            for one in transaction.recover(folder, names, target=path, force=force)
        ]
        sources.forget(path)
        if not all(one.is_undo for one in begun):  # an interrupted undo is repeated
            return "rolled back"
        place = Path(os.path.realpath(last()))
        record = record_of(place)
        if place.is_dir():
            records = sorted(place.glob(".*.ckpttool.undo"))
            record = records[0] if len(records) == 1 else record
        if not record.exists():
            raise nothing(path)
        rows = [row for row in transaction.parse(record.read_bytes(), record) if isinstance(row, Replaced)]
        if rows:
            _undo_replaced(path, record, rows, fsync)
        else:
            transaction.undo_edit(place, fsync=fsync)
    return "undone"


def _undo_replaced(path: str, record: Path, rows: Sequence[Replaced], fsync: bool) -> None:
    """Put the old files back into their places. Raises `CkptError` if one has changed since, or is missing."""
    folder = record.parent
    old = [folder / row.old for row in rows if row.old is not None]
    if all(row.is_untouched(folder) for row in rows):  # the process died before it replaced anything
        unlink([*old, record])
        raise nothing(path)
    for row in rows:
        if not row.is_as_written(folder):
            raise changed_since(folder / row.name, [record, *old])
    missing = [place for place in old if not os.path.lexists(place)]
    if missing:
        raise CkptError(f"{path} cannot be undone: {missing[0]} is missing", hint="restore it from a backup")
    if len(rows) > 1 or rows[0].old is None or rows[0].state is None:
        files = {row.name: Link(str(folder / row.old)) for row in rows if row.old is not None}
        stale = [record.name, *(place.name for place in old), *(row.name for row in rows if row.old is None)]
        write_folder(files, str(folder), WriteOptions(same=True, fsync=fsync), stale=stale)
        return
    with ExitStack() as stack:
        stack.enter_context(locked(folder / rows[0].name))
        stack.enter_context(uninterrupted())
        os.replace(old[0], folder / rows[0].name)
        unlink([record])
    if fsync:
        confirm(path, folder)
