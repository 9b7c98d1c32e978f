"""Files of a folder changed where they lie, all or none: the way back is on disk before the first byte changes.

A record next to the files holds it. As long as it is a journal, nobody reads the files: `ckpttool undo`, or the next
command that writes them, goes back first. Renamed to the record that `undo` reads, the change is done.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from ckpttool.core.errors import CkptError
from ckpttool.core.text import shell
from ckpttool.core.values import dataclass
from ckpttool.io import old_files, sources
from ckpttool.io import patch as patches
from ckpttool.io.atomic_replace import confirm, sync_folder
from ckpttool.io.interrupts import uninterrupted
from ckpttool.io.old_files import record_of
from ckpttool.io.patch import Patch
from ckpttool.io.paths import is_nameable
from ckpttool.io.temporary import EDIT, staged_file

_SCHEMA = "ckpttool.edit/1"


@dataclass(frozen=True, slots=True)
class Change:
    """A patch, and hashes of what the file says of its data `before` it and after it (`index`)."""

    patch: Patch
    before: bytes
    index: bytes


@dataclass(frozen=True, slots=True)
class _Entry:
    """The way back of one file; hashes of what stays, and of what stands after the edit where the way back writes."""

    name: str
    back: Change
    sample: bytes
    content: bytes


def edit(folder: Path, changes: Mapping[str, Change], *, keep: bool, fsync: bool) -> None:
    """Changes files of the folder, all of them or none; what takes the last edit back does so to the byte.

    `keep`: the way back is kept for `undo`.

    Raises OSError where all is as it was, with one of `kernel.NOT_HERE` where the file system cannot; `CkptError` where
    another process was faster, and where not even going back was possible: the journal then stays.
    """
    last = folder / list(changes)[-1]
    back = _ways_back_if_any(last)
    returns = {name: own.index for name, own in back.items()} == {name: own.index for name, own in changes.items()}
    _run(last, back if returns else changes, fsync, keep=keep)


def undo(path: Path, *, fsync: bool) -> None:
    """Gives the file, and those that were edited with it, back as they were before the last edit in place.

    Raises `CkptError` where there is no way back, or one of them has changed since; OSError as `edit`.
    """
    _run(path, _ways_back(path), fsync, keep=False, is_undo=True)


def _run(last: Path, changes: Mapping[str, Change], fsync: bool, keep: bool, is_undo: bool = False) -> None:
    """Carries the changes out; `keep`: the way back stays next to the file `last`."""
    folder = last.parent
    earlier = [folder / name for name in old_files.old_names(last)]
    with ExitStack() as stack:
        files = {name: stack.enter_context(locked(folder / name)) for name in changes}
        sources.check_unchanged(str(folder / name) for name in changes)
        entries = [_entry(name, files[name], change) for name, change in changes.items()]
        steps = [(files[entry.name], changes[entry.name], entry.back) for entry in entries]
        for name in changes:  # whether this succeeds or goes back, it is this process that changes them from now on
            sources.forget(str(folder / name))
        with staged_file(last) as (descriptor, staged):
            patches.write_at(descriptor, 0, _text(entries, is_undo))
            if fsync:
                os.fsync(descriptor)
            with uninterrupted():
                journal = staged.with_suffix(EDIT)
                os.rename(staged, journal)
                _carry_out(journal, record_of(last) if keep else staged, steps, fsync)
                old_files.remove(earlier)
                if not keep:
                    old_files.remove([record_of(last)])
    if fsync:
        confirm(str(last), folder)


def _carry_out(journal: Path, done: Path, steps: Sequence[tuple[int, Change, Change]], fsync: bool) -> None:
    """Takes the steps (descriptor, change, way back), or goes back; under the name `done` the journal is none any more.

    Raises OSError once it has gone back, and `CkptError` where it could not.
    """
    try:
        if fsync:
            sync_folder(journal.parent)
        for descriptor, change, _ in steps:
            patches.apply(descriptor, change.patch, fsync=fsync)
        os.rename(journal, done)
    except OSError as error:
        try:
            for descriptor, _, back in steps:
                patches.apply(descriptor, back.patch, fsync=fsync)
            os.unlink(journal)
        except OSError:
            raise _half_done(journal, error) from error
        raise


def _ways_back(path: Path) -> dict[str, Change]:
    """The way back from the last edit, of each file. Raises `CkptError` where there is none, or one has changed."""
    record = record_of(path)
    try:
        entries = _parse(record.read_bytes(), record)
    except OSError:
        raise nothing(path) from None
    for entry in entries:
        place = path.parent / entry.name
        with suppress(FileNotFoundError), locked(place) as descriptor:
            if _is_after(descriptor, entry):
                continue
        raise changed_since(place, [record])
    return {entry.name: entry.back for entry in entries}


def _ways_back_if_any(path: Path) -> dict[str, Change]:
    with suppress(CkptError):
        return _ways_back(path)
    return {}


def _is_after(descriptor: int, entry: _Entry) -> bool:
    """Whether the file is as the edit left it, as far as can be told without reading all of it."""
    back = entry.back.patch
    whole = os.fstat(descriptor).st_size == back.before and patches.fits(descriptor, back, entry.sample)
    return whole and patches.content_of(descriptor, back) == entry.content


# What was left by processes that died


def names_in(journal: Path) -> tuple[str, ...] | None:
    """The files that the edit is of; None if this user may not read it. Raises `CkptError` for a damaged journal."""
    try:
        return tuple(entry.name for entry in _parse(journal.read_bytes(), journal))
    except FileNotFoundError:  # it has just ended
        return ()
    except OSError:
        return None


def is_of_undo(journal: Path) -> bool:
    """Whether the journal is of an interrupted undo."""
    with suppress(OSError, ValueError):
        return bool(json.loads(journal.read_bytes().partition(b"\n")[0]).get("undo"))
    return False


def go_back(journal: Path) -> None:
    """Undoes what the journal says, unless another process has meanwhile. Raises `CkptError` where it cannot."""
    try:
        _go_back(journal)
    except OSError as error:
        raise _half_done(journal, error) from error


def _go_back(journal: Path) -> None:
    try:
        entries = _parse(journal.read_bytes(), journal)
    except FileNotFoundError:
        return
    for entry in entries:
        with suppress(FileNotFoundError), locked(journal.parent / entry.name) as descriptor:
            if not journal.exists():
                return
            _go_back_in(descriptor, entry, journal)
    with suppress(FileNotFoundError):
        os.unlink(journal)
    sync_folder(journal.parent)


def _go_back_in(descriptor: int, entry: _Entry, journal: Path) -> None:
    back = entry.back.patch
    known = patches.fits(descriptor, back, entry.sample)
    if known:
        patches.apply(descriptor, back, fsync=True)
    if not known or patches.sample_of(descriptor, back.start + back.shift, back.length) != entry.sample:
        raise CkptError(
            f"{journal.parent / entry.name} is not the file that an interrupted edit was of",
            hint=f"if it was replaced meanwhile by a whole one: rm {shlex.quote(str(journal))}",
        )


@contextmanager
def locked(path: Path) -> Iterator[int]:
    """The file, open for reading and writing if this user may, and for one process at a time.

    Raises OSError, and `CkptError` if another process edits it.
    """
    flags = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)
    try:
        descriptor = os.open(path, os.O_RDWR | flags)
    except PermissionError:
        descriptor = os.open(path, os.O_RDONLY | flags)
    try:
        try:
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise being_edited(path) from error
        except (ImportError, OSError):  # a file system without locks
            pass
        yield descriptor
    finally:
        os.close(descriptor)


def being_edited(what: object) -> CkptError:
    """The error of a command that finds a file while another process edits it."""
    return CkptError(f"{what} is just being edited by another process", hint="run it again when that has ended")


def nothing(path: object) -> CkptError:
    """The error of `undo` without anything to undo."""
    hint = "only the last edit in place can be undone: remap or swap-weights with --in-place, without --no-undo"
    return CkptError(f"{path}: nothing to undo", hint=hint)


def changed_since(place: Path, records: Sequence[Path]) -> CkptError:
    """The error of `undo` for a file that is no longer what the edit left. `records` is what undo would need."""
    return CkptError(
        f"{place} has changed since it was edited in place",
        hint=f"it cannot be undone any more: {shell('rm', *map(str, records))}",
    )


def _half_done(journal: Path, error: OSError) -> CkptError:
    return CkptError(
        f"{journal.parent} holds a file that is half edited, which cannot be undone now: {error.strerror}",
        hint=f"nothing is lost, the way back is in {journal}; once it can be written: "
        + shell("ckpttool", "undo", str(journal.parent)),
    )


# The record: one line of JSON, then the bytes that the way back writes


def _entry(name: str, descriptor: int, change: Change) -> _Entry:
    patch = change.patch
    sample = patches.sample_of(descriptor, patch.start, patch.length)
    back = Change(patches.inverse(descriptor, patch), change.index, change.before)
    return _Entry(name, back, sample, patches.hash_of(patch))


def _text(entries: Sequence[_Entry], is_undo: bool = False) -> bytes:
    rows = [
        {
            "name": entry.name,
            **{field: getattr(back.patch, field) for field in _NUMBERS},
            "head": len(back.patch.head),
            "tail": len(back.patch.tail),
            "hashes": [own.hex() for own in (back.before, back.index, entry.sample, entry.content)],
        }
        for entry in entries
        for back in (entry.back,)
    ]
    line = json.dumps({"schema": _SCHEMA, "files": rows, **({"undo": True} if is_undo else {})}).encode()
    patched = [entry.back.patch for entry in entries]
    return b"".join([line, b"\n", *(part for patch in patched for part in (patch.head, patch.tail))])


_NUMBERS = ("before", "start", "length", "shift", "dense")


def _parse(data: bytes, place: Path) -> list[_Entry]:
    """The record that was read at `place`. Raises `CkptError` where it is none, or leads out of its folder."""
    line, _, rest = data.partition(b"\n")
    entries = []
    try:
        value = json.loads(line)
        for row in value["files"]:
            head, tail = rest[: row["head"]], rest[row["head"] : row["head"] + row["tail"]]
            if (len(head), len(tail)) != (row["head"], row["tail"]):
                raise ValueError("it is cut off")
            rest = rest[len(head) + len(tail) :]
            patch = Patch(**{field: int(row[field]) for field in _NUMBERS}, head=head, tail=tail)
            before, index, sample, content = map(bytes.fromhex, row["hashes"])
            entries.append(_Entry(row["name"], Change(patch, before, index), sample, content))
        if value["schema"] != _SCHEMA or rest or not all(map(_is_sound, entries)):
            raise ValueError("it contradicts itself")
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        hint = f"look at it, and remove it: rm {shlex.quote(str(place))}"
        raise CkptError(f"{place} cannot be read: {error}", hint=hint) from error
    return entries


def _is_sound(entry: _Entry) -> bool:
    patch = entry.back.patch
    numbers = (patch.before, patch.start, patch.length, patch.start + patch.shift)
    whole = len(patch.head) == patch.start + patch.shift and not (patch.shift and patch.tail)
    whole = whole and patch.start + patch.length <= patch.before
    return whole and min(numbers) >= 0 and "/" not in entry.name and is_nameable(entry.name)
