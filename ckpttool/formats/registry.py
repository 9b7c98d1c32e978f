"""The table of formats, and the format that an output's file name asks for."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.errors import CkptError
from ckpttool.core.values import dataclass
from ckpttool.io.pieces import Edited, Files, Pieces


@dataclass(frozen=True, slots=True)
class Format:
    """A row of the table. `module` reads and writes it, `endings` choose it for an output.

    `tensors_only`: it holds one state dict and no more. `aliases`: it can hold one tensor under two names. `folder`: it
    fills a folder, and is written by `layout_files`. `pickled`: it holds whatever torch.save pickles; the writer of one
    such format takes the container of any other.
    """

    name: str
    module: str
    title: str
    endings: tuple[str, ...]
    tensors_only: bool = False
    aliases: bool = True
    folder: bool = False
    pickled: bool = False

    def read(self, path: str) -> Checkpoint:
        """Return the index of the file at `path`. Raises `CkptError` if it is truncated, corrupt or unsafe."""
        checkpoint: Checkpoint = self._module.read(path)
        return checkpoint

    def layout(self, checkpoint: Checkpoint) -> Pieces:
        """Return the bytes of the checkpoint's file. Raises `Refused` for entries that the format cannot hold."""
        pieces: Pieces = self._module.layout(checkpoint)
        return pieces

    def layout_files(self, checkpoint: Checkpoint, name: str = "", max_shard_size: int | None = None) -> Files:
        """Return the files of the checkpoint's folder; `name` is the name of the index, `max_shard_size` is in bytes.

        Raises `Refused` for entries that the format cannot hold.
        """
        content: Files = self._module.layout_files(checkpoint, self.name, name, max_shard_size)
        return content

    def layout_in_place(self, checkpoint: Checkpoint, name: str) -> Mapping[str, Edited] | None:
        """Return the edit of the file `name`, or of the files of the folder, that leaves all tensors in place.

        None if the format or the change needs everything to be rewritten.
        """
        lay_out = getattr(self._module, "layout_in_place", None)
        content: Edited | Mapping[str, Edited] | None = None if lay_out is None else lay_out(checkpoint)
        return {name: content} if isinstance(content, Edited) else content

    @property
    def _module(self) -> Any:
        return import_module(f"ckpttool.formats.{self.module}")


TABLE = (
    Format("safetensors", "safetensors.single", "safetensors", (".safetensors",), tensors_only=True, aliases=False),
    Format("torch_zip", "torch.zip_file", "torch zip (torch.save)", (".pt", ".pth", ".bin", ".ckpt"), pickled=True),
    Format("torch_legacy", "torch.legacy_file", "torch.save before 1.6 (no zip)", (), pickled=True),
    Format("torchscript", "torch.torchscript", "TorchScript archive", ()),
    Format("pt2", "pt2.archive", "exported program (.pt2)", (".pt2",)),
    Format(
        "sharded",
        "huggingface",
        "sharded safetensors (Hugging Face)",
        (".safetensors.index.json",),
        tensors_only=True,
        aliases=False,
        folder=True,
    ),
    Format(
        "sharded_bin",
        "huggingface",
        "sharded torch zip (Hugging Face)",
        (".bin.index.json",),
        tensors_only=True,
        folder=True,
    ),
    Format("rank_files", "ranks.files", "files of the ranks of one run (torch.save)", ()),
    Format("deepspeed", "deepspeed.folder", "DeepSpeed folder (ZeRO, universal)", ()),
    Format("accelerate", "accelerate", "accelerate's folder of an FSDP run", ()),
    Format(
        "dcp", "dcp.folder", "torch.distributed.checkpoint folder", (".metadata", ".dcp"), folder=True, pickled=True
    ),
)
MANIFEST = Format("manifest", "manifest", "manifest of a checkpoint (in-toto statement)", ())  # digests, and no values
MEMORY = Format("memory", "", "a checkpoint in memory", (), pickled=True)  # not a file: nothing reads or writes it
FORMATS = {row.name: row for row in (*TABLE, MANIFEST, MEMORY)}


def format_for(out: str) -> Format:
    """Return the format of the ending of `out`. Raises `CkptError` for an ending that no format has."""
    for row in TABLE:
        if out.lower().endswith(row.endings):
            return row
    ending = os.path.splitext(out)[1]
    known = " ".join(ending for row in TABLE for ending in row.endings)
    raise CkptError(f"{out}: no format has the ending {ending!r}", hint=f"choose one of {known}, or name a folder")
