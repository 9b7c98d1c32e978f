"""A TorchScript archive as a program whose weights are replaced; its code, and the constants of that, stay as they are.

The code calls every tensor by its attribute: the names, shapes and dtypes are those that it has.
"""

from __future__ import annotations

from dataclasses import replace

from ckpttool.checkpoint import Checkpoint
from ckpttool.formats.containers.zip_archive import read_archive
from ckpttool.formats.pt2.program import Home, Program, root_of
from ckpttool.formats.torch import torchscript

LAYOUT = "torchscript"


def read(path: str) -> Checkpoint:
    """The index of the archive, with all that its writer needs. Raises `CkptError` where it cannot be read."""
    checkpoint, archive = torchscript.read(path), read_archive(path)
    records = {archive.span(record): record.name for record in archive.records}
    storages = {entry.storage for section in checkpoint.sections for entry in section.tensors if entry.storage}
    homes = {storage: Home(records[storage.data]) for storage in storages if storage.data in records}
    program = Program(archive, "", LAYOUT, f"{root_of(archive)}code", checkpoint.sections, homes)
    return replace(checkpoint, container=program)
