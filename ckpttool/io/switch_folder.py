"""A staged folder becomes the one that everyone sees: by one rename, by changing places with the old one, by a journal.

The staging folder holds the new files in ``new``. Where a folder cannot change places (it is a mount point, or the
current folder, which a shell would lose, or the file system cannot), its files are replaced one by one under a journal.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import field
from pathlib import Path

from ckpttool.errors import CkptError
from ckpttool.io import journal
from ckpttool.io.interrupts import uninterrupted
from ckpttool.io.journal import NEW, Journal
from ckpttool.io.kernel import NOT_HERE
from ckpttool.io.switch import confirm, exchange, sync_folder
from ckpttool.io.temporary import staged_folder
from ckpttool.values import dataclass

_STAYS = NOT_HERE | {errno.EBUSY, errno.EXDEV, errno.EACCES, errno.EROFS}


@dataclass(frozen=True, slots=True)
class Change:
    """What becomes of `folder`, that the user calls `out`: the files `put` replace others, those of `remove` go.

    The last of `put` makes the folder complete. `whole`: the folder may be replaced by another one. `before` is what
    the files were when the change was planned.
    """

    out: str
    folder: Path
    put: tuple[str, ...]
    remove: tuple[str, ...]
    whole: bool = True
    before: object = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "before", self.state())

    def state(self) -> object:
        """What tells whether another process changed what this change is about."""
        return _id(self.folder), [_id(self.folder / name) for name in (*self.put, *self.remove)]

    @property
    def home(self) -> Path:
        """Where the new files are written: beside the folder where it can be replaced as one, else in it."""
        beside = not self.folder.is_dir() or (self.whole and _can_move(self.folder))
        return self.folder.parent if beside else self.folder


def _id(path: Path) -> tuple[int, ...] | None:
    try:
        found = path.lstat()
    except OSError:
        return None
    is_file = not path.is_dir()  # a folder's own times change with whatever is put into it
    return (found.st_dev, found.st_ino, *((found.st_size, found.st_mtime_ns) if is_file else ()))


def _can_move(folder: Path) -> bool:
    try:
        current = Path.cwd()
    except OSError:  # it is gone
        return False
    return os.access(folder.parent, os.W_OK) and not os.path.ismount(folder) and not current.is_relative_to(folder)


def switch(staging: Path, change: Change, *, fsync: bool) -> None:
    """Makes the new files the folder's own. Raises OSError, and `CkptError` where another process was faster."""
    if change.before == (None, [None] * len((*change.put, *change.remove))):
        _appear(staging, change)
        return
    with _locked(change):
        if staging.parent == change.folder or not _change_places(staging, change, fsync):
            _by_journal(staging, change, fsync)


def _appear(staging: Path, change: Change) -> None:
    try:
        with uninterrupted():
            os.rename(staging / NEW, change.folder)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise _outrun(change) from error
        raise


@contextmanager
def _locked(change: Change) -> Iterator[None]:
    """Lets one process at a time change the folder. Raises `CkptError` where it is not as it was any more."""
    descriptor = os.open(change.folder, os.O_RDONLY)
    try:
        with suppress(ImportError, OSError):  # a file system without locks
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if change.state() != change.before:
            raise _outrun(change)
        yield
    finally:
        os.close(descriptor)


def _outrun(change: Change) -> CkptError:
    return CkptError(
        f"{change.out} was changed by another process meanwhile",
        hint="nothing was written: look at it, then run it again, with --force to replace what is there",
    )


# Changing places


def _change_places(staging: Path, change: Change, fsync: bool) -> bool:
    """Completes the new folder with all that stays, and exchanges it with the old one; False where that cannot be."""
    new, gone = staging / NEW, {*change.put, *change.remove}
    try:
        _link_all(change.folder, new, gone)
        if fsync:
            for home, _, _ in os.walk(new):
                sync_folder(Path(home))
        with uninterrupted():
            exchange(new, change.folder)
            _bring_latecomers(new, change, gone)
    except OSError as error:
        if error.errno not in _STAYS:
            raise
        return False
    return True


def _bring_latecomers(old: Path, change: Change, gone: set[str]) -> None:
    """Takes over what came into the old folder meanwhile. Raises OSError where it cannot, and all is as it was."""
    try:
        _link_all(old, change.folder, gone)
    except OSError as error:
        try:
            exchange(old, change.folder)
        except OSError:
            raise CkptError(
                f"{change.out} is replaced and complete, but not what another process put into it meanwhile",
                hint="check the disk, then what else writes into that folder",
            ) from error
        raise


def _link_all(old: Path, new: Path, gone: set[str], inside: str = "") -> None:
    """Gives every file that stays a second name in the new folder, and that the bits of the old one; subfolders too."""
    for entry in [*os.scandir(old)]:
        name, place = inside + entry.name, new / entry.name
        if name in gone:
            continue
        if entry.is_dir(follow_symlinks=False):
            place.mkdir(exist_ok=True)
            _link_all(Path(entry.path), place, gone, f"{name}/")
        elif _id(place) != _id(Path(entry.path)):
            if os.path.lexists(place):
                os.unlink(place)
            os.link(entry.path, place, follow_symlinks=False)
    _alike(new, old)


def _alike(new: Path, old: Path) -> None:
    """The new folder gets the old one's bits and attributes, and its owner where this user may give them."""
    wanted, own = old.stat(), new.stat()
    if (wanted.st_uid, wanted.st_gid) != (own.st_uid, own.st_gid):
        with suppress(OSError):
            os.chown(new, wanted.st_uid, wanted.st_gid)
    import shutil

    shutil.copystat(old, new)
    os.utime(new)


# One after the other


def _by_journal(staging: Path, change: Change, fsync: bool) -> None:
    """Replaces the files under a journal, which has to lie in the folder that they are in."""
    if staging.parent != change.folder:
        with staged_folder(change.folder, change.folder.name) as inside:
            os.rename(staging / NEW, inside / NEW)
            _by_journal(inside, change, fsync)
        return
    journal.carry_out(staging, change.folder, Journal(change.put, change.remove), fsync=fsync)
    if fsync:
        confirm(change.out, change.folder)
    journal.close(staging)
