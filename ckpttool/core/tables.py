"""Tables and sums that many modules build from tensors, keys and other entries."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Protocol, TypeVar


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
