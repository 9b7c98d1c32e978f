"""The API for a package that adds a format: see examples/plugin.

Its entry point in the group ``ckpttool.formats`` is a `Format`, whose `matches` takes a `Look`, and
whose module reads files as a `Checkpoint` of `Section` and `TensorEntry`. The bytes of a tensor are
a `Storage`: a `Span` of a file, or `Lazy`, if they are computed when they are read. Errors are a
`CkptError` with a `Problem` for each place. `read_archive` lists the records of a zip archive,
`read_span` reads bytes, also behind a URL.
"""

from __future__ import annotations

from ckpttool.containers.zip_read import Archive, Record, read_archive
from ckpttool.core.checkpoint import (
    Checkpoint,
    ExtraEntry,
    Lazy,
    Section,
    Span,
    Storage,
    TensorEntry,
)
from ckpttool.core.errors import CkptError, Problem, Refused
from ckpttool.formats.look import Look
from ckpttool.formats.protocol import Format, Holds
from ckpttool.io.files import opened
from ckpttool.io.pieces import Edited, Files, Piece, Pieces, read_span

__all__ = [
    "Archive",
    "Checkpoint",
    "CkptError",
    "Edited",
    "ExtraEntry",
    "Files",
    "Format",
    "Holds",
    "Lazy",
    "Look",
    "Piece",
    "Pieces",
    "Problem",
    "Record",
    "Refused",
    "Section",
    "Span",
    "Storage",
    "TensorEntry",
    "opened",
    "read_archive",
    "read_span",
]
