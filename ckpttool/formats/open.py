"""From a path to its checkpoint: a file is recognised by its content, a folder by its files."""

from __future__ import annotations

from dataclasses import replace

from ckpttool.checkpoint import Checkpoint
from ckpttool.formats.remarks import remarks
from ckpttool.formats.table import FORMATS
from ckpttool.io import files, paths, sources


def open_checkpoint(path: str) -> Checkpoint:
    """The index of the file or folder at `path`. Raises `CkptError` where it is no checkpoint that can be read."""
    files.look_anew(path)
    look = sources.begin_look()
    checkpoint = _open(path)
    opened = sources.opened_since(look)
    return replace(checkpoint, notes=(*checkpoint.notes, *remarks(checkpoint)), files=opened)


def _open(path: str) -> Checkpoint:
    from ckpttool.formats.recognise_file import sniff
    from ckpttool.formats.recognise_folder import DCP_METADATA, locate, states_beside

    if files.is_glob(path):
        return FORMATS["rank_files"].read(path)
    if paths.name(path) == DCP_METADATA:
        path = paths.parent(path)
    if not files.is_dir(path):
        return FORMATS[sniff(path)].read(path)
    found = locate(path)
    checkpoint = FORMATS[found.format].read(found.path)
    beside = checkpoint.beside or states_beside(path)
    said = (f"{', '.join(beside)}: beside it, carried from folder to folder",) if beside else ()
    return replace(checkpoint, source=path, notes=(*checkpoint.notes, *said))
