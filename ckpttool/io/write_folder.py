"""Write folders: all files are staged next to their place, then replaced as one."""

from __future__ import annotations

import errno
import os
from collections.abc import Collection, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import field
from pathlib import Path
from typing import cast

from ckpttool.core.checkpoint import Span
from ckpttool.core.errors import CkptError, Problem
from ckpttool.core.values import dataclass
from ckpttool.io import journal, old_files, permissions, progress, sources
from ckpttool.io.atomic_replace import confirm, exchange, sync_folder
from ckpttool.io.edit_journal import locked
from ckpttool.io.files import size
from ckpttool.io.interrupts import uninterrupted
from ckpttool.io.journal import NEW, Journal, recover
from ckpttool.io.patch import write_at
from ckpttool.io.paths import is_url
from ckpttool.io.pieces import Files, Held, Link, Piece, Pieces, Ready, nbytes_of
from ckpttool.io.ranges import Digest, new_digest
from ckpttool.io.reflink import NOT_HERE
from ckpttool.io.temporary import staged_folder
from ckpttool.io.write_file import check_space, failing, fill, is_one_of

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


Contents = Mapping[str, Pieces | Link | Ready]

_FICLONE = 0x40049409  # Linux's ioctl that shares the blocks of one file with another, copied when either changes


def preflight(out: str, present: Collection[str], source: str, *, force: bool, in_place: bool) -> None:
    """Raises `CkptError` where a checkpoint cannot or must not be written into the folder `out`.

    `present` are the files of a checkpoint that is there already, `source` the path that is read.
    """
    if is_url(out):
        from ckpttool.io import write_remote

        write_remote.preflight_folder(out, present, source, force=force, in_place=in_place)
        return
    folder = Path(out)
    if folder.exists() and not folder.is_dir():
        raise CkptError(f"{out} is a file", hint="name a folder")
    parent = folder if folder.is_dir() else folder.parent
    if not parent.is_dir():
        raise CkptError(f"{out}: no such folder: {parent}", hint=f"mkdir -p {parent}")
    if not os.access(parent, os.W_OK):
        raise CkptError(f"{parent}: not writable", hint="choose another folder for the output")
    home = source if os.path.isdir(source) else os.path.dirname(source) or "."
    if not in_place and folder.is_dir() and os.path.isdir(home) and os.path.samefile(folder, home):
        raise CkptError(f"{out} is the folder of the source", hint="name another folder, or pass --in-place")
    if present and not (force or in_place):
        raise CkptError(
            f"{out} holds a checkpoint: {min(present)}", hint="pass --force to replace it, or name another folder"
        )


def home_of(out: str, files: Collection[str], stale: Collection[str], *, whole: bool) -> Path:
    """The folder on the disk of the folder `out` in which `files` are made before they are moved into it."""
    return Change(out, Path(os.path.realpath(out)), tuple(files), tuple({*stale}.difference(files)), whole).home


def write_folder(
    files: Contents,
    out: str,
    *,
    stale: Collection[str] = (),
    link: str = "copy",
    whole: bool = True,
    replace: bool = True,
    in_place: bool = False,
    keep: bool = False,
    readers_of: Collection[str] = (),
    fsync: bool = True,
    digests: MutableMapping[str, Digest] | None = None,
    held: Held | None = None,
) -> None:
    """Writes `files` into the folder `out`, all of them or none.

    In a folder that exists, `files` take the place of those of their names and of those named `stale`, and all else
    stays. Where the platform can, the whole folder changes places with a new one in one call; elsewhere, and where
    `whole` is not set since the folder holds more than the checkpoint, under a journal: meanwhile the last of `files`,
    which makes the set complete, is missing. Without `replace` no file is replaced. With `in_place` the folder is a
    source: what was read of it must still be there. `keep`: the old files are kept for undo.

    `link` says how each `Link` is taken over: ``copy``, ``hard`` (one file under two names), ``reflink`` (blocks
    shared until one of the two changes) or ``same`` (a file of the folder itself, symbolic links as they are). Who may
    not read `readers_of`, or what a file is made of, may not read it. `digests` gets a hash of each file; of a URL,
    `held` what the checksums of its store prove. Raises `CkptError` on a source that changed while it was read, a
    folder that another process changed, a full disk; `out` is then as it was.
    """
    if is_url(out):
        from ckpttool.io import write_remote

        made_here = cast(Files, files)  # what is made already, is on a disk
        write_remote.write_folder(made_here, out, stale, link, held, replace=replace)
        return
    folder = Path(os.path.realpath(out))
    with failing(out):
        recover(folder.parent, ())
        recover(folder)
        _check_files_space(files, out, folder if folder.is_dir() else folder.parent, link)
        new = {name: content for name, content in files.items() if not _is_at(content, folder / name)}
        gone = {*stale}.difference(files)
        own = (*new, *sorted(gone))
        old: dict[str, str] = {}
        put = tuple(new)
        record = old_files.record_of(folder / put[-1]) if keep and put else None
        if record is not None:
            gone |= {earlier for name in own for earlier in old_files.old_names(folder / name)}
            old = {name: old_files.hidden_name(name) for name in own if os.path.lexists(folder / name)}
            put = (*old.values(), record.name, *put)
        change = Change(out, folder, put, tuple(gone), whole)
        if not replace:
            _check_absent(change)
        writer = _Writer(link, fsync, tuple(readers_of), digests)
        with staged_folder(change.home, folder.name) as staging:
            for name, content in new.items():
                writer.add(name, content, staging / NEW, folder)
            with ExitStack() as stack:
                if in_place:
                    there = [name for name in own if os.path.isfile(folder / name)]
                    for name in there:
                        if not os.path.islink(folder / name):
                            stack.enter_context(locked(folder / name))
                    sources.check_unchanged(os.path.join(home, name) for name in there for home in {out, str(folder)})
                if record is not None:
                    writer.keep(staging / NEW, folder, old, own, record.name)
                writer.finish(staging / NEW)
                switch(staging, change, fsync=fsync)
    _forget(folder, own, record)
    if fsync:
        confirm(out, folder.parent)


def _forget(folder: Path, names: Collection[str], record: Path | None) -> None:
    """The files are others now: what was known of them ends, and what undo needed for them, but for the new record."""
    sources.forget(str(folder))
    for name in names:
        if old_files.record_of(folder / name) != record:
            old_files.forget_undo(folder / name)


def _check_files_space(files: Contents, out: str, place: Path, link: str) -> None:
    needed = 0
    for content in files.values():
        if isinstance(content, Ready):
            continue
        if not isinstance(content, Link):
            needed += nbytes_of(content)
        elif link == "copy":
            needed += size(content.path)
    check_space(out, place, needed)


def _check_absent(change: Change) -> None:
    there = [name for name in (*change.put, *change.remove) if os.path.lexists(change.folder / name)]
    if there:
        raise CkptError(
            f"{change.out} holds files that would be replaced",
            hint="pass --force to replace them, or name another folder",
            problems=[Problem("exists", name) for name in there],
        )


def _is_at(content: Pieces | Link | Ready, place: Path) -> bool:
    """Whether it is the file that is in its place already."""
    return isinstance(content, Link) and is_one_of(str(place), [content.path])


@dataclass(slots=True)
class _Writer:
    """Makes the files of a new folder one after the other; `read` are the sources of all of them."""

    link: str
    fsync: bool
    readers_of: tuple[str, ...]
    digests: MutableMapping[str, Digest] | None
    read: set[str] = field(default_factory=set)

    def add(self, name: str, content: Pieces | Link | Ready, new: Path, folder: Path) -> None:
        """Makes the file of that name in `new`, which is to be moved to `folder`. Raises OSError and `CkptError`."""
        place, replaced = new / name, folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, Ready):
            self._take(content, place, replaced)
            return
        digest = None
        if self.digests is not None and (self.link == "copy" or not isinstance(content, Link)):
            digest = self.digests[name] = new_digest()
        if not isinstance(content, Link):
            self._write(content, place, replaced, digest)
            return
        if self.link == "same":
            os.link(content.path, place, follow_symlinks=False)
            return
        path = content.path if is_url(content.path) else os.path.realpath(content.path)
        nbytes = size(path)
        if self.link == "copy":
            self._write([Piece(Span(path, 0, nbytes))], place, replaced, digest)
        else:
            _take_over(content, path, place, self.link)
            progress.has_made(nbytes, 0)

    def keep(self, new: Path, folder: Path, old: Mapping[str, str], names: Collection[str], record: str) -> None:
        """Keeps the `old` files of the folder (name -> hidden name), which are replaced by those in `new`, for undo."""
        for name, hidden in old.items():
            old_files.link(folder / name, new / hidden)
        rows = [old_files.Replaced(name, old.get(name), old_files.state_of(new / name)) for name in names]
        descriptor = os.open(new / record, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            write_at(descriptor, 0, old_files.text(rows))
            if self.fsync:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _take(self, content: Ready, place: Path, replaced: Path) -> None:
        os.rename(content.path, place)
        self.read |= {*content.read}
        permissions.settle_path(place, replaced, (*self.readers_of, *content.read))

    def _write(self, pieces: Pieces, place: Path, replaced: Path, digest: Digest | None) -> None:
        descriptor = os.open(place, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o600)
        try:
            fill(descriptor, pieces, digest, flush=self.fsync)
            read = sources.streamed()
            self.read.update(read)
            # what is made of no tensors, an index, says as much as all of them
            permissions.settle_file(descriptor, replaced, (*self.readers_of, *(read or self.read)))
            if self.fsync:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def finish(self, folder: Path) -> None:
        """Gives the folder its bits, and flushes it and its subfolders. Raises OSError."""
        folder.mkdir(exist_ok=True)
        permissions.settle_folder(folder, (*self.readers_of, *self.read))
        if self.fsync:
            for home, _, _ in os.walk(folder):
                sync_folder(Path(home))


def _take_over(content: Link, path: str, place: Path, link: str) -> None:
    """Makes `place` of the file at `path` without copying its bytes. Raises `CkptError` where that cannot be."""
    try:
        if is_url(path):
            raise OSError("it is no file of this machine")
        os.link(path, place) if link == "hard" else _reflink(path, place)
    except (ImportError, OSError) as error:  # not on this platform, or file system
        raise CkptError(
            f"{content.path} cannot be linked ({link}): {getattr(error, 'strerror', None) or error}",
            hint="--link copy works on every file system, and across two",
        ) from error


def _reflink(source: str, target: Path) -> None:
    import fcntl

    with open(source, "rb") as old, open(target, "xb") as new:
        fcntl.ioctl(new.fileno(), _FICLONE, old.fileno())
