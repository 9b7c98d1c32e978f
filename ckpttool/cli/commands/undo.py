"""``ckpttool undo``."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import ckpttool
from ckpttool.cli.output import Report
from ckpttool.core.options import COMMON, Argument, Option
from ckpttool.core.values import dataclass


@dataclass(frozen=True, kw_only=True)
class UndoReport(Report):
    """`Report` with the words for what `--force` means here."""

    force: Annotated[
        bool,
        Option(
            "--force",
            "Also roll back an edit of another machine or container, and overwrite report files.",
            COMMON,
        ),
    ] = False


def command(
    path: Annotated[str, Argument("PATH", "The file or folder that was edited in place.")],
    report: UndoReport,
    no_fsync: Annotated[
        bool, Option("--no-fsync", "Do not wait until the disk has the bytes.", COMMON)
    ] = False,
) -> None:
    """Roll back an interrupted or the last edit in place.

    If a command was killed while it edited PATH, everything is as it was before that command.
    Otherwise the last finished `--in-place` is undone, to the byte. With --force an edit that
    another machine or container began is rolled back too: pass it only if that process has ended.

    \b
    Examples:
      ckpttool undo train.safetensors
      ckpttool undo checkpoint_folder
    """
    from ckpttool.report.documents.remap import undone

    report.check([path])
    done = ckpttool.undo(path, no_fsync=no_fsync, force=report.force)
    report.emit(partial(undone, done), done.to_json)
