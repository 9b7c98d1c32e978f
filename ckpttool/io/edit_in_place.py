"""Files changed where they lie, where that takes no copy: what may be changed so, and the report of it."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal

from ckpttool.core.values import dataclass
from ckpttool.io import edit_journal, progress
from ckpttool.io.edit_journal import Change
from ckpttool.io.journal import recover
from ckpttool.io.patch import hashed, of_pieces
from ckpttool.io.pieces import Edited
from ckpttool.io.reflink import NOT_HERE
from ckpttool.io.write_file import failing

_LINKED = "it has a second name (a hard link), which keeps the old content"
_SHARED = "its shards are links to files that other folders may share"
_READ_ONLY = "it is read-only"
_MOVED = "more changes than names, or it is in a format that has no place for new ones"
_MAPPED = "its header has no room, and a process has the file mapped, whose data would move"
_NO_ROOM = "its header has no room, and the file system cannot move the data by changing its extents"


@dataclass(frozen=True, slots=True)
class Written:
    """How a file is written in place: `nbytes` change where they lie, all taken back, or completely for a `reason`.

    `kept` are the bytes that change and are kept for undo.
    """

    way: Literal["edited", "undone", "copied"]
    nbytes: int = 0
    reason: str = ""
    kept: int = 0

    def __str__(self) -> str:
        return _WORDS[self.way].format(own=self) if self.nbytes or self.way != "edited" else _UNCHANGED


_UNCHANGED = "not at all: nothing of it changes"
_WORDS = {
    "edited": "in place, {own.nbytes:,} bytes of it",
    "undone": "as it was before the last edit in place",
    "copied": "completely: {own.reason}",
}


def edit(files: Mapping[str, Edited] | None, folder: str, *, keep: bool, fsync: bool, dry_run: bool = False) -> Written:
    """Makes the files of the folder what `files` say, all of them or none, without moving a byte that stays.

    `keep`: the way back is kept for undo. A `dry_run` changes nothing, and cannot tell whether the file system can make
    room for a longer header of safetensors.

    Where that cannot be, nothing is done, and the answer says why. Raises `CkptError` where the disk fails, or another
    process was faster: all is as it was.
    """
    if files is None:
        return Written("copied", reason=_MOVED)
    with failing(os.path.join(folder, [*files][-1])):
        place, changes = _changes(files, folder)
        if isinstance(changes, str):
            return Written("copied", reason=changes)
        if all(change.before == change.index for change in changes.values()):
            return Written("edited", 0)  # nothing changes, and the way back of the last edit stays
        nbytes = sum(change.patch.nbytes for change in changes.values())
        done = Written("edited", nbytes, kept=sum(change.patch.overwritten for change in changes.values()))
        if dry_run:
            return done
        if any(change.patch.shift and _is_mapped(place / name) for name, change in changes.items()):
            return Written("copied", reason=_MAPPED)
        recover(place, changes)
        try:
            edit_journal.edit(place, changes, keep=keep, fsync=fsync)
        except OSError as error:
            if error.errno in NOT_HERE and any(change.patch.shift for change in changes.values()):
                return Written("copied", reason=_NO_ROOM)
            raise
    progress.has_written(nbytes)
    return done


def _changes(files: Mapping[str, Edited], folder: str) -> tuple[Path, dict[str, Change] | str]:
    """The folder that the files really lie in, and the change of each; or why there is none."""
    changes: dict[str, Change] = {}
    homes = set()
    for name, own in files.items():
        place = os.path.join(folder, name)
        path = Path(os.path.realpath(place))
        state = path.stat()
        homes.add(path.parent)
        reason = _SHARED if len(files) > 1 and os.path.islink(place) else _unfit(path, state)
        patch = of_pieces(own.pieces, str(path), state.st_size)
        if reason or patch is None or len(homes) > 1:
            return path.parent, reason or _MOVED
        changes[path.name] = Change(patch, hashed(own.before), hashed(own.index))
    return homes.pop(), changes


def _is_mapped(path: Path) -> bool:
    """Whether a process, as far as this user sees them, has the file mapped: the data would move under its reader."""
    state = path.stat()
    device = f"{os.major(state.st_dev):02x}:{os.minor(state.st_dev):02x} {state.st_ino} ".encode()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):  # it has ended, or is another user's
            if device in maps.read_bytes():
                return True
    return False


def _unfit(path: Path, state: os.stat_result) -> str:
    """Why the file is not to be changed where it lies; nothing where it may be."""
    if state.st_nlink > 1:
        return _LINKED
    writable = state.st_mode & stat.S_IWUSR and os.access(path, os.W_OK)
    return "" if writable else _READ_ONLY
