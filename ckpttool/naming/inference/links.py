"""What the pairs that are known say of the modules around them: which module of the left is which of the right."""

from __future__ import annotations

from collections import defaultdict

from ckpttool.naming.inference.values import NUMBER, Template, template

Map = defaultdict[Template, set[Template]]


class Links:
    """Grows with every pair. `stacks` are repeated layers and whole trees, `modules` what holds a pair directly."""

    def __init__(self) -> None:
        self._stacks: tuple[Map, Map] = defaultdict(set), defaultdict(set)
        self._paired: set[tuple[Template, Template]] = set()
        self._modules: tuple[defaultdict[str, set[str]], defaultdict[str, set[str]]] = (
            defaultdict(set),
            defaultdict(set),
        )

    def same_key(self, key: str) -> None:
        """A key of both sides: all modules on its way are the same."""
        path, _ = template(key)
        for depth in range(1, len(path)):
            self._stack(path[:depth], path[:depth])

    def pair(self, left: str, right: str) -> None:
        """Tensors that were found to be one."""
        self._modules[0][_module(left)].add(_module(right))
        self._modules[1][_module(right)].add(_module(left))
        mine, theirs = template(left)[0], template(right)[0]
        if (mine, theirs) in self._paired:  # the same of another layer
            return
        self._paired.add((mine, theirs))
        ours, others = _numbers(mine), _numbers(theirs)
        if len(ours) == len(others):
            for at, there in zip(ours, others):
                self._stack(mine[: at + 1], theirs[: there + 1])

    def tree(self, left: Template, right: Template) -> None:
        """All that is below `left` is below `right`, under the same names."""
        self._stack(left, right)

    def shares_module(self, left: str, right: str) -> bool:
        """Whether the modules that hold these two hold a pair already."""
        return _module(right) in self._modules[0].get(_module(left), ())

    def parts_modules(self, left: str, right: str) -> bool:
        """Whether a module that holds one of these two holds pairs already, with others than the other's."""
        known = self._modules[0].get(_module(left), ()), self._modules[1].get(_module(right), ())
        return any(known) and not self.shares_module(left, right)

    def contradict(self, left: Template, right: Template) -> bool:
        """Whether what is known of the modules on their way says that these two are not one tensor."""
        return _strays(left, right, self._stacks[0]) or _strays(right, left, self._stacks[1])

    def is_same(self, path: Template) -> bool:
        """Whether both sides have the module under this name."""
        return path in self._stacks[0].get(path, ())

    def _stack(self, left: Template, right: Template) -> None:
        self._stacks[0][left].add(right)
        self._stacks[1][right].add(left)


def _strays(one: Template, other: Template, known: Map) -> bool:
    for depth in range(len(one)):
        homes = known.get(one[:depth])
        if homes and not any(other[: len(home)] == home for home in homes):
            return True
    return False


def _module(key: str) -> str:
    return key.rpartition(".")[0]


def _numbers(path: Template) -> list[int]:
    return [at for at, segment in enumerate(path) if segment == NUMBER]
