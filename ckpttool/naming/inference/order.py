"""What the order of a file's keys tells, where it is the order in which the model defines its modules."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property

from ckpttool.keys import NUMBER
from ckpttool.naming.inference import words
from ckpttool.naming.inference.values import Group, Side, Template


class Order:
    """The places of one side's tensors; looked up when one is asked for."""

    def __init__(self, side: Side) -> None:
        self._side = side

    @cached_property
    def place(self) -> dict[str, int]:
        """Key -> its place."""
        return {tensor.key: at for at, tensor in enumerate(self._side.tensors)}

    @cached_property
    def _layers(self) -> dict[str, int]:
        """Module -> the place of the first layer below it."""
        first: dict[str, int] = {}  # what stands before the first number -> the place of the first key that has it
        for key, at in self.place.items():
            number = NUMBER.search(key)
            if number is not None:
                first.setdefault(key[: number.start()], at)
        found: dict[str, int] = {}
        for way, at in first.items():
            segments = way.split(".")[:-1]
            for depth in range(len(segments)):
                found.setdefault(".".join(segments[:depth]), at)
        return found

    def tells(self, groups: Sequence[Group]) -> bool:
        """Whether the order of the groups says anything: the file keeps it, or numbers in their names do."""
        return self._side.ordered or _numbered([group.template for group in groups])

    def beside_layers(self, group: Group) -> str:
        """Whether a module outside of all layers is defined ``before`` or ``after`` them; empty where nobody knows.

        Parameters of a module's own come first in a state dict, wherever they are used: their order says nothing.
        """
        path = tuple(group.first.key.split("."))
        if not self._side.ordered or not words.kind(path) or any(segment.isdecimal() for segment in path):
            return ""
        homes = (".".join(path[:depth]) for depth in range(len(path) - 1, -1, -1))
        layers = next((self._layers[home] for home in homes if home in self._layers), None)
        if layers is None:
            return ""
        return "before" if self.place[group.first.key] < layers else "after"


def _numbered(templates: Sequence[Template]) -> bool:
    """Whether the names differ in nothing but numbers that grow: ``fc1``, ``fc2``; ``0``, ``2``."""
    split = [[part for segment in path for part in _digits(segment)] for path in templates]
    if len({len(parts) for parts in split}) > 1:
        return False
    varying = [column for column in zip(*split) if len(set(column)) > 1]
    return (
        len(varying) == 1
        and all(part.isdecimal() for part in varying[0])
        and list(map(int, varying[0])) == sorted(map(int, varying[0]))
    )


def _digits(segment: str) -> list[str]:
    return [*re.split(r"(\d+)", segment), "."]
