"""The tensors that have no partner yet, in groups and classes of groups, and how much may still be spent on them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import islice

from ckpttool.naming.inference import words
from ckpttool.naming.inference.values import Group, Tensor, groups

DEPTHS = (3, 2, 1, 0)  # layer numbers that are generalised: models have up to three
# What an inference may cost: a comparison of two groups `COST`, a step one for each tensor that is left. Real models
# need far less; thousands of tensors of one shape under unrelated names would take hours, and find nothing.
COST = 8
_MOST = 5_000_000
_MOST_EACH = 20  # more for each tensor

Class = tuple[list[Group], list[Group]]
Apart = Callable[[Group], Hashable]


class Enough(Exception):
    """The search has cost what it may."""


class Unpaired:
    """`left` and `right` are the tensors by their keys; who takes some out says that they have `changed`."""

    def __init__(self, left: Iterable[Tensor], right: Iterable[Tensor]) -> None:
        self.left = {tensor.key: tensor for tensor in left}
        self.right = {tensor.key: tensor for tensor in right}
        self._budget = _MOST + _MOST_EACH * (len(self.left) + len(self.right))
        self._grouped: dict[tuple[int, int | None], list[Group]] = {}

    def spend(self, cost: int) -> None:
        """Raises `Enough` where all has cost too much."""
        self._budget -= cost
        if self._budget < 0:
            raise Enough

    def changed(self) -> None:
        """Tensors were taken out."""
        self._grouped.clear()

    def groups(self, side: int, depth: int | None = None) -> list[Group]:
        """What is left of a side (0 or 1), as `values.groups` groups it."""
        if (side, depth) not in self._grouped:
            self._grouped[side, depth] = groups((self.left, self.right)[side].values(), depth)
        return self._grouped[side, depth]

    def classes(self, apart: Apart) -> Iterator[Class]:
        """Groups of both sides with tensors of one shape in the same layers, and alike in what keeps them `apart`."""
        for depth in DEPTHS:
            found: defaultdict[Hashable, Class] = defaultdict(lambda: ([], []))
            for side in (0, 1):
                for group in self.groups(side, depth):
                    found[group.signature, apart(group)][side].append(group)
            yield from ((a, b) for a, b in found.values() if a and b)


def kind(group: Group) -> str:
    """As `words.kind`."""
    return words.kind(group.template)


def certain(group: Group) -> str:
    """As `words.certain_part`."""
    return words.certain_part(group.template)


def only(
    lefts: Sequence[Group], rights: Sequence[Group], linked: Callable[[Group, Group], bool]
) -> Iterator[tuple[Group, Group]]:
    """Those that are linked with each other and no other; after a second link no third is looked for."""
    for left in lefts:
        hits = list(islice((right for right in rights if linked(left, right)), 2))
        if len(hits) == 1 and len(list(islice((one for one in lefts if linked(one, hits[0])), 2))) == 1:
            yield left, hits[0]
