"""The table of formats, and the way from a path to the reader or writer that knows it.

A file is recognised by its content, an output by its ending. A format's module is imported when it is first needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from ckpttool.checkpoint import Checkpoint
from ckpttool.errors import CkptError
from ckpttool.pieces import Pieces


@dataclass(frozen=True, slots=True)
class Format:
    """A row of the table: `endings` choose it for an output, `tensors_only`: it holds one state dict and no more."""

    name: str
    title: str
    endings: tuple[str, ...]
    tensors_only: bool = False

    def read(self, path: str) -> Checkpoint:
        """The index of the file at `path`. Raises `CkptError` on what is truncated, corrupt or unsafe."""
        checkpoint: Checkpoint = self._module.read(path)
        return checkpoint

    def layout(self, checkpoint: Checkpoint) -> Pieces:
        """The bytes of the checkpoint's file. Raises `Refused` on what the format cannot hold."""
        pieces: Pieces = self._module.layout(checkpoint)
        return pieces

    @property
    def _module(self) -> Any:
        return import_module(f"ckpttool.formats.{self.name}")


TABLE = (
    Format("safetensors", "safetensors", (".safetensors",), tensors_only=True),
    Format("torch_zip", "torch zip (torch.save)", (".pt", ".pth", ".bin", ".ckpt")),
    Format("pt2", "exported program (.pt2, torch 2.9 and later)", (".pt2",)),
)
FORMATS = {row.name: row for row in TABLE}


def open_checkpoint(path: str) -> Checkpoint:
    """The index of the file at `path`. Raises `CkptError` where it is no checkpoint that can be read."""
    from ckpttool.formats.sniff import sniff

    return FORMATS[sniff(path)].read(path)


def format_for(out: str) -> Format:
    """The format that the ending of `out` asks for. Raises `CkptError` for an ending that no format has."""
    ending = Path(out).suffix.lower()
    for row in TABLE:
        if ending in row.endings:
            return row
    known = " ".join(ending for row in TABLE for ending in row.endings)
    raise CkptError(f"{out}: no format has the ending {ending!r}", hint=f"choose one of {known}")
