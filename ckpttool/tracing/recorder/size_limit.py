"""How large an expression may grow while it is recorded: code that loops over a tensor makes it deep, doubling wide."""

from __future__ import annotations

from ckpttool.expression import Argument, Expression, Op
from ckpttool.tracing.recorder.memory import opaque

_DEEPEST = 100  # operators inside each other; everything that walks expressions recurses
_LARGEST = 20_000  # nodes, those that occur twice counted twice


class Bounds:
    """Remembers the size of every expression it has seen, so that each new one costs only its own arguments."""

    def __init__(self) -> None:
        self.known: dict[int, tuple[Op, int, int]] = {}

    def within(self, expression: Expression) -> Expression:
        """`expression`, or where it is too large what it was computed from."""
        if isinstance(expression, Op):
            size, depth = self._measure(expression)
            if size > _LARGEST or depth > _DEEPEST:
                return opaque(expression)
        return expression

    def _measure(self, node: Argument) -> tuple[int, int]:
        if isinstance(node, tuple):
            sizes = [self._measure(item) for item in node]
            return sum(size for size, _ in sizes), max((depth for _, depth in sizes), default=0)
        if not isinstance(node, Op):
            return 1, 0
        known = self.known.get(id(node))
        if known is None:
            parts = [self._measure(arg) for arg in (*node.args, *(value for _, value in node.kwargs))]
            size, depth = sum(size for size, _ in parts) + 1, max((depth for _, depth in parts), default=0) + 1
            known = self.known[id(node)] = (node, size, depth)  # holding the node keeps its id its own
        return known[1:]
