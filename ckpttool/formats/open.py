"""From a path to its checkpoint: a file is recognised by its content, a folder by its files."""

from __future__ import annotations

from dataclasses import replace

from ckpttool.checkpoint import Checkpoint, Span
from ckpttool.formats.containers.pickle_tree import collected
from ckpttool.formats.remarks import remarks
from ckpttool.formats.table import FORMATS
from ckpttool.imports import in_order
from ckpttool.io import files, paths, sources
from ckpttool.limits import one_reading


def open_checkpoint(path: str) -> Checkpoint:
    """The index of the file or folder at `path`. Raises `CkptError` where it is no checkpoint that can be read."""
    files.look_anew(path)
    look = sources.begin_look()
    with one_reading(), collected() as imports:
        checkpoint = _open(path)
    opened = files.opened_at(_urls(checkpoint)) if paths.is_url(path) else sources.opened_since(look)
    notes = (*checkpoint.notes, *remarks(checkpoint))
    return replace(checkpoint, notes=notes, files=opened, imports=in_order(imports))


def _urls(checkpoint: Checkpoint) -> set[str]:
    """The URLs that tensors lie behind."""
    entries = (entry for section in checkpoint.sections for entry in section.tensors)
    found = (entry.storage.data for entry in entries if entry.storage is not None)
    return {data.path for data in found if isinstance(data, Span)}


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
