"""Evidence in the modules around tensors: trees that have other names, and homes of names."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import (
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from functools import cached_property
from itertools import chain, product

from ckpttool.naming.evidence import Pair
from ckpttool.naming.shapes import fit
from ckpttool.naming.templates import Group, Template, number_places, template

_LONGEST_PREFIX = 6  # segments of a prefix
Prefixes = tuple[Template, Template]


def common_trees(
    lefts: Sequence[Group], rights: Sequence[Group]
) -> Iterator[tuple[Prefixes, Group, Group]]:
    """Yield two prefixes, and two groups with one name below them. Below two modules, one segment
    is not enough.

    ``encoder.layers.#.w`` and ``net.layers.#.w`` have the prefixes `encoder` and `net`, and also
    the longer `encoder.layers` and `net.layers`.
    """
    rests = set()  # the names of the left below each of their prefixes
    for left in lefts:
        for _, rest in _splits(left.path):
            if len(rest) > 1 or rest == left.path:
                rests.add(rest)
    below: dict[Template, list[tuple[Template, Group]]] = {}
    at_root: dict[Template, list[tuple[Template, Group]]] = {}
    for right in rights:
        if len(right.path) == 1:
            at_root[right.path] = [((), right)]
        for prefix, rest in _splits(right.path):
            if rest in rests:
                below.setdefault(rest, []).append((prefix, right))
    for left in lefts:
        for left_prefix, rest in _splits(left.path):
            is_enough = len(rest) > 1 or not left_prefix
            matches = (below if is_enough else at_root).get(rest, ())
            for right_prefix, right in matches:
                yield (left_prefix, right_prefix), left, right


def _splits(path: Template) -> Iterator[tuple[Template, Template]]:
    """Yield each prefix of the path with the rest below it."""
    for depth in range(min(len(path), _LONGEST_PREFIX)):
        yield path[:depth], path[depth:]


def best_tree(trees: Mapping[Prefixes, Sequence[tuple[Group, Group]]]) -> Prefixes | None:
    """Return the prefixes that explain most tensors, the shortest of these; None if others explain
    as many.
    """
    fits: dict[tuple[Group, Group], int] = {}
    ranks: dict[Prefixes, tuple[int, int]] = {}  # the best tree has the smallest
    for prefixes, pairs in trees.items():
        count = 0
        for pair in pairs:
            if pair not in fits:
                fits[pair] = _count_fitting(*pair)
            count += fits[pair]
        if count:
            left, right = prefixes
            ranks[prefixes] = -count, len(left) + len(right)
    if not ranks:
        return None
    first, *others = sorted(ranks, key=ranks.__getitem__)
    if others and ranks[first] == ranks[others[0]] and _overlap(trees[first], trees[others[0]]):
        return None
    return first


def _count_fitting(left: Group, right: Group) -> int:
    """Return in how many layers the tensors of the two groups have one shape, perhaps
    transposed.
    """
    count = 0
    for numbers, tensor in left.members.items():
        other = right.members.get(numbers)
        if other is not None and fit(tensor, other):
            count += 1
    return count


def _overlap(pairs: Sequence[tuple[Group, Group]], others: Sequence[tuple[Group, Group]]) -> bool:
    """Return whether the two trees explain a tensor of the same side."""
    paths: set[tuple[int, Template]] = set()
    for left, right in pairs:
        paths |= {(0, left.path), (1, right.path)}
    for left, right in others:
        if (0, left.path) in paths or (1, right.path) in paths:
            return True
    return False


class Paths:
    """What pairs say about the modules above them: stacks of layers, and whole trees."""

    def __init__(self, same_keys: Mapping[str, str]) -> None:
        # of each side: module -> the modules of the other side that are its place there
        self._homes: tuple[defaultdict[Template, set[Template]], ...]
        self._homes = defaultdict(set), defaultdict(set)
        self._paired: set[tuple[Template, Template]] = set()
        self._modules: defaultdict[Template, set[Template]] = defaultdict(set)  # of pairs
        # answers since the last new tree
        self._contradictions: dict[tuple[Template, Template], bool] = {}
        for left, right in same_keys.items():
            path, _ = template(left)
            if left != right:
                self.pair(path, template(right)[0])
            # all modules above a key of both sides are the same
            elif (path, path) not in self._paired:
                self.pair(path, path)
                for depth in range(1, len(path)):
                    self.tree(path[:depth], path[:depth])

    def pair(self, left: Template, right: Template) -> None:
        """Add a pair of tensors, in some layer."""
        if (left, right) in self._paired:
            return
        self._paired.add((left, right))
        self._modules[left[:-1]].add(right[:-1])
        left_places, right_places = number_places(left), number_places(right)
        if len(left_places) == len(right_places):
            for left_place, right_place in zip(left_places, right_places):
                self.tree(left[: left_place + 1], right[: right_place + 1])

    def tree(self, left: Template, right: Template) -> None:
        """Add a pair of modules: the same names are below both."""
        if right not in self._homes[0][left]:
            self._homes[0][left].add(right)
            self._homes[1][right].add(left)
            self._contradictions.clear()

    def homes(self, path: Template, side: int) -> Collection[Template]:
        """Return what `Modules.homes` returns, of a name and modules without any layer number."""
        return self._modules.get(path[:-1], ()) if side == 0 else (path[:-1],)

    def contradict(self, left: Template, right: Template) -> bool:
        """Return whether the modules above these two are known to be others."""
        answer = self._contradictions.get((left, right))
        if answer is None:
            answer = _strays(left, right, self._homes[0]) or _strays(right, left, self._homes[1])
            self._contradictions[left, right] = answer
        return answer

    def is_same(self, path: Template) -> bool:
        """Return whether both sides have the module under this name."""
        return path in self._homes[0].get(path, ())


def _strays(path: Template, other: Template, homes: Mapping[Template, set[Template]]) -> bool:
    """Return whether a module above `path` has known places on the other side, none of which is
    above `other`.
    """
    for depth in range(len(path)):
        places = homes.get(path[:depth])
        if places and not any(other[: len(place)] == place for place in places):
            return True
    return False


class Modules:
    """Which modules hold the two tensors of a pair. Only modules of tensors that are still open are
    looked at.

    Pairs are taken in at the first question: most diffs ask none, and these tables are large.
    """

    def __init__(
        self, same_keys: Mapping[str, str], left: Collection[str], right: Collection[str]
    ) -> None:
        self._open = left, right
        # keys of pairs that are not in `_homes` yet
        self._new: list[Iterable[tuple[str, str]]] = [same_keys.items()] if same_keys else []
        self._homes: tuple[defaultdict[str, set[str]], ...] = defaultdict(set), defaultdict(set)

    def add(self, pairs: Iterable[Pair]) -> None:
        """Add pairs of tensors."""
        for pair in pairs:
            self._new.append(product(pair.left, pair.right))

    def homes(self, key: str, side: int) -> Collection[str]:
        """Return the modules of the right that hold a pair with this key's module; of a key of the
        right its own.
        """
        self._take_in()
        return self._homes[0].get(_module(key), ()) if side == 0 else (_module(key),)

    def part(self, left: str, right: str) -> bool:
        """Return whether the module of one of these two holds a pair, but with another module."""
        homes = self.homes(left, 0)
        return bool(homes or _module(right) in self._homes[1]) and _module(right) not in homes

    @cached_property
    def _near(self) -> tuple[set[str], set[str]]:
        left, right = self._open
        return {_module(key) for key in left}, {_module(key) for key in right}

    def _take_in(self) -> None:
        if not self._new:
            return
        left_modules, right_modules = self._near
        for left_key, right_key in chain.from_iterable(self._new):
            left, right = _module(left_key), _module(right_key)
            if left in left_modules:
                self._homes[0][left].add(right)
            if right in right_modules:
                self._homes[1][right].add(left)
        self._new.clear()


def _module(key: str) -> str:
    return key.rpartition(".")[0]
