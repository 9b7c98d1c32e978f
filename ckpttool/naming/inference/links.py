"""What the pairs that are known say of the modules around them: which module of the left is which of the right.

Most pairs are known by their names, and most inferences ask about few modules: pairs are looked at when one is asked.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, product

from ckpttool.naming.inference.values import NUMBER, Pair, Template, template


class Stacks:
    """Repeated layers and whole trees. Grows with every pair; `known` are keys of the left -> keys of the right."""

    def __init__(self, known: Mapping[str, str]) -> None:
        self._known = known
        self._homes: tuple[defaultdict[Template, set[Template]], ...] = defaultdict(set), defaultdict(set)
        self._paired: set[tuple[Template, Template]] = set()

    def pair(self, mine: Template, theirs: Template) -> None:
        """Tensors of these names were found to be one, in some layer."""
        if (mine, theirs) in self._paired:
            return
        self._paired.add((mine, theirs))
        ours, others = _numbers(mine), _numbers(theirs)
        if len(ours) == len(others):
            for at, there in zip(ours, others):
                self.tree(mine[: at + 1], theirs[: there + 1])

    def tree(self, left: Template, right: Template) -> None:
        """All that is below `left` is below `right`, under the same names."""
        self._homes[0][left].add(right)
        self._homes[1][right].add(left)

    def contradict(self, left: Template, right: Template) -> bool:
        """Whether what is known of the modules on their way says that these two are not one tensor."""
        self._look()
        return _strays(left, right, self._homes[0]) or _strays(right, left, self._homes[1])

    def is_same(self, path: Template) -> bool:
        """Whether both sides have the module under this name."""
        self._look()
        return path in self._homes[0].get(path, ())

    def _look(self) -> None:
        """Takes in what is known by name; of a key of both sides all modules on its way are the same."""
        known, self._known = self._known, {}
        if not known:
            return
        for path in {template(mine)[0] for mine, theirs in known.items() if mine == theirs}:
            self.pair(path, path)
            for depth in range(1, len(path)):
                self.tree(path[:depth], path[:depth])
        for mine, theirs in known.items():
            if mine != theirs:
                self.pair(template(mine)[0], template(theirs)[0])


class Modules:
    """What holds a pair directly. `known` are keys of the left -> keys of the right, `pairs` grows with what is found,
    `left` and `right` shrink to what is open.

    Told apart are modules that held something open when the last step began: of others it does not ask.
    """

    def __init__(
        self, known: Mapping[str, str], pairs: Sequence[Pair], left: Iterable[str], right: Iterable[str]
    ) -> None:
        self._known, self._pairs, self._open = known, pairs, (left, right)
        self._homes: tuple[defaultdict[str, set[str]], ...] = defaultdict(set), defaultdict(set)
        self._near: tuple[set[str], set[str]] | None = None
        self._begun = self._seen = 0

    def begin(self) -> None:
        """A step begins."""
        self._near, self._begun = None, len(self._pairs)

    def share(self, left: str, right: str) -> bool:
        """Whether the modules that hold these two keys hold a pair already."""
        self._look()
        return _module(right) in self._homes[0].get(_module(left), ())

    def part(self, left: str, right: str) -> bool:
        """Whether a module that holds one of these two holds pairs already, with others than the other's."""
        shared = self.share(left, right)
        return not shared and (_module(left) in self._homes[0] or _module(right) in self._homes[1])

    def _look(self) -> None:
        """Takes in the pairs that are new."""
        if self._near is not None and self._seen == len(self._pairs):
            return
        if self._near is None:
            recent = self._pairs[self._begun :]
            taken = (key for pair in recent for key in pair.left), (key for pair in recent for key in pair.right)
            self._near = _modules(chain(self._open[0], taken[0])), _modules(chain(self._open[1], taken[1]))
        known, self._known = self._known, {}
        found, self._seen = self._pairs[self._seen :], len(self._pairs)
        for mine, theirs in chain(known.items(), _keys(found)):
            left, right = _module(mine), _module(theirs)
            if left in self._near[0]:
                self._homes[0][left].add(right)
            if right in self._near[1]:
                self._homes[1][right].add(left)


def _keys(pairs: Iterable[Pair]) -> Iterator[tuple[str, str]]:
    return ((left, right) for pair in pairs for left, right in product(pair.left, pair.right))


def _modules(keys: Iterable[str]) -> set[str]:
    return set(map(_module, keys))


def _strays(one: Template, other: Template, known: Mapping[Template, set[Template]]) -> bool:
    for depth in range(len(one)):
        homes = known.get(one[:depth])
        if homes and not any(other[: len(home)] == home for home in homes):
            return True
    return False


def _module(key: str) -> str:
    return key.rpartition(".")[0]


def _numbers(path: Template) -> list[int]:
    return [at for at, segment in enumerate(path) if segment == NUMBER]
