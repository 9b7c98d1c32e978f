"""Tables that many modules build from tensors, keys and sections."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import replace
from typing import Protocol, TypeVar

from ckpttool.core.checkpoint import Checkpoint, Section, TensorEntry
from ckpttool.core.expression import Expression
from ckpttool.core.names import RuntimeTensor, SerializedKey
from ckpttool.core.plan import ModuleRename
from ckpttool.core.strides import Shape


class Keyed(Protocol):
    """A tensor, a saved key, an output or another value with a key."""

    @property
    def key(self) -> str:
        """Its key."""


Entry = TypeVar("Entry", bound=Keyed)
Name = TypeVar("Name", bound=Hashable)
Target = TypeVar("Target", bound=Hashable)
Value = TypeVar("Value")


def by_key(entries: Iterable[Entry]) -> dict[str, Entry]:
    """Return the entries by key; the last one of several with the same key."""
    return {entry.key: entry for entry in entries}


def inverse(names: Mapping[Name, Target]) -> dict[Target, Name]:
    """Return the name of each target; the last one of several names."""
    return {target: name for name, target in names.items()}


def positions(names: Iterable[Name]) -> dict[Name, int]:
    """Return the position of each name, from 0 on."""
    return {name: position for position, name in enumerate(names)}


def present(values: Iterable[Value | None]) -> list[Value]:
    """Return the values that are not None."""
    return [value for value in values if value is not None]


def selected(table: Mapping[Name, Value], names: Iterable[Name]) -> dict[Name, Value]:
    """Return the rows of the table with these names, in the order of the names."""
    return {name: table[name] for name in names if name in table}


def owners(members: Mapping[Name, Iterable[Target]]) -> dict[Target, Name]:
    """Return under which name each member is listed."""
    owner: dict[Target, Name] = {}
    for name, several in members.items():
        owner.update(dict.fromkeys(several, name))
    return owner


def sources_of(serialized: Iterable[SerializedKey]) -> dict[str, Expression | None]:
    """Return the expression of each key over runtime tensors."""
    return {key.key: key.source for key in serialized}


def first_names(runtime: Iterable[RuntimeTensor]) -> list[str]:
    """Return the first FQN of each tensor."""
    return [tensor.fqn for tensor in runtime if tensor.alias_of is None]


def shapes_of(
    tensors: Iterable[SerializedKey | TensorEntry],
) -> dict[str, Shape | None]:
    """Return the shape of each tensor by its key."""
    return {tensor.key: tensor.shape for tensor in tensors}


def without_tensors(section: Section, keys: Collection[str]) -> Section:
    """Return the section without the tensors of these keys."""
    tensors = tuple(entry for entry in section.tensors if entry.key not in keys)
    return replace(section, tensors=tensors)


def by_path(sections: Iterable[Section]) -> dict[str, Section]:
    """Return the sections by path."""
    return {section.path: section for section in sections}


def new_paths(renames: Iterable[ModuleRename]) -> dict[str, str]:
    """Return the new path of each renamed module of a section."""
    return {rename.old: rename.new for rename in renames}


def with_sections(checkpoint: Checkpoint, changed: Mapping[str, Section]) -> Checkpoint:
    """Return the checkpoint with these sections, by path, in place of the old ones."""
    sections = tuple(changed.get(section.path, section) for section in checkpoint.sections)
    return replace(checkpoint, sections=sections)
