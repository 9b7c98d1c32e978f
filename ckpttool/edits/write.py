"""Writing an output: the checks before any work, the bytes, the proof afterwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from ckpttool.checkpoint import Checkpoint
from ckpttool.edits.remap.options import RANK
from ckpttool.errors import CkptError
from ckpttool.evaluate.compare import Fingerprints, verify
from ckpttool.formats.open import open_checkpoint
from ckpttool.formats.table import FORMATS
from ckpttool.io import write_file, write_folder
from ckpttool.io.pieces import Files, Link, Pieces
from ckpttool.operands.output import Target

# Told of each long piece of work: its title and its bytes, then within it of the bytes that are done.
Progress = Callable[[str, int], AbstractContextManager["Callable[[int], object]"]]


def quiet(title: str, total: int) -> AbstractContextManager[Callable[[int], object]]:
    """A `Progress` that shows nothing."""
    return nullcontext(lambda count: None)


@dataclass(frozen=True, slots=True)
class Writer:
    """How outputs are written: over what is there (`force`), waiting for the disk (`fsync`), shown to whom."""

    force: bool = False
    fsync: bool = True
    link: str = "copy"
    progress: Progress = quiet

    def check(self, target: Target, source: str, *, in_place: bool) -> None:
        """Raises `CkptError` where OUT cannot or must not be written."""
        if target.folder is None:
            write_file.preflight(target.path, [source], force=self.force, in_place=in_place)
        else:
            write_folder.preflight(target.folder, target.present(), source, force=self.force, in_place=in_place)

    def file(self, pieces: Pieces, out: str) -> int:
        """Writes the file and returns its size in bytes."""
        with self.progress(out, sum(piece.nbytes for piece in pieces)) as advance:
            return write_file.write(pieces, out, fsync=self.fsync, progress=advance)

    def target(self, target: Target, files: Files) -> int:
        """Writes the file or folder and returns its size in bytes."""
        if target.folder is None:
            (pieces,) = (content for content in files.values() if not isinstance(content, Link))
            return self.file(pieces, target.path)
        total = sum(piece.nbytes for content in files.values() if not isinstance(content, Link) for piece in content)
        stale = target.present(files)
        with self.progress(target.path, total) as advance:
            return write_folder.write_folder(
                files, target.folder, stale=stale, link=self.link, fsync=self.fsync, progress=advance
            )

    def ranks(self, ranks: Sequence[Checkpoint], out: str, *, prove_it: bool) -> None:
        """Writes the file of each rank; all outputs are checked before the first is written."""
        paths = [out.replace(RANK, str(rank)) for rank in range(len(ranks))]
        layouts = [FORMATS["torch_zip"].layout(rank) for rank in ranks]
        for path, rank in zip(paths, ranks):
            write_file.preflight(path, [rank.source], force=self.force, in_place=False)
        for path, pieces, rank in zip(paths, layouts, ranks):
            self.file(pieces, path)
            if prove_it:
                prove(path, rank)


def prove(out: str, expected: Checkpoint | Fingerprints, written: Checkpoint | None = None) -> None:
    """Raises `CkptError`, with every tensor that is not as planned, where `out` does not hold `expected`.

    `written` is the index of `out`, where it is not the usual one.
    """
    problems = verify(written or open_checkpoint(out), expected)
    if problems:
        raise CkptError(f"{out} is not what was planned", hint="do not use it, and report this", problems=problems)
