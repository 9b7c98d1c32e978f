"""Edit files where they lie, if that needs no copy, and undo such an edit."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

from ckpttool.core.errors import CkptError, Refused
from ckpttool.core.values import dataclass
from ckpttool.io import progress, sources, transaction
from ckpttool.io.files import places
from ckpttool.io.patch import hashed, of_pieces
from ckpttool.io.paths import is_url
from ckpttool.io.pieces import Edited
from ckpttool.io.transaction import UNDO, PatchRecord
from ckpttool.io.write import explained

_LINKED = "it has a second name (a hard link), which would change too"
_SHARED = "its shards are links to files that other folders may share"
_READ_ONLY = "it is read-only"
_APART = "its files are in several folders"
_LARGE = "more changes than names"


@dataclass(frozen=True, slots=True)
class Written:
    """How a file is written in place: `nbytes` change where they lie. `kept` are the old bytes kept
    for undo.
    """

    nbytes: int
    kept: int = 0

    def __str__(self) -> str:
        if not self.nbytes:
            return "not at all: nothing of it changes"
        return f"in place, {self.nbytes:,} bytes of it"


def edit(
    files: Mapping[str, Edited], folder: str, *, fsync: bool, dry_run: bool = False
) -> Written:
    """Edit the files of the folder, all or none, without moving a byte that stays. The old bytes
    are kept for undo.

    Raises `Refused` if that is not possible, and `CkptError` if the disk fails, or if another
    process was faster: all is as it was.
    """
    changes: dict[str, PatchRecord] = {}
    nbytes = kept = 0
    with explained(os.path.join(folder, [*files][-1])):
        homes = set()
        for name, file in files.items():
            link = str(Path(folder, name))
            path = Path(os.path.realpath(link))
            state = path.stat()
            homes.add(path.parent)
            reason = ""
            if len(files) > 1 and os.path.islink(link):
                reason = _SHARED
            elif state.st_nlink > 1:
                reason = _LINKED
            elif not (state.st_mode & stat.S_IWUSR and os.access(path, os.W_OK)):
                reason = _READ_ONLY
            elif len(homes) > 1:
                reason = _APART
            patch = of_pieces(file.pieces, str(path), state.st_size)
            if reason or patch is None:
                raise not_in_place(link, reason or _LARGE)
            changes[path.name] = PatchRecord(patch, hashed(file.before), hashed(file.index))
            nbytes += len(patch.head) + len(patch.tail)
            kept += patch.before - patch.length
        if all(change.before == change.index for change in changes.values()):
            return Written(0)  # the record of the last edit stays
        if not dry_run:
            (place,) = homes
            transaction.recover(place, changes)
            transaction.edit(place, changes, fsync=fsync)
            progress.count_written(nbytes)
    return Written(nbytes, kept)


def not_in_place(path: str, reason: str) -> Refused:
    """Return the refusal to edit the file or folder, for a reason."""
    return Refused(f"{path} cannot be edited in place: {reason}", hint="write another file: -o OUT")


Way = Literal["undone", "rolled back"]


def undo(path: str, last: Callable[[], str], *, fsync: bool, force: bool) -> Way:
    """Roll back an interrupted edit of the path, or else revert its last edit in place.

    `last` finds the file, or the folder, that has the record of that edit. `force`: a process of
    another machine or container that began something has ended. Raises `CkptError` if there is
    nothing to undo any more.
    """
    if is_url(path):
        raise CkptError(f"{path}: nothing to undo", hint="files of a URL are never edited in place")
    with explained(path):
        edits: list[transaction.UnfinishedEdit] = []
        for folder, names in places(path).items():
            edits += transaction.recover(folder, names, target=path, force=force)
        sources.forget(path)
        if not all(edit.is_undo for edit in edits):  # an interrupted undo is repeated
            return "rolled back"
        place = Path(os.path.realpath(last()))
        if place.is_dir():
            records = sorted(place.glob(f".*{UNDO}"))
            if len(records) == 1:
                place /= records[0].name[1:].removesuffix(UNDO)
        transaction.undo_edit(place, fsync=fsync)
    return "undone"
