"""What undo needs of replaced files: the old ones under hidden names, and a record that lists them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from shlex import quote

from ckpttool.core.errors import CkptError
from ckpttool.core.values import dataclass
from ckpttool.io import temporary
from ckpttool.io.atomic_replace import sync_folder
from ckpttool.io.patch import write_at
from ckpttool.io.paths import is_nameable, safe_path

_SCHEMA = "ckpttool.replaced/1"
_OLD = re.compile(r"\.[^/]*\.[0-9a-f]{8}\.ckpttool\.old", re.DOTALL)
_LONGEST = 100  # bytes of a name that stay in the hidden one; names have room for 255


@dataclass(frozen=True, slots=True)
class Replaced:
    """A file that was replaced, added (no `old` name) or removed (no `state`: size and mtime in ns of the new one)."""

    name: str
    old: str | None
    state: tuple[int, int] | None

    def is_as_written(self, folder: Path) -> bool:
        """Whether the file in the folder is the one that the edit left."""
        return state_of(folder / self.name) == self.state

    def is_untouched(self, folder: Path) -> bool:
        """Whether the file is still the old one: the edit died before it replaced it."""
        place = folder / self.name
        if self.old is None:
            return not os.path.lexists(place)
        old = folder / self.old
        return place.exists() and (not old.exists() or old.samefile(place))


def state_of(path: Path) -> tuple[int, int] | None:
    """Size and mtime (ns); None if there is no such file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns


def record_of(path: Path) -> Path:
    """Where the record of the last edit of the file lies."""
    return path.with_name(f".{path.name}.ckpttool.undo")


def hidden_name(name: str) -> str:
    """The name that an old file is kept under, in the folder itself."""
    short = os.fsdecode(os.fsencode(name.replace("/", "_"))[:_LONGEST]).encode("utf-8", "replace").decode()
    return f".{short}.{os.urandom(4).hex()}.ckpttool.old"


def text(rows: Sequence[Replaced]) -> bytes:
    """The record's file."""
    files = [{"name": row.name, "old": row.old, "state": row.state} for row in rows]
    return json.dumps({"schema": _SCHEMA, "files": files}).encode() + b"\n"


def parse(data: bytes, place: Path) -> list[Replaced] | None:
    """The record that was read at `place`; None if it is one of an edit. Raises `CkptError` for a damaged one."""
    line, _, _ = data.partition(b"\n")
    try:
        value = json.loads(line)
        if value["schema"] != _SCHEMA:
            return None
        rows = [Replaced(row["name"], row["old"], _state(row["state"])) for row in value["files"]]
        if not rows or not all(_is_sound(row, place.parent) for row in rows):
            raise ValueError("it contradicts itself")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        hint = f"look at it, and remove it: rm {quote(str(place))}"
        raise CkptError(f"{place} cannot be read: {error}", hint=hint) from error
    return rows


def _state(value: Sequence[int] | None) -> tuple[int, int] | None:
    return None if value is None else (int(value[0]), int(value[1]))


def _is_sound(row: Replaced, folder: Path) -> bool:
    named = isinstance(row.name, str) and is_nameable(row.name) and safe_path(folder, row.name) is not None
    kept = row.old is None or (isinstance(row.old, str) and is_nameable(row.old) and _OLD.fullmatch(row.old))
    return named and bool(kept) and (row.old, row.state) != (None, None)


def old_names(path: Path) -> list[str]:
    """Names of the old files that the record of the file `path` keeps."""
    with suppress(OSError, CkptError):
        rows = parse(record_of(path).read_bytes(), record_of(path)) or ()
        return [row.old for row in rows if row.old is not None]
    return []


def forget_undo(path: Path) -> None:
    """Removes what undo needs for the file: it is another one now."""
    remove(path.with_name(name) for name in old_names(path))
    remove([record_of(path)])


def remove(paths: Iterable[Path]) -> None:
    """Removes the files, as far as it can."""
    for path in paths:
        with suppress(OSError):
            os.unlink(path)


@contextmanager
def kept(place: Path, staged: Path, *, fsync: bool) -> Iterator[None]:
    """Keeps the file at `place`, which `staged` replaces inside the block. If the block raises, nothing is kept.

    Raises `CkptError` if the file system cannot keep it, OSError if it cannot be written.
    """
    earlier = [place.with_name(name) for name in old_names(place)]
    waiting, old = place.with_name(temporary.temporary_name(place.name)), place.with_name(hidden_name(place.name))
    rows = [Replaced(place.name, old.name, state_of(staged))]
    link(place, waiting)
    try:
        with temporary.staged_file(place) as (descriptor, record):
            write_at(descriptor, 0, text(rows))
            if fsync:
                os.fsync(descriptor)
            os.rename(record, record_of(place))
        os.rename(waiting, old)
        if fsync:
            sync_folder(place.parent)
        yield
    except BaseException:
        remove([waiting, old, record_of(place)])
        raise
    finally:
        remove(earlier)


def link(place: Path, name: Path) -> None:
    """Gives the old file a second name. Raises `CkptError` if that cannot be."""
    try:
        os.link(place, name, follow_symlinks=False)
    except OSError as error:
        raise CkptError(
            f"{place}: the old file cannot be kept for undo: {error.strerror}",
            hint="nothing was changed; pass --no-undo to replace it for good, or -o OUT to write another file",
        ) from error
