"""Undo: what `ckpttool undo` does, its result, and what an in-place edit says of it."""

from __future__ import annotations

from typing import Any

from ckpttool.core.errors import CkptError
from ckpttool.core.options import expand_options
from ckpttool.core.schema import COUNT, TEXT, one_of, record
from ckpttool.core.text import human_bytes, shell
from ckpttool.core.values import dataclass
from ckpttool.distributed.job import only_first
from ckpttool.formats.detect_folder import locate
from ckpttool.io import sources
from ckpttool.io import undo as io_undo
from ckpttool.io.files import is_dir
from ckpttool.io.undo import Way
from ckpttool.operands.checkpoint import split


@dataclass(frozen=True, slots=True)
class Undo:
    """How to undo an in-place edit: the command, and the bytes that are kept on the disk until then."""

    command: str
    nbytes: int

    def __str__(self) -> str:
        if not self.nbytes:
            return self.command
        return f"{self.command} (until then {human_bytes(self.nbytes)} of old content are kept; --no-undo keeps none)"


UNDO = record(Undo, {"command": TEXT, "bytes": COUNT}, called={"bytes": "nbytes"})
NO_UNDO = "not possible (--no-undo)"


@dataclass(frozen=True, slots=True)
class Undone:
    """What `undo` did with `path`. `way`: the last edit is undone, an interrupted one rolled back, or finished."""

    path: str
    way: Way

    def to_json(self) -> dict[str, Any]:
        """The `undo` object of the contract."""
        return dict(UNDONE.write(self))


UNDONE = record(Undone, {"path": TEXT, "way": one_of("undone", "rolled back", "finished")}, title="ckpttool.undo/1")


def undo_of(path: str, nbytes: int) -> Undo:
    """Return how to undo the edit of `path`, of which `nbytes` of old content are kept."""
    return Undo(shell("ckpttool", "undo", path), nbytes)


@expand_options()
def undo(path: str, *, force: bool = False, no_fsync: bool = False) -> Undone:
    """Roll back an interrupted edit of the file or folder, or else undo its last in-place edit.

    `force`: also an edit that was begun on another machine or in another container, whose process has ended. Raises
    `CkptError` if there is nothing to undo, or if the file has changed since.
    """
    sources.begin_call()
    if split(path)[1] is not None:
        raise CkptError("undo gives a whole file back", hint="name the file without ::SECTION")
    only_first()
    return Undone(path, io_undo.undo(path, lambda: _last(path), fsync=not no_fsync, force=force))


def _last(path: str) -> str:
    return locate(path).path if is_dir(path) else path
