"""Undo: roll back an interrupted edit, or else revert the last finished edit in place."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

from ckpttool.core.errors import CkptError
from ckpttool.io import sources, transaction
from ckpttool.io.files import exists, places
from ckpttool.io.fill import failing
from ckpttool.io.interrupts import uninterrupted
from ckpttool.io.paths import is_url, parent
from ckpttool.io.pieces import Link
from ckpttool.io.syscalls import confirm
from ckpttool.io.transaction import Replaced, changed_since, locked, nothing, record_of, unlink
from ckpttool.io.write import WriteOptions, write_folder

Way = Literal["undone", "rolled back", "finished"]


def undo(path: str, last: Callable[[], str], *, fsync: bool, force: bool) -> Way:
    """Roll back an interrupted edit of the path or URL, or else revert its last edit in place.

    `last` finds the file, or the folder, that has the record of that edit. `force`: a process of another machine or
    container that began something has ended. Raises `CkptError` if there is nothing to undo any more.
    """
    if is_url(path):
        from ckpttool.io.remote import journal as remote
        from ckpttool.io.remote.read import forget

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
        write_folder(files, str(folder), WriteOptions(link="same", fsync=fsync), stale=stale)
        return
    with ExitStack() as stack:
        stack.enter_context(locked(folder / rows[0].name))
        stack.enter_context(uninterrupted())
        os.replace(old[0], folder / rows[0].name)
        unlink([record])
    if fsync:
        confirm(path, folder)
