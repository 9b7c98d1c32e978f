"""Writing an output file for a command: checks before any work, a progress bar on a terminal, the proof afterwards."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Annotated

import typer

from ckpttool.checkpoint import Checkpoint
from ckpttool.errors import CkptError, Problem
from ckpttool.evaluate.compare import Fingerprints
from ckpttool.io import sources, write_file, write_folder
from ckpttool.io.files import files_of, is_dir
from ckpttool.io.paths import is_url, join
from ckpttool.io.pieces import Files, Pieces
from ckpttool.io.pieces import Link as Linked
from ckpttool.io.ranges import digest_on_disk
from ckpttool.io.write_file import Digest
from ckpttool.operands.output import Target


def _known_link(how: str) -> str:
    if how not in write_folder.LINKS:
        raise CkptError(f"--link {how}: no such way", hint=f"choose one of {', '.join(write_folder.LINKS)}")
    return how


Out = Annotated[str | None, typer.Option("-o", "--output", metavar="OUT", help="The file to write.")]
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


@dataclass(frozen=True, slots=True)
class Wanted:
    """How an output is to be written: the options of every command that writes one, and the CKPT it is made of."""

    source: str
    force: bool = False
    in_place: bool = False
    fsync: bool = True
    verify: bool = False
    link: str = "copy"

    @property
    def read(self) -> list[str]:
        """The folder, or the local files, that CKPT names."""
        return [self.source] if is_dir(self.source) else files_of(self.source)


def write(pieces: Pieces, out: str, how: Wanted) -> None:
    """Writes the file; shows a bar on stderr where that is a terminal."""
    digest = hashlib.blake2b() if how.verify and not is_url(out) else None
    total = sum(piece.nbytes for piece in pieces)
    _with_bar(
        out,
        total,
        lambda progress: write_file.write(
            pieces,
            out,
            replace=how.force or how.in_place,
            in_place=how.in_place,
            readers_of=how.read,
            fsync=how.fsync,
            progress=progress,
            digest=digest,
        ),
    )
    if digest is not None:
        _prove_bytes({out: digest})


def check_target(target: Target, source: str, *, force: bool, in_place: bool) -> None:
    """Raises `CkptError` where OUT cannot or must not be written."""
    if target.folder is None:
        read = (source, *files_of(source), *sources.files_read())
        write_file.preflight(target.path, read, force=force, in_place=in_place)
    else:
        write_folder.preflight(target.folder, target.present(), source, force=force, in_place=in_place)


def write_target(target: Target, files: Files, how: Wanted) -> None:
    """Writes the file or folder."""
    if target.folder is None:
        (pieces,) = (content for content in files.values() if not isinstance(content, Linked))
        write(pieces, target.path, how)
    else:
        write_files(files, target.folder, how, stale=target.present(files))


def write_files(files: Files, folder: str, how: Wanted, *, stale: Collection[str], whole: bool = True) -> None:
    """Writes the files into the folder, all or none; not `whole`: it holds more than the checkpoint."""
    digests: dict[str, Digest] | None = {} if how.verify and not is_url(folder) else None
    total = sum(piece.nbytes for content in files.values() if not isinstance(content, Linked) for piece in content)
    _with_bar(
        folder,
        total,
        lambda progress: write_folder.write_folder(
            files,
            folder,
            stale=stale,
            link=how.link,
            whole=whole,
            replace=how.force or how.in_place,
            readers_of=how.read,
            fsync=how.fsync,
            progress=progress,
            digests=digests,
        ),
    )
    if digests is not None:
        _prove_bytes({join(folder, name): digest for name, digest in digests.items()})


def _prove_bytes(digests: Mapping[str, Digest]) -> None:
    """Raises `CkptError` where the disk does not hold what was written, to the byte."""
    problems = [
        Problem("other bytes on the disk than were written", path)
        for path, digest in digests.items()
        if digest_on_disk(path) != digest.digest()
    ]
    if problems:
        raise CkptError(
            "what was written is not what the disk holds", hint="check the disk, and do not use it", problems=problems
        )


def _with_bar(title: str, total: int, move: Callable[[write_file.Progress | None], object]) -> None:
    if total < _WORTH_A_BAR or not sys.stderr.isatty():
        move(None)
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

    columns = ("{task.description}", BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(title, total=total)
        move(lambda count: progress.advance(task, count))


def prove(out: str, expected: Checkpoint | Fingerprints, written: Checkpoint | None = None) -> None:
    """Raises `CkptError`, with every tensor that is not as planned, where `out` does not hold `expected`.

    `written` is the index of `out`, where it is not the usual one.
    """
    from ckpttool.evaluate.compare import verify
    from ckpttool.formats.open import open_checkpoint

    problems = verify(written or open_checkpoint(out), expected)
    if problems:
        raise CkptError(f"{out} is not what was planned", hint="do not use it, and report this", problems=problems)
