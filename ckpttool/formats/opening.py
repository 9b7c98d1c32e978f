"""Open any path as a checkpoint, and look into the pickles of other files."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from ckpttool.containers.pickle_read import Origin, collected, loads, note_unreadable
from ckpttool.core.checkpoint import Checkpoint, Span
from ckpttool.core.errors import CkptError
from ckpttool.core.limits import limits, one_reading
from ckpttool.core.pickle_imports import DANGEROUS, UNREADABLE, Import, in_order
from ckpttool.core.text import Info, Note
from ckpttool.formats.folders import (
    DCP_METADATA,
    left_unread,
    pickle_files,
    pickles_below,
    state_files,
)
from ckpttool.formats.registry import recognize
from ckpttool.formats.remarks import remarks
from ckpttool.io import files, handles, paths, sources
from ckpttool.io.files import opened
from ckpttool.io.paths import join

_MOST_PICKLES = 1000  # one after the other in a file that torch.save did not write


def open_checkpoint(path: str) -> Checkpoint:
    """Return the index of the file or folder at `path`. Raises `CkptError` if it cannot be read as
    a checkpoint.
    """
    files.forget_and_check(path)
    look = sources.begin_look()
    with handles.kept(), one_reading(), collected() as imports:
        checkpoint = _open(path)
    opened: Mapping[str, object] = {}
    if paths.is_url(path):
        opened = files.known_states(_data_files(checkpoint))
    else:
        opened = sources.opened_since(look)
    notes = (*checkpoint.notes, *remarks(checkpoint), *not_looked_into(imports))
    return replace(checkpoint, notes=notes, files=opened, imports=in_order(imports))


def _data_files(checkpoint: Checkpoint) -> set[str]:
    """Return the paths of the files with bytes of tensors."""
    data_paths = set()
    for section in checkpoint.sections:
        for entry in section.tensors:
            data = None if entry.storage is None else entry.storage.data
            if isinstance(data, Span):
                data_paths.add(data.path)
    return data_paths


def not_looked_into(imports: Iterable[Import]) -> Iterator[Note]:
    """Yield a note on each pickle that could not be read."""
    for imported in imports:
        if imported.name == UNREADABLE:
            place = imported.member or imported.file
            yield Note(f"not looked into: {place}: {imported.reason}", "unknown-import")


def _open(path: str) -> Checkpoint:
    if paths.name(path) == DCP_METADATA:
        path = paths.parent(path)
    checkpoint = recognize(path).read()
    if not files.is_dir(path):
        return checkpoint
    others = files_next_to(checkpoint, path)
    notes = (*checkpoint.notes, *left_unread(path, checkpoint.source), *note_on(others))
    return replace(checkpoint, source=path, notes=notes)


def files_next_to(checkpoint: Checkpoint, path: str) -> tuple[str, ...]:
    """Return the names of the files for resuming in the folder at `path`, which are not read;
    nothing if it is not a folder.
    """
    if files.is_glob(path) or not files.is_dir(path):
        return ()
    return checkpoint.other_files or state_files(path)


def note_on(names: Sequence[str]) -> tuple[str, ...]:
    if not names:
        return ()
    text = f"{', '.join(names)}: other files in the folder, copied if the output is a folder too"
    return (Info(text, "reader"),)


def unsafe_in_folder(
    path: str, checkpoint: Checkpoint, *, below: bool = False
) -> tuple[Import, ...]:
    """Return what `unsafe_in` finds in the files of the folder `path` that were not opened when the
    checkpoint in it was read; with `below` also in its subfolders, and in files of any name.
    """
    if files.is_glob(path) or not files.is_dir(path):
        return ()
    read = {*checkpoint.files, *map(os.path.realpath, checkpoint.files)}
    if below:
        unread = [*pickles_below(path)]
    else:
        unread = [join(path, name) for name in pickle_files(path)]
    return unsafe_in(file for file in unread if read.isdisjoint((file, os.path.realpath(file))))


def unsafe_in(pickle_paths: Iterable[str]) -> tuple[Import, ...]:
    """Return the dangerous imports in the pickles of these files, and pickles that cannot be
    read.
    """
    with one_reading(), collected() as imports:
        for path in pickle_paths:
            try:
                recognize(path).read()
            except CkptError:  # a pickle that torch.save did not write, if it is one
                _look_into_pickles(path)
    dangerous = []
    for imported in imports:
        if imported.verdict == DANGEROUS or imported.name == UNREADABLE:
            dangerous.append(imported)
    return in_order(dangerous)


def _look_into_pickles(path: str) -> None:
    """Note the imports of a file of pickles, one after the other."""
    nbytes = files.size(path)
    with opened(path) as file:
        data = bytes(file.read(min(nbytes, limits().pickle_bytes)))
    origin = Origin(path, nbytes, end=len(data))
    try:
        end = loads(data, origin=origin).end
        for _ in range(_MOST_PICKLES):
            if end == nbytes:
                return
            end = loads(data, end, origin=origin).end
        raise CkptError(f"{path} holds more than {_MOST_PICKLES} pickles", hint="")
    except CkptError as error:
        note_unreadable(origin, error)
