"""Several files of a folder replaced as one, where no single call can: a journal says what is to be done.

A staging folder holds the new files in ``new``. After its writer died, the next command that writes the files does
what the journal lists (`settle`), or `ckpttool undo` takes it back (`roll_back`); a command that reads is told
(`check`). Each step can be repeated; replaced files wait in ``old``.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ckpttool.core.errors import CkptError
from ckpttool.core.text import shell
from ckpttool.core.values import dataclass
from ckpttool.io import temporary
from ckpttool.io.atomic_replace import sync_folder
from ckpttool.io.interrupts import uninterrupted
from ckpttool.io.paths import is_nameable
from ckpttool.io.temporary import JOURNAL

NEW, OLD = "new", "old"


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


@dataclass(frozen=True, slots=True)
class Begun:
    """An edit of files of a folder that has not ended: its journal, or the staging folder that its journal is in.

    `names` are the files; None if this user may not read which.
    """

    path: Path
    names: tuple[str, ...] | None
    user: int
    since: float
    is_edit: bool

    @property
    def folder(self) -> Path:
        """The folder of the files."""
        return self.path.parent

    def is_about(self, names: Collection[str] | None) -> bool:
        """Whether it is about one of the files; with None about any of the folder."""
        return names is None or self.names is None or not set(names).isdisjoint(self.names)

    def check_over(self, target: str, *, force: bool = False) -> None:
        """Raises `CkptError` if its process lives; if that cannot be known, unless `force` says that it has ended."""
        if temporary.is_alive(self.path.name):
            if not self.is_edit:
                raise being_replaced(target)
            from ckpttool.io.edit_journal import being_edited

            raise being_edited(target)
        if not force and not temporary.is_dead(self.path.name, time.time()):
            raise perhaps_begun(target, self.since)

    def check_mine(self, target: str) -> None:
        """Raises `CkptError` if another user began it."""
        if not temporary.is_mine(self.path.stat()):
            raise CkptError(
                f"{target}: an interrupted edit of another user (number {self.user}) was found",
                hint=f"let that user run {shell('ckpttool', 'undo', target)}",
            )


def begun(folder: str | Path, names: Collection[str] | None = None) -> list[Begun]:
    """The edits of the folder that have not ended and are about one of these files (default: any). Changes nothing.

    Raises `CkptError` for a journal that is damaged.
    """
    try:
        left = sorted(name for name in os.listdir(folder) if temporary.owner_of(name) is not None)
    except OSError:
        return []
    found = []
    for path in (Path(folder, name) for name in left):
        with suppress(OSError):  # nothing is begun there, it has just ended, or another user keeps it to himself
            is_edit = temporary.is_edit(path.name)
            state = path.stat()
            at = state.st_mtime if is_edit else (path / JOURNAL).stat().st_mtime
            found.append(Begun(path, _names(path, is_edit), state.st_uid, at, is_edit))
    return [one for one in found if one.is_about(names)]


def _names(path: Path, is_edit: bool) -> tuple[str, ...] | None:
    if is_edit:
        from ckpttool.io.edit_journal import names_in

        return names_in(path)
    try:
        journal = parse((path / JOURNAL).read_bytes(), str(path / JOURNAL), path)
    except PermissionError:
        return None
    return journal.put + journal.remove


def check(folder: str | Path, names: Collection[str] | None, target: str) -> None:
    """Raises `CkptError` if an edit of these files (None: of any in the folder) has not ended, with the way out.

    `target` is what the user calls them.
    """
    for one in begun(folder, names):
        one.check_over(target)
        raise interrupted(target)


def recover(folder: str | Path, names: Collection[str] | None = None) -> None:
    """Ends what dead processes began with these files (None: with any in the folder), and removes what they left.

    An edit of a file is rolled back, a replacement finished. Raises `CkptError` if something was begun that this user
    cannot end, or whose process may still live.
    """
    for one in begun(folder, names):
        target = _target(one)
        one.check_over(target)
        _end(one, target, back=False)
    for path in temporary.left_in(folder):
        temporary.remove(path)


def roll_back(folder: str | Path, names: Collection[str] | None, target: str, *, force: bool) -> list[Begun]:
    """Takes back what dead processes began with these files (None: with any in the folder); what that was.

    `force`: those of other machines and containers are dead too. Raises as `settle`.
    """
    found = begun(folder, names)
    for one in found:
        one.check_over(target, force=force)
    for one in found:
        _end(one, target, back=True)
    for path in temporary.left_in(folder):
        temporary.remove(path)
    return found


def _target(one: Begun) -> str:
    """What to name on the command line for this edit."""
    return str(one.folder / one.names[-1] if one.is_edit and one.names else one.folder)


def _end(one: Begun, target: str, *, back: bool) -> None:
    with suppress(FileNotFoundError):  # another process was faster
        one.check_mine(target)
        if one.is_edit:
            from ckpttool.io.edit_journal import go_back

            go_back(one.path)
            return
        with _alone(one.folder):
            _end_replacing(one.path, one.folder, back)


def _end_replacing(staging: Path, folder: Path, back: bool) -> None:
    try:
        if (staging / JOURNAL).exists():
            journal = parse((staging / JOURNAL).read_bytes(), str(staging / JOURNAL), staging)
            if back:
                (staging / NEW).mkdir(exist_ok=True)
                _take_back(staging, folder, journal)
            else:
                _finish(staging, folder, journal)
            sync_folder(folder)
            close(staging)
    except OSError as error:
        raise _half_done(folder, staging, error) from error
    temporary.remove(staging)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Lets one process at a time end what was begun in the folder. Raises `CkptError` while another one does."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(ImportError):
            import fcntl

            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise being_replaced(folder) from error
            except OSError:  # a file system without locks
                pass
        yield
    finally:
        os.close(descriptor)


def being_replaced(folder: object) -> CkptError:
    """The error of a command that finds a folder while another process replaces its files."""
    return CkptError(f"{folder} is just being replaced by another process", hint="run it again when that has ended")


def interrupted(target: str) -> CkptError:
    """The error of a command that finds what a dead process began."""
    return CkptError(
        f"{target}: an interrupted edit was found", hint=f"roll it back: {shell('ckpttool', 'undo', target)}"
    )


def perhaps_begun(target: str, since: float | None) -> CkptError:
    """The error for an edit of which nobody here can know whether its process lives. `since`: seconds since 1970."""
    ago = "" if since is None else f", {max(0, time.time() - since):,.0f} seconds ago,"
    return CkptError(
        f"{target}: an edit was begun on another machine or in another container{ago} and may still go on",
        hint=f"if that process has ended: {shell('ckpttool', 'undo', target, '--force')}",
    )


def _half_done(folder: str | Path, staging: Path, error: OSError) -> CkptError:
    return CkptError(
        f"{folder} is half replaced, which cannot be finished now: {error.strerror}",
        hint=f"nothing is lost, the rest is in {staging}; once it can be written: "
        + shell("ckpttool", "undo", str(folder)),
    )
