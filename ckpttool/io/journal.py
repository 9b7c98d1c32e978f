"""Several files of a folder replaced as one, where no single call can: a journal says what is to be done.

A staging folder holds the new files in ``new``. Once its journal is on disk, what it lists is done whatever happens:
by the process that wrote it or, after it died, by the next command that looks at the folder (`settle`). Each step can
be repeated; replaced files wait in ``old``, so that a process that lives can also take all of it back.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path

from ckpttool.errors import CkptError
from ckpttool.io import temporary
from ckpttool.io.interrupts import uninterrupted
from ckpttool.io.safe_path import is_nameable
from ckpttool.io.switch import sync_folder
from ckpttool.io.temporary import JOURNAL, PATIENCE
from ckpttool.values import dataclass

NEW, OLD = "new", "old"

_HINT = "run it again; a run that was killed is finished by any command of the same user on that folder"


@dataclass(frozen=True, slots=True)
class Journal:
    """`put` are the files to move in, the one that makes the set complete last; `remove` those that go."""

    put: tuple[str, ...]
    remove: tuple[str, ...]

    def text(self) -> bytes:
        """The journal's file."""
        return json.dumps({"schema": "ckpttool.journal/1", "put": self.put, "remove": self.remove}).encode()


def parse(data: bytes, name: str, home: object) -> Journal:
    """The journal that was read at `name`. Raises `CkptError` where it is none, or leads out of its folder."""
    try:
        value = json.loads(data)
        found = Journal(tuple(value["put"]), tuple(value["remove"]))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CkptError(f"{name} cannot be read: {error}", hint=f"look at it, and remove {home}") from error
    if not all(isinstance(own, str) and is_nameable(own) for own in found.put + found.remove):
        raise CkptError(f"{name} leads out of its folder", hint=f"it is none of ours: remove {home}")
    return found


def carry_out(staging: Path, folder: Path, journal: Journal, *, fsync: bool) -> None:
    """Replaces the files, all of them or none. Raises OSError; where even going back fails the journal stays."""
    _write(staging / "begun", journal.text(), fsync)
    (staging / OLD).mkdir(exist_ok=True)
    if fsync:
        sync_folder(staging)
        sync_folder(folder)
    with uninterrupted():
        os.rename(staging / "begun", staging / JOURNAL)
        try:
            if fsync:
                sync_folder(staging)
            _finish(staging, folder, journal)
        except OSError as error:
            try:
                _take_back(staging, folder, journal)
                os.unlink(staging / JOURNAL)
            except OSError:
                raise _half_done(folder, staging, error) from error
            raise


def close(staging: Path) -> None:
    """Takes the journal away once all that it lists is done, and on disk."""
    with uninterrupted(), suppress(OSError):  # what it lists is done: whoever finds it has nothing to do
        os.unlink(staging / JOURNAL)


def _write(path: Path, data: bytes, fsync: bool) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]
        if fsync:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _finish(staging: Path, folder: Path, journal: Journal) -> None:
    """Does what of the journal is not done yet. The file that completes the set goes first and comes last."""
    new, old = staging / NEW, staging / OLD
    waiting = [name for name in journal.put if os.path.lexists(new / name)]
    for name in [*reversed(waiting), *journal.remove]:
        if os.path.lexists(folder / name) and not os.path.lexists(old / name):
            _move(folder / name, old / name)
    for name in waiting:
        _move(new / name, folder / name)


def _take_back(staging: Path, folder: Path, journal: Journal) -> None:
    """The way back from anywhere on the way of `_finish`."""
    new, old = staging / NEW, staging / OLD
    for name in journal.put:
        if not os.path.lexists(new / name) and os.path.lexists(folder / name):
            _move(folder / name, new / name)
    for name in [*journal.remove, *journal.put]:
        if os.path.lexists(old / name):
            _move(old / name, folder / name)


def _move(path: Path, place: Path) -> None:
    with suppress(FileExistsError):
        place.parent.mkdir(parents=True, exist_ok=True)
    os.rename(path, place)


# What was left by processes that died


def settle(folder: str | Path) -> None:
    """Finishes what dead processes began in the folder, and removes what they left.

    Raises `CkptError` where something was begun that this user cannot finish, or that is just being done.
    """
    finish_begun(folder)
    for path in temporary.left_in(folder):
        temporary.remove(path)


def finish_begun(folder: str | Path) -> None:
    """Finishes or undoes what dead processes began in the folder: before it is read, before it is written.

    Raises as `settle`.
    """
    try:
        names = sorted(name for name in os.listdir(folder) if temporary.owner_of(name) is not None)
    except OSError:
        return
    if any(map(temporary.is_edit, names)):
        from ckpttool.io.edit_journal import settle as settle_edits

        settle_edits(folder, names)
    for name in names:
        _finish_begun(Path(folder, name), folder)


def _finish_begun(staging: Path, folder: str | Path) -> None:
    try:
        owner, begun = staging.stat(), (staging / JOURNAL).stat().st_mtime
    except OSError:  # nothing is begun there, or another user keeps to himself what is
        return
    if not temporary.is_mine(owner):
        raise CkptError(
            f"{folder} was left half replaced by another user (number {owner.st_uid})",
            hint="let that user run any command on it, which finishes it",
        )
    dead = temporary.is_dead(staging.name, time.time()) or time.time() - begun > PATIENCE
    if temporary.is_alive(staging.name) or not dead:
        raise being_replaced(folder)
    try:
        if (staging / JOURNAL).exists():
            _finish(staging, Path(folder), parse((staging / JOURNAL).read_bytes(), str(staging / JOURNAL), staging))
            sync_folder(Path(folder))
            close(staging)
    except OSError as error:
        raise _half_done(folder, staging, error) from error
    temporary.remove(staging)


def being_replaced(folder: object) -> CkptError:
    """The error of who finds a folder while another process replaces its files."""
    return CkptError(f"{folder} is just being replaced by another process", hint=_HINT)


def _half_done(folder: str | Path, staging: Path, error: OSError) -> CkptError:
    return CkptError(
        f"{folder} is half replaced, which cannot be finished now: {error.strerror}",
        hint=f"nothing is lost, the rest is in {staging}: the next command that can write there finishes it",
    )
