"""The same tree of names below other modules: how well two prefixes explain the keys of two sides."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ckpttool.naming.inference.values import Group, Outlined, Template

_LONGEST_PREFIX = 6  # segments that a tree may hang below


def inserted(one: Template, other: Template) -> str:
    """The segment that the longer of two names has and the shorter has not; empty where they differ by more."""
    short, long = sorted((one, other), key=len)
    if len(long) - len(short) != 1:
        return ""
    return next((part for at, part in enumerate(long) if long[:at] + long[at + 1 :] == short), "")


def fit(left: Outlined, right: Outlined) -> bool:
    """Whether the two have one shape, or one that is the other's transposed."""
    return left.shape == right.shape or (len(left.shape) == 2 and left.shape == right.shape[::-1])


def hanging(lefts: Sequence[Group], rights: Sequence[Group]) -> Iterator[tuple[Template, Template, Group, Group]]:
    """Two prefixes, and two groups that have one name but for these; below two modules that is more than a segment."""
    asked = {rest for group in lefts for _, rest in _split(group.path) if rest[1:] or rest == group.path}
    below: dict[Template, list[tuple[Template, Group]]] = {}
    for group in rights:
        for prefix, rest in _split(group.path):
            if rest in asked:
                below.setdefault(rest, []).append((prefix, group))
    alone = {group.path: [((), group)] for group in rights if not group.path[1:]}
    for mine in lefts:
        for own, rest in _split(mine.path):
            for prefix, theirs in (below if rest[1:] or not own else alone).get(rest, ()):
                yield own, prefix, mine, theirs


def _split(path: Template) -> Iterator[tuple[Template, Template]]:
    """What a tree may hang below, and the rest of the name."""
    return ((path[:depth], path[depth:]) for depth in range(min(len(path), _LONGEST_PREFIX)))


class Trees:
    """Two prefixes -> the groups below them that have one name but for these."""

    def __init__(self) -> None:
        self.found: dict[tuple[Template, Template], list[tuple[Group, Group]]] = {}
        self._likes: dict[tuple[Group, Group], int] = {}

    def add(self, left: Template, right: Template, mine: Group, theirs: Group) -> None:
        """Two groups that have one name below these prefixes."""
        self.found.setdefault((left, right), []).append((mine, theirs))

    def best(self) -> tuple[Template, Template] | None:
        """The prefixes that explain most tensors, of those the shortest; None where others do so as well."""
        count = {at: sum(map(self._like, own)) for at, own in self.found.items()}
        ranked = sorted(count, key=lambda at: (-count[at], len(at[0]) + len(at[1])))
        if not ranked or not count[ranked[0]]:
            return None
        ties = len(ranked) > 1 and count[ranked[0]] == count[ranked[1]] and self._tie(*ranked[:2])
        return None if ties else ranked[0]

    def _like(self, two: tuple[Group, Group]) -> int:
        """How many tensors of the one, layer by layer, have a like in the other."""
        if two not in self._likes:
            mine, theirs = (group.members for group in two)
            self._likes[two] = sum(at in theirs and fit(one, theirs[at]) for at, one in mine.items())
        return self._likes[two]

    def _tie(self, best: tuple[Template, Template], second: tuple[Template, Template]) -> bool:
        """Whether two explanations, one as short as the other, are about some tensors that are the same."""
        sides = ({(side, pair[side].path) for pair in self.found[at] for side in (0, 1)} for at in (best, second))
        return sum(map(len, best)) == sum(map(len, second)) and bool(set.intersection(*sides))
