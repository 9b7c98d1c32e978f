"""The tensors that have no partner yet, in groups and classes of groups, and how much may still be spent on them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import islice

from ckpttool.naming.inference import words
from ckpttool.naming.inference.values import Group, Outlined, groups

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
    """`left` and `right` are the tensors by their keys; who takes some out says that they have `changed`. `count` is
    how many there are in all, with those that pair by their names; `place` is that of a key among all of its side.
    """

    def __init__(
        self, left: dict[str, Outlined], right: dict[str, Outlined], count: int, place: Callable[[int, str], int]
    ) -> None:
        self.left, self.right = left, right
        self._place = place
        self._budget = _MOST + _MOST_EACH * count
        self._whole: list[list[Group] | None] = [None, None]
        self._grouped: dict[tuple[int, int], list[tuple[Hashable, Group]]] = {}
        self._stale = [False, False]

    def spend(self, cost: int) -> None:
        """Raises `Enough` where all has cost too much."""
        self._budget -= cost
        if self._budget < 0:
            raise Enough

    def changed(self) -> None:
        """Tensors were taken out."""
        self._grouped.clear()
        self._stale = [True, True]

    def groups(self, side: int) -> list[Group]:
        """What is left of a side (0 or 1), as `values.groups` groups it."""
        found, open_ = self._whole[side], (self.left, self.right)[side]
        if found is None:
            found = groups(open_.values())
        elif self._stale[side]:
            found = self._in_order(side, filter(None, (group.among(open_) for group in found)))
        self._whole[side], self._stale[side] = found, False
        return found

    def at_depth(self, side: int, depth: int) -> list[tuple[Hashable, Group]]:
        """The same with the first `depth` layer numbers generalised only, each with its signature."""
        if (side, depth) not in self._grouped:
            found = self._in_order(side, (one for group in self.groups(side) for one in group.at_depth(depth)))
            self._grouped[side, depth] = [(group.signature, group) for group in found]
        return self._grouped[side, depth]

    def _in_order(self, side: int, found: Iterable[Group]) -> list[Group]:
        groups = list(found)
        return groups if len(groups) < 2 else sorted(groups, key=lambda one: self._place(side, one.first.key))

    def classes(self, apart: Apart) -> Iterator[Class]:
        """Groups of both sides with tensors of one shape in the same layers, and alike in what keeps them `apart`."""
        for depth in DEPTHS:
            found: dict[Hashable, Class] = {}
            for signature, group in self.at_depth(0, depth):
                found.setdefault((signature, apart(group)), ([], []))[0].append(group)
            for signature, group in self.at_depth(1, depth) if found else ():
                own = found.get((signature, apart(group)))
                if own is not None:
                    own[1].append(group)
            yield from ((a, b) for a, b in found.values() if b)


def kind(group: Group) -> str:
    """As `words.kind`."""
    return words.kind(group.path)


def certain(group: Group) -> str:
    """As `words.certain_part`."""
    return words.certain_part(group.path)


def part(group: Group) -> str:
    """As `words.part`."""
    return words.part(group.path)


def only(
    lefts: Sequence[Group], rights: Sequence[Group], linked: Callable[[Group, Group], bool]
) -> Iterator[tuple[Group, Group]]:
    """Those that are linked with each other and no other; after a second link no third is looked for."""
    for left in lefts:
        hits = list(islice((right for right in rights if linked(left, right)), 2))
        if len(hits) == 1 and len(list(islice((one for one in lefts if linked(one, hits[0])), 2))) == 1:
            yield left, hits[0]
