"""Rank files of DTensors become an ordinary checkpoint: their meshes say what is a part, and what a copy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckpttool.checkpoint import Checkpoint, Section, TensorEntry
from ckpttool.errors import CkptError, Problem
from ckpttool.formats.ranks.parts import OF_ONE_STEP, is_held_alike, is_of_dtensors, is_whole, parts_of
from ckpttool.words import plural

_CARRIES = "torch_zip"  # rank 0's file, of which all that is no tensor is kept


def without_replicas(source: Checkpoint) -> Checkpoint:
    """`source` with every tensor that the ranks hold copies of as one, where DTensors tell that these are copies.

    The copies are read and compared. What an ordinary tensor is beside DTensors, every rank has: a buffer may differ
    (rank 0's is taken, and a note says so), a step or another part of an optimizer's state may not. Raises `CkptError`,
    all problems at once, where copies differ: the files are of two steps.
    """
    entries = [entry for section in source.sections for entry in section.tensors]
    if not any(map(is_of_dtensors, entries)):
        return source
    work = _Work()
    sections = tuple(work.section(section) for section in source.sections)
    if work.problems:
        raise CkptError(
            f"the files of {source.source} are not of one step: {plural(len(work.problems), 'difference')}",
            hint=OF_ONE_STEP,
            problems=work.problems,
        )
    notes = [f"{key} is carried as rank 0 has it" for key in source.others]
    return replace(source, format=_CARRIES, sections=sections, notes=(*source.notes, *work.notes, *notes))


class _Work:
    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self.notes: list[str] = []

    def section(self, section: Section) -> Section:
        where = f"{section.path}." if section.path else ""
        made = {id(entry): self._one(entry, section.kind, where) for entry in section.tensors}
        tensors = tuple(made[id(entry)] for entry in section.tensors)
        return replace(section, tensors=tensors, mapping=_with(section.mapping, made))

    def _one(self, entry: TensorEntry, kind: str, where: str) -> TensorEntry:
        if is_whole(entry):
            if not is_held_alike(entry):
                self.problems.append(Problem("its replicas differ between the ranks", where + entry.key))
            return replace(entry, payload=None)
        parts = parts_of(entry)
        have = [part for part in parts if part is not None]
        if len(have) < len(parts):
            self.problems.append(Problem("some ranks have it, and others do not", where + entry.key))
        elif not is_held_alike(entry):
            if kind == "optimizer" or len({part.shape for part in have}) > 1:
                self.problems.append(Problem("differs between the ranks", where + entry.key))
            else:
                self.notes.append(f"{where}{entry.key} differs between the ranks: rank 0's is taken")
        return replace(entry, payload=have[0].payload)


def _with(value: Any, made: Mapping[int, TensorEntry]) -> Any:
    """The optimizer's state dict with other entries, by the ids of those that it has."""
    if isinstance(value, TensorEntry):
        return made.get(id(value), value)
    if isinstance(value, Mapping):
        return {key: _with(item, made) for key, item in value.items()}
    return type(value)(_with(item, made) for item in value) if type(value) in (list, tuple) else value
