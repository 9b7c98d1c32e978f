"""Evidence in the order of tensors."""

from __future__ import annotations

import re
from collections.abc import (
    Sequence,
)
from functools import cached_property

from ckpttool.core.text import NUMBER as NUMBER_SEGMENT
from ckpttool.naming.evidence import SideTensors
from ckpttool.naming.templates import Group
from ckpttool.naming.vocabulary import kind_of


class Order:
    """The places of one side's tensors; computed when they are needed."""

    def __init__(self, side: SideTensors) -> None:
        self._side = side

    @cached_property
    def place(self) -> dict[str, int]:
        """Key -> its place."""
        return {tensor.key: at for at, tensor in enumerate(self._side.tensors)}

    @cached_property
    def _layers(self) -> dict[str, int]:
        """Module -> the place of the first layer below it."""
        # the text before the first number -> the place of the first key with it
        first: dict[str, int] = {}
        for key, at in self.place.items():
            number = NUMBER_SEGMENT.search(key)
            if number is not None:
                first.setdefault(key[: number.start()], at)
        layers: dict[str, int] = {}
        for text, at in first.items():
            segments = text.split(".")[:-1]
            for depth in range(len(segments)):
                layers.setdefault(".".join(segments[:depth]), at)
        return layers

    def is_meaningful(self, groups: Sequence[Group]) -> bool:
        """Return whether the file keeps the order, or the names differ in a number that grows:
        ``fc1``, ``fc2``.
        """
        if self._side.ordered:
            return True
        names = [re.split(r"(\d+|\.)", ".".join(group.template)) for group in groups]
        if len(set(map(len, names))) > 1:
            return False
        varying = [column for column in zip(*names) if len(set(column)) > 1]
        if len(varying) != 1 or not all(map(str.isdecimal, varying[0])):
            return False
        numbers = list(map(int, varying[0]))
        return numbers == sorted(numbers)

    def neighbors(self, group: Group) -> str:
        """Return whether a tensor outside of all layers is ``before`` or ``after`` them; empty if
        that is unknown.

        A state dict has a module's parameters before its children, so their order says nothing.
        """
        path = tuple(group.first.key.split("."))
        if not self._side.ordered or not kind_of(path) or any(map(str.isdecimal, path)):
            return ""
        for depth in range(len(path) - 1, -1, -1):
            first_layer = self._layers.get(".".join(path[:depth]))
            if first_layer is not None:
                return "before" if self.place[group.first.key] < first_layer else "after"
        return ""
