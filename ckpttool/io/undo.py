"""Undo: rolls an interrupted edit back, or else takes the last finished edit in place back."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

from ckpttool.core.errors import CkptError
from ckpttool.io import edit_journal, journal, old_files, sources
from ckpttool.io.atomic_replace import confirm
from ckpttool.io.edit_journal import changed_since, locked, nothing
from ckpttool.io.files import exists, places
from ckpttool.io.interrupts import uninterrupted
from ckpttool.io.old_files import Replaced, record_of
from ckpttool.io.paths import is_url, parent
from ckpttool.io.pieces import Link
from ckpttool.io.write_file import failing
from ckpttool.io.write_folder import write_folder

Way = Literal["undone", "rolled back", "finished"]


def undo(path: str, last: Callable[[], str], *, fsync: bool, force: bool) -> Way:
    """Rolls what was interrupted at the path or URL back, or gives it back as it was before the last edit in place.

    `last` finds the file, or the folder, that has the record of that edit. `force`: a process of another machine or
    container that began something has ended. Raises `CkptError` if there is nothing to undo, or not any more.
    """
    if is_url(path):
        return _undo_remote(path, force)
    with failing(path):
        found = [one for folder, names in places(path).items() for one in _rolled_back(folder, names, path, force)]
        sources.forget(path)
        if found and not all(found):
            return "rolled back"
        place = Path(os.path.realpath(last()))
        record = _record(place)
        if not record.exists():
            raise nothing(path)
        rows = old_files.parse(record.read_bytes(), record)
        if rows is None:
            edit_journal.undo(place, fsync=fsync)
        else:
            _undo_replaced(path, record, rows, fsync)
    return "undone"


def _rolled_back(folder: str, names: set[str] | None, path: str, force: bool) -> list[bool]:
    """Rolls back what was interrupted; of each, whether it was an undo, which is then made again."""
    undos = {one.path: one.is_edit and edit_journal.is_of_undo(one.path) for one in journal.begun(folder, names)}
    return [undos.get(one.path, False) for one in journal.roll_back(folder, names, path, force=force)]


def _record(place: Path) -> Path:
    """The record of the last edit of the file; of a folder the only one in it."""
    if place.is_dir():
        found = sorted(place.glob(".*.ckpttool.undo"))
        if len(found) == 1:
            return found[0]
    return record_of(place)


def _undo_replaced(path: str, record: Path, rows: Sequence[Replaced], fsync: bool) -> None:
    """Puts the old files back into their places. Raises `CkptError` if one has changed since, or is not there."""
    folder = record.parent
    old = [folder / row.old for row in rows if row.old is not None]
    if all(row.is_untouched(folder) for row in rows):  # the edit died before it replaced anything
        old_files.remove([*old, record])
        raise nothing(path)
    for row in rows:
        if not row.is_as_written(folder):
            raise changed_since(folder / row.name, [record, *old])
    missing = [own for own in old if not os.path.lexists(own)]
    if missing:
        raise CkptError(f"{path} cannot be undone: {missing[0]} is not there", hint="restore it from a backup")
    if len(rows) > 1 or rows[0].old is None or rows[0].state is None:
        files = {row.name: Link(str(folder / row.old)) for row in rows if row.old is not None}
        stale = [record.name, *(own.name for own in old), *(row.name for row in rows if row.old is None)]
        write_folder(files, str(folder), stale=stale, link="same", fsync=fsync)
        return
    with ExitStack() as stack:
        stack.enter_context(locked(folder / rows[0].name))
        stack.enter_context(uninterrupted())
        os.replace(old[0], folder / rows[0].name)
        old_files.remove([record])
    if fsync:
        confirm(path, folder)


def _undo_remote(url: str, force: bool) -> Way:
    from ckpttool.io.remote import journal as remote_journal
    from ckpttool.io.remote.read import forget

    forget(url)
    found = remote_journal.roll_back(url if exists(url) else parent(url), force=force)
    forget(url)
    if not found:
        raise CkptError(f"{url}: nothing to undo", hint="behind a URL nothing is edited in place")
    return "rolled back" if all(found.values()) else "finished"
