"""Writing an output file for a command: checks before any work, a progress bar on a terminal, the proof afterwards."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated

import typer

from ckpttool.checkpoint import Checkpoint
from ckpttool.errors import CkptError
from ckpttool.evaluate.compare import Fingerprints
from ckpttool.io import write_file, write_folder
from ckpttool.io.pieces import Files, Pieces
from ckpttool.io.pieces import Link as Linked
from ckpttool.operands.output import Target


def _known_link(how: str) -> str:
    if how not in write_folder.LINKS:
        raise CkptError(f"--link {how}: no such way", hint=f"choose one of {', '.join(write_folder.LINKS)}")
    return how


Out = Annotated[str | None, typer.Option("-o", "--output", metavar="OUT", help="The file to write.")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite OUT.")]
NoFsync = Annotated[bool, typer.Option("--no-fsync", help="Do not wait until the disk has the bytes.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be written, and write nothing.")]
HowLinked = Annotated[
    str,
    typer.Option(
        "--link",
        metavar="HOW",
        help=f"Data files that stay as they are: {', '.join(write_folder.LINKS)}.",
        callback=_known_link,
    ),
]
Verify = Annotated[bool, typer.Option("--verify", help="Read OUT back and compare every tensor.")]

_WORTH_A_BAR = 256 << 20  # bytes; less is written before anyone looks


def write(pieces: Pieces, out: str, *, fsync: bool) -> int:
    """Writes the file and returns its size in bytes; shows a bar on stderr where that is a terminal."""
    total = sum(piece.nbytes for piece in pieces)
    return _with_bar(out, total, lambda progress: write_file.write(pieces, out, fsync=fsync, progress=progress))


def check_target(target: Target, source: str, *, force: bool, in_place: bool) -> None:
    """Raises `CkptError` where OUT cannot or must not be written."""
    if target.folder is None:
        write_file.preflight(target.path, [source], force=force, in_place=in_place)
    else:
        write_folder.preflight(target.folder, target.present(), source, force=force, in_place=in_place)


def write_target(target: Target, files: Files, *, fsync: bool, link: str) -> int:
    """Writes the file or folder and returns its size in bytes."""
    folder = target.folder
    if folder is None:
        (pieces,) = (content for content in files.values() if not isinstance(content, Linked))
        return write(pieces, target.path, fsync=fsync)
    total = sum(piece.nbytes for content in files.values() if not isinstance(content, Linked) for piece in content)
    stale = target.present(files)

    def move(progress: write_file.Progress | None) -> int:
        return write_folder.write_folder(files, folder, stale=stale, link=link, fsync=fsync, progress=progress)

    return _with_bar(target.path, total, move)


def _with_bar(title: str, total: int, move: Callable[[write_file.Progress | None], int]) -> int:
    if total < _WORTH_A_BAR or not sys.stderr.isatty():
        return move(None)
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

    columns = ("{task.description}", BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(title, total=total)
        return move(lambda count: progress.advance(task, count))


def prove(out: str, expected: Checkpoint | Fingerprints, written: Checkpoint | None = None) -> None:
    """Raises `CkptError`, with every tensor that is not as planned, where `out` does not hold `expected`.

    `written` is the index of `out`, where it is not the usual one.
    """
    from ckpttool.evaluate.compare import verify
    from ckpttool.formats.open import open_checkpoint

    problems = verify(written or open_checkpoint(out), expected)
    if problems:
        raise CkptError(f"{out} is not what was planned", hint="do not use it, and report this", problems=problems)
