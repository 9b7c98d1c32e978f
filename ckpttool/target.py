"""OUT operands: which format is to be written, to a file or into a folder, and the bytes of it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ckpttool.checkpoint import Checkpoint, Span
from ckpttool.formats import FORMATS, Format, format_for
from ckpttool.formats.folders import DCP_METADATA, INDEX, checkpoint_files, companions, locate
from ckpttool.pieces import Files, Link, Piece, Pieces


@dataclass(frozen=True, slots=True)
class Target:
    """Where a checkpoint is to be written. `folder` is None for a single file.

    `name` is the file in the folder that OUT asks for: the index, or the only file; empty for the usual one.
    """

    path: str
    format: Format
    folder: str | None = None
    name: str = ""

    def lay_out(self, checkpoint: Checkpoint, max_shard_size: int | None = None) -> Files:
        """The files to write, by their names in the folder (a single file stands alone), what completes it last.

        From folder to folder the files beside the weights go along. Raises `Refused` on what the format cannot hold.
        """
        if self.folder is None:
            return {os.path.basename(self.path): self.format.layout(checkpoint)}
        files: dict[str, Pieces | Link] = {}
        if os.path.isdir(checkpoint.source) and not _same(checkpoint.source, self.folder):
            for name, path in companions(checkpoint.source).items():
                files[name] = [Piece(Span(path, 0, os.path.getsize(path)))]
        if self.format.folder:
            return files | dict(self.format.layout_files(checkpoint, self.name, max_shard_size))
        return files | {self.name: self.format.layout(checkpoint)}

    def present(self, files: Files | None = None) -> set[str]:
        """The files of a checkpoint that stands in the folder already; without those that `files` replaces."""
        assert self.folder is not None
        marker = self.name or self.format.endings[0]
        return checkpoint_files(self.folder, marker).difference(files or ())


def target_for(out: str, source: Checkpoint, max_shard_size: int | None = None) -> Target:
    """What `out` asks for, when `source` is written to it.

    A folder is meant by a slash at its end, by a folder that exists, by the name of an index or of DCP's ``.metadata``,
    by the ending ``.dcp`` (DCP again), and where the source is a folder by a name without ending. It gets the source's
    format if that one fills folders, else sharded safetensors; with `max_shard_size` (bytes) a single file of a folder
    is sharded too. Raises `CkptError` for an ending that no format has.
    """
    name = os.path.basename(out)
    if INDEX.fullmatch(name) or name == DCP_METADATA:
        return Target(out, format_for(out), os.path.dirname(out) or ".", name)
    if out.rstrip("/").endswith(".dcp"):
        return Target(out, FORMATS["dcp"], out)
    from_folder = os.path.isdir(source.source)
    row = FORMATS[source.format]
    if not (out.endswith("/") or os.path.isdir(out) or (from_folder and not Path(out).suffix)):
        return Target(out, format_for(out))
    if row.folder:
        return Target(out, row, out)
    if from_folder and max_shard_size is None:
        return Target(out, row, out, os.path.basename(locate(source.source).path))
    return Target(out, FORMATS["sharded_bin" if row.name == "torch_zip" and from_folder else "sharded"], out)


def _same(left: str, right: str) -> bool:
    return os.path.exists(right) and os.path.samefile(left, right)
