"""Writing an output file for a command: checks before any work, a progress bar on a terminal, the proof afterwards."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from ckpttool import execute
from ckpttool.checkpoint import Checkpoint
from ckpttool.errors import CkptError
from ckpttool.pieces import Pieces

Out = Annotated[str | None, typer.Option("-o", "--output", metavar="OUT", help="The file to write.")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite OUT.")]
NoFsync = Annotated[bool, typer.Option("--no-fsync", help="Do not wait until the disk has the bytes.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be written, and write nothing.")]
Verify = Annotated[bool, typer.Option("--verify", help="Read OUT back and compare every tensor.")]

_WORTH_A_BAR = 256 << 20  # bytes; less is written before anyone looks


def write(pieces: Pieces, out: str, *, fsync: bool) -> int:
    """Writes the file and returns its size in bytes; shows a bar on stderr where that is a terminal."""
    total = sum(piece.nbytes for piece in pieces)
    if total < _WORTH_A_BAR or not sys.stderr.isatty():
        return execute.write(pieces, out, fsync=fsync)
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

    columns = ("{task.description}", BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(out, total=total)
        return execute.write(pieces, out, fsync=fsync, progress=lambda count: progress.advance(task, count))


def prove(out: str, expected: Checkpoint) -> None:
    """Raises `CkptError`, with every tensor that is not as planned, where `out` does not hold `expected`."""
    from ckpttool.formats import open_checkpoint
    from ckpttool.values import verify

    problems = verify(open_checkpoint(out), expected)
    if problems:
        raise CkptError(f"{out} is not what was planned", hint="do not use it, and report this", problems=problems)
