"""Undo an edit in place."""

from __future__ import annotations

from typing import Any

from ckpttool.core.errors import CkptError
from ckpttool.core.options import expand_options
from ckpttool.core.schema import TEXT, one_of, record
from ckpttool.core.values import dataclass
from ckpttool.distributed.job import only_first
from ckpttool.formats.registry import recognize
from ckpttool.io import sources
from ckpttool.io import undo as io_undo
from ckpttool.io.files import is_dir
from ckpttool.io.undo import Way
from ckpttool.operands.checkpoint import split


@dataclass(frozen=True, slots=True)
class Undone:
    """The result of `undo`.

    Attributes:
        path: The file or folder.
        way: ``undone``: the last edit is undone; ``rolled back``: an interrupted edit is.
    """

    path: str
    way: Way

    def to_json(self) -> dict[str, Any]:
        """The `undo` object of the contract."""
        return dict(UNDONE.write(self))


UNDONE = record(
    Undone, {"path": TEXT, "way": one_of("undone", "rolled back")}, title="ckpttool.undo/1"
)


@expand_options()
def undo(path: str, *, force: bool = False, no_fsync: bool = False) -> Undone:
    """Roll back an interrupted edit of the file or folder, or else undo its last in-place edit.

    Args:
        path: The file or folder that was edited.
        force: Also roll back an edit that was begun on another machine or in another container,
            whose process has ended.
        no_fsync: Do not wait until the disk has the bytes.

    Returns:
        What was done: undone, or rolled back.

    Raises:
        CkptError: There is nothing to undo, or the file has changed since.

    Example::

        ckpttool.remap("good.safetensors", in_place=True, rule=["0.{x*} => a.{x*}"])
        print(ckpttool.undo("good.safetensors").way)
    """
    sources.begin_call()
    if split(path)[1] is not None:
        raise CkptError("undo gives a whole file back", hint="name the file without ::SECTION")
    only_first()

    def last() -> str:
        return recognize(path).path if is_dir(path) else path

    return Undone(path, io_undo.undo(path, last, fsync=not no_fsync, force=force))
