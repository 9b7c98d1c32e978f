"""Several changes of files in one folder as one: all are made, or none.

Before the first file changes, a record of how to restore every file is on the disk, next to them:
the bytes that a patch overwrites, or the hidden name of a file that is replaced. While it is a
journal (``.NAME….ckpttool.edit``), nobody reads the files: `ckpttool undo`, or the next command
that writes them, rolls back first. When all is done, the journal is renamed to the record that
`undo` reads (``.NAME.ckpttool.undo``), or removed.
"""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, Union

from ckpttool.core.errors import CkptError
from ckpttool.core.text import shell
from ckpttool.core.values import dataclass
from ckpttool.io import patch as patches
from ckpttool.io import sources, temporary
from ckpttool.io.patch import Patch
from ckpttool.io.paths import is_nameable, safe_path
from ckpttool.io.syscalls import confirm, lock, sync_folder, uninterrupted, write_all
from ckpttool.io.temporary import EDIT, owner_of, staged_file

_SCHEMA = "ckpttool.record/1"
UNDO = ".ckpttool.undo"  # ends the name of a record that `undo` reads
_NUMBERS = ("before", "start", "length")


class FileState(NamedTuple):
    """What tells a file from one that replaced it: its size in bytes, and when it changed (ns)."""

    size: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class PatchRecord:
    """A patch, and hashes of what the file says about its data: `before` the patch, and (`index`)
    after it.
    """

    patch: Patch
    before: bytes
    index: bytes


@dataclass(frozen=True, slots=True)
class Patched:
    """How to restore a file that is changed in place.

    `sample` is a hash of the bytes that stay, `content` of the bytes that `back` overwrites.
    """

    name: str
    back: PatchRecord
    sample: bytes
    content: bytes

    def is_sound(self) -> bool:
        """Return True if the row can be one that we wrote."""
        patch = self.back.patch
        numbers = (patch.before, patch.start, patch.length)
        fits = len(patch.head) == patch.start and patch.start + patch.length <= patch.before
        return fits and min(numbers) >= 0 and "/" not in self.name and is_nameable(self.name)

    def restore(self, folder: Path) -> bool:
        """Restore the file, also one that is partly restored already; False if it is another file.
        One that is not there needs nothing. Raises OSError.
        """
        with suppress(FileNotFoundError), locked(folder / self.name) as descriptor:
            back = self.back.patch
            if not patches.fits(descriptor, back, self.sample):
                return False
            patches.apply(descriptor, back, fsync=True)
            return patches.sample_of(descriptor, back.start, back.length) == self.sample
        return True


@dataclass(frozen=True, slots=True)
class Replaced:
    """How to restore a file that was replaced, added (no `old` name), or removed (no `state`).

    `state` is the new file's.
    """

    name: str
    old: str | None
    state: FileState | None

    def is_sound(self, folder: Path) -> bool:
        """Return True if the row can be one that we wrote."""
        named = (
            isinstance(self.name, str)
            and is_nameable(self.name)
            and safe_path(folder, self.name) is not None
        )
        if self.old is None:
            return named and self.state is not None
        hidden = isinstance(self.old, str) and owner_of(self.old) is not None
        return named and hidden and is_nameable(self.old)

    def is_as_written(self, folder: Path) -> bool:
        return state_of(folder / self.name) == self.state

    def restore(self, folder: Path) -> bool:
        """Restore the file, also one that is restored already. Raises OSError."""
        if self.old is not None:
            with suppress(FileNotFoundError):  # it was not moved yet, or is back already
                os.replace(folder / self.old, folder / self.name)
        elif self.is_as_written(folder):
            os.unlink(folder / self.name)
        return True


Row = Union[Patched, Replaced]


def state_of(path: Path) -> FileState | None:
    try:
        state = path.lstat()
    except OSError:
        return None
    return FileState(state.st_size, state.st_mtime_ns)


# Records: a line of JSON, then the bytes that the patches write


def record_of(path: Path) -> Path:
    return path.with_name(f".{path.name}{UNDO}")


def record_bytes(rows: Sequence[Row], *, is_undo: bool = False) -> bytes:
    """Return the bytes of a record: `parse` returns the rows."""
    files: list[dict[str, object]] = []
    data: list[bytes] = []
    for row in rows:
        if isinstance(row, Replaced):
            files.append({"name": row.name, "old": row.old, "state": row.state})
            continue
        patch = row.back.patch
        file: dict[str, object] = {"name": row.name}
        for name in _NUMBERS:
            file[name] = getattr(patch, name)
        file["head"], file["tail"] = len(patch.head), len(patch.tail)
        digests = (row.back.before, row.back.index, row.sample, row.content)
        file["hashes"] = [digest.hex() for digest in digests]
        files.append(file)
        data += [patch.head, patch.tail]
    record: dict[str, object] = {"schema": _SCHEMA, "files": files}
    if is_undo:
        record["undo"] = True
    return b"".join([json.dumps(record).encode(), b"\n", *data])


def parse(data: bytes, place: Path) -> list[Row]:
    """Return the rows of the record that was read at `place`. Raises `CkptError` if it is damaged
    or hostile.
    """
    line, _, rest = data.partition(b"\n")
    rows: list[Row] = []
    are_sound = True
    try:
        value = json.loads(line)
        for file in value["files"]:
            if "old" in file:
                replaced = _replaced(file)
                are_sound = are_sound and replaced.is_sound(place.parent)
                rows.append(replaced)
            else:
                patched, rest = _patched(file, rest)
                are_sound = are_sound and patched.is_sound()
                rows.append(patched)
        if value["schema"] != _SCHEMA or rest or not rows or not are_sound:
            raise ValueError("it contradicts itself")
    except (ValueError, LookupError, TypeError, OverflowError, RecursionError) as error:
        raise _damaged(place, str(error)) from error
    return rows


def _damaged(record: Path, reason: str) -> CkptError:
    is_folder = record.is_dir() and not record.is_symlink()
    command = shell(*(("rm", "-r") if is_folder else ("rm",)), str(record))
    return CkptError(
        f"{record} cannot be read: {reason}", hint=f"look at it, and remove it: {command}"
    )


def _read_record(place: Path) -> bytes:
    """Read the record or journal. Raises OSError if it is missing or this user may not read it, and
    `CkptError` for anything but a regular file: reading a pipe would wait without end.
    """
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    if not stat.S_ISREG(place.lstat().st_mode):
        raise _damaged(place, "it is not a regular file")
    with open(os.open(place, flags), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise _damaged(place, "it is not a regular file")
        return file.read()


def _replaced(file: Mapping[str, Any]) -> Replaced:
    state = None
    if file["state"] is not None:
        size, mtime_ns = file["state"]
        state = FileState(int(size), int(mtime_ns))
    return Replaced(file["name"], file["old"], state)


def _patched(file: Mapping[str, Any], data: bytes) -> tuple[Patched, bytes]:
    """Return the row of a file, whose bytes come first in `data`, and the rest of `data`."""
    head_end = file["head"]
    tail_end = head_end + file["tail"]
    head, tail = data[:head_end], data[head_end:tail_end]
    if (len(head), len(tail)) != (file["head"], file["tail"]):
        raise ValueError("it is cut off")
    numbers = {name: int(file[name]) for name in _NUMBERS}
    patch = Patch(**numbers, head=head, tail=tail)
    before, index, sample, content = map(bytes.fromhex, file["hashes"])
    patched = Patched(file["name"], PatchRecord(patch, before, index), sample, content)
    return patched, data[tail_end:]


def forget_undo(path: Path) -> None:
    """Remove the record of the file: it is another file now."""
    unlink([record_of(path)])


def unlink(paths: Iterable[Path]) -> None:
    for path in paths:
        with suppress(OSError):
            os.unlink(path)


# Transactions


@contextmanager
def _journaled(
    last: Path,
    rows: Sequence[Row],
    back: Callable[[], object],
    keep: bool,
    fsync: bool,
    is_undo: bool = False,
) -> Iterator[None]:
    """Inside the block the files of the rows change: all of them, or none if it raises OSError.

    `back` restores them. With `keep`, the record stays next to the file `last`. Raises `CkptError`
    if restoring fails. Then, and if the process ends in the block, the journal stays.
    """
    folder, record = last.parent, record_of(last)
    with staged_file(last) as (descriptor, staged):
        write_all(descriptor, record_bytes(rows, is_undo=is_undo))
        if fsync:
            os.fsync(descriptor)
        with uninterrupted():
            journal = staged.with_suffix(EDIT)
            os.rename(staged, journal)
            try:
                if fsync:
                    sync_folder(folder)
                yield
                # `staged_file` removes what has the name `staged` at the end
                os.rename(journal, record if keep else staged)
            except OSError as error:
                try:
                    back()
                    os.unlink(journal)
                except OSError:
                    raise _partly_written(journal, error) from error
                raise
            if not keep:
                unlink([record])


def edit(folder: Path, changes: Mapping[str, PatchRecord], *, fsync: bool) -> None:
    """Patch files of the folder, all or none, and keep the record for `undo`.

    A patch that reverts the last edit restores every byte. Raises OSError if all is as it was;
    `CkptError` if another process was faster, and if restoring failed too: the journal then stays.
    """
    last = folder / list(changes)[-1]
    back: dict[str, PatchRecord] = {}
    with suppress(CkptError):
        back = _ways_back(last)
    reverts = _indexes(back) == _indexes(changes)
    _edit(last, back if reverts else changes, True, fsync)


def _indexes(changes: Mapping[str, PatchRecord]) -> dict[str, bytes]:
    return {name: change.index for name, change in changes.items()}


def undo_edit(path: Path, *, fsync: bool) -> None:
    """Restore the file, and the others that were edited with it, as they were before the last edit
    in place.

    Raises `CkptError` if the record is missing, or if one of them has changed since; OSError as
    `edit`.
    """
    _edit(path, _ways_back(path), False, fsync, is_undo=True)


def _edit(
    last: Path, changes: Mapping[str, PatchRecord], keep: bool, fsync: bool, is_undo: bool = False
) -> None:
    folder = last.parent
    with ExitStack() as stack:
        files = {name: stack.enter_context(locked(folder / name)) for name in changes}
        sources.check_unchanged(str(folder / name) for name in changes)
        rows = []
        for name, change in changes.items():
            patch, descriptor = change.patch, files[name]
            sample = patches.sample_of(descriptor, patch.start, patch.length)
            back = PatchRecord(patches.inverse(descriptor, patch), change.index, change.before)
            rows.append(Patched(name, back, sample, patches.hash_of(patch)))
            # from now on it is this process that changes the file
            sources.forget(str(folder / name))

        def restore() -> None:
            for row in rows:
                patches.apply(files[row.name], row.back.patch, fsync=fsync)

        with _journaled(last, rows, restore, keep, fsync, is_undo):
            for name, change in changes.items():
                patches.apply(files[name], change.patch, fsync=fsync)
    if fsync:
        confirm(str(last), folder)


def _ways_back(path: Path) -> dict[str, PatchRecord]:
    """Return the patches that revert the last edit. Raises `CkptError` if there are none, or a file
    has changed.
    """
    record = record_of(path)
    try:
        rows = [row for row in parse(_read_record(record), record) if isinstance(row, Patched)]
    except OSError:
        raise error_nothing_to_undo(path) from None
    if not rows:
        raise error_nothing_to_undo(path)
    for row in rows:
        place = path.parent / row.name
        if not os.path.lexists(place):
            raise CkptError(
                f"{place}, which was edited in place, is gone",
                hint="the edit can be undone once the file has this name again; to give that up:"
                f" {shell('rm', str(record))}",
            )
        if not _is_as_edited(place, row):
            raise changed_since(place, [record])
    return {row.name: row.back for row in rows}


def _is_as_edited(place: Path, row: Patched) -> bool:
    """Return whether the file is still as its last edit left it."""
    back = row.back.patch
    with suppress(FileNotFoundError), locked(place) as descriptor:
        if os.fstat(descriptor).st_size != back.before:
            return False
        if not patches.fits(descriptor, back, row.sample):
            return False
        return patches.content_of(descriptor, back) == row.content
    return False


def replaced_rows(new: Path, folder: Path, names: Iterable[str]) -> list[Replaced]:
    """Return the rows for files of the folder that those in `new` replace; the others are
    removed.
    """
    rows = []
    for name in names:
        old = None
        if os.path.lexists(folder / name):
            old = temporary.temporary_name(name)
        if old is not None or os.path.lexists(new / name):
            rows.append(Replaced(name, old, state_of(new / name)))
    return rows


def replace_files(new: Path, folder: Path, rows: Sequence[Replaced], *, fsync: bool) -> None:
    """Move files from `new` into the folder, all or none.

    The last one of them makes the set complete: its old file goes first, and the new one comes
    last. Raises OSError if all is as it was, `CkptError` if restoring failed too: the journal then
    stays.
    """
    put = [row for row in rows if row.state is not None]
    removed = [row for row in rows if row.state is None]
    last = folder / Path((put or rows)[-1].name).name

    def restore() -> None:
        for row in rows:
            row.restore(folder)

    with _journaled(last, rows, restore, False, fsync):
        for row in (*reversed(put), *removed):
            if row.old is not None:
                os.rename(folder / row.name, folder / row.old)
        for row in put:
            place = folder / row.name
            with suppress(FileExistsError):
                place.parent.mkdir(parents=True, exist_ok=True)
            os.rename(new / row.name, place)
        if fsync:
            for home in {(folder / row.name).parent for row in rows}:
                sync_folder(home)
    unlink(folder / row.old for row in rows if row.old is not None)


@contextmanager
def locked(path: Path, *, wait: bool = False) -> Iterator[int]:
    """Open and lock the file or folder; the descriptor is open for writing too, if this user may
    write.

    Raises OSError, and `CkptError` if another process has it locked.
    """
    flags = getattr(os, "O_NOFOLLOW", 0)
    try:
        descriptor = os.open(path, os.O_RDWR | flags)
    except (PermissionError, IsADirectoryError):
        descriptor = os.open(path, os.O_RDONLY | flags)
    try:
        if lock(descriptor, wait=wait) is False:
            raise error_being_edited(path)
        yield descriptor
    finally:
        os.close(descriptor)


# Interrupted transactions


@dataclass(frozen=True, slots=True)
class UnfinishedEdit:
    """A transaction that has not ended: its journal, the names of its files (None: this user may
    not read them).
    """

    journal: Path
    names: tuple[str, ...] | None
    user: int
    is_mine: bool
    since: float
    is_undo: bool

    def roll_back(self, target: str) -> None:
        """Restore the files, unless another process has. Raises `CkptError` if that is not
        possible.
        """
        if not self.is_mine:
            raise CkptError(
                f"{target}: an interrupted edit of another user (number {self.user}) was found",
                hint=f"let that user run {shell('ckpttool', 'undo', target)}",
            )
        folder = self.journal.parent
        try:
            with locked(folder):
                for row in parse(_read_record(self.journal), self.journal):
                    if not row.restore(folder):
                        raise CkptError(
                            f"{folder / row.name} is not the file that an interrupted edit was of",
                            hint="if another, complete file has replaced it:"
                            f" {shell('rm', str(self.journal))}",
                        )
                os.unlink(self.journal)
            sync_folder(folder)
        except FileNotFoundError:  # another process was faster
            return
        except OSError as error:
            raise _partly_written(self.journal, error) from error


def unfinished_edits(
    folder: str | Path, names: Collection[str] | None = None
) -> list[UnfinishedEdit]:
    """Return the unfinished transactions of the folder that are about one of these files (default:
    any).

    Changes nothing. Raises `CkptError` for a damaged journal.
    """
    try:
        journals = sorted(
            Path(folder, name) for name in os.listdir(folder) if temporary.is_edit(name)
        )
    except OSError:
        return []
    unfinished = []
    for path in journals:
        with suppress(FileNotFoundError):  # it has just ended
            edit = _read_journal(path)
            may_be_about = names is None or edit.names is None
            if may_be_about or not set(names or ()).isdisjoint(edit.names or ()):
                unfinished.append(edit)
    return unfinished


def _read_journal(journal: Path) -> UnfinishedEdit:
    state = journal.lstat()
    about, is_undo = None, False
    with suppress(PermissionError):
        data = _read_record(journal)
        about = tuple(row.name for row in parse(data, journal))
        is_undo = bool(json.loads(data.partition(b"\n")[0]).get("undo"))
    is_mine = temporary.is_mine(state)
    return UnfinishedEdit(journal, about, state.st_uid, is_mine, state.st_mtime, is_undo)


def check(folder: str | Path, names: Collection[str] | None, target: str) -> None:
    """Raise `CkptError`, with the way out, if a transaction of these files (None: of any) has not
    ended.

    `target` is what the user calls them.
    """
    unfinished = unfinished_edits(folder, names)
    if unfinished:
        check_owner_has_ended(unfinished[0].journal.name, target, unfinished[0].since)
        raise error_interrupted(target)


def recover(
    folder: str | Path,
    names: Collection[str] | None = None,
    *,
    target: str = "",
    force: bool = False,
) -> list[UnfinishedEdit]:
    """Roll back the transactions of dead processes with these files (None: any), and remove what
    they left.

    `force`: processes of other machines and containers are dead too. Returns what was rolled back.
    Raises `CkptError` if this user cannot roll something back, or if its process may be alive.
    """
    edits = unfinished_edits(folder, names)
    targets = []
    for edit in edits:
        path = edit.journal.parent
        if edit.names is not None and len(edit.names) == 1:
            path /= edit.names[0]
        targets.append(target or str(path))
    for edit, name in zip(edits, targets):
        check_owner_has_ended(edit.journal.name, name, edit.since, force=force)
    for edit, name in zip(edits, targets):
        edit.roll_back(name)
    temporary.remove_left(folder)
    return edits


def check_owner_has_ended(
    name: str, target: str, since: float | None, *, force: bool = False
) -> None:
    """Raise `CkptError` if the owner of the temporary name is alive; if that is not known, unless
    `force` is set.

    `since`: when it began (seconds since 1970).
    """
    if temporary.is_alive(name):
        raise error_being_edited(target)
    if not force and not temporary.is_dead(name, time.time()):
        ago = "" if since is None else f", {max(0, time.time() - since):,.0f} seconds ago,"
        raise CkptError(
            f"{target}: an edit was begun on another machine or in another container{ago} and may"
            " still go on",
            hint=f"if that process has ended: {shell('ckpttool', 'undo', target, '--force')}",
        )


def error_being_edited(target: object) -> CkptError:
    return CkptError(
        f"{target} is being edited by another process", hint="run it again when that has ended"
    )


def error_interrupted(target: str) -> CkptError:
    return CkptError(
        f"{target}: an interrupted edit was found",
        hint=f"roll it back: {shell('ckpttool', 'undo', target)}",
    )


def error_nothing_to_undo(path: Path) -> CkptError:
    if not os.path.lexists(path):
        return CkptError(f"no such file: {path}", hint="check its name")
    hint = "only the last edit that `ckpttool remap --in-place` made can be undone"
    return CkptError(f"{path}: nothing to undo", hint=hint)


def changed_since(place: Path, records: Sequence[Path]) -> CkptError:
    """Return the error of `undo` for a file that has changed since its edit. `records` is what undo
    would need.
    """
    return CkptError(
        f"{place} has changed since it was edited in place",
        hint="the edit cannot be undone any more, and its record is of no use:"
        f" {shell('rm', *map(str, records))}",
    )


def _partly_written(journal: Path, error: OSError) -> CkptError:
    return CkptError(
        f"{journal.parent} is only partly written, and cannot be restored now: {error.strerror}",
        hint=f"nothing is lost, {journal} says how to restore it; once the disk can be written: "
        + shell("ckpttool", "undo", str(journal.parent)),
    )
