"""Simplify expressions that only move elements: a value that was split and joined again is the
value itself.

Every rule keeps the value exactly, bit for bit; an expression that no rule fits is unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain

import torch

from ckpttool.core.errors import CkptError
from ckpttool.core.expression import Argument, Expression, Op, Ref, Special
from ckpttool.core.strides import Shape
from ckpttool.evaluate.ops import OPS
from ckpttool.evaluate.torch_eval import evaluate

_CAT, _SLICE = "aten.cat.default", "aten.slice.Tensor"
_PERMUTE, _RESHAPE = "aten.permute.default", "aten.reshape.default"
_COPY = "aten._to_copy.default"
# Each dtype with others that hold all of its values: a cast there and back changes nothing.
_LOSSLESS: Mapping[str, tuple[str, ...]] = {
    "float16": ("float32", "float64"), "bfloat16": ("float32", "float64"), "float32": ("float64",),
    "float8_e4m3fn": ("float16", "bfloat16", "float32", "float64"),
    "float8_e5m2": ("float16", "bfloat16", "float32", "float64"),
    "bool": (
        "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64",
    ),
    "uint8": ("int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"),
    "int8": ("int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"),
    "int16": ("int32", "int64", "float32", "float64"), "int32": ("int64", "float64"),
}  # fmt: skip


class Simplifier:
    """Simplify expressions over tensors with the shapes and dtypes of `leaves` (meta tensors by
    key).
    """

    def __init__(self, leaves: Mapping[str, torch.Tensor]) -> None:
        self.leaves = leaves
        self.metas: dict[Expression, torch.Tensor] = {}

    def simplify(self, node: Argument) -> Argument:
        if isinstance(node, tuple):
            return tuple(self.simplify(item) for item in node)
        if not isinstance(node, Op):
            return node
        node = Op(node.op, tuple(self.simplify(arg) for arg in node.args), node.kwargs)
        try:
            return self._apply(node)
        except (CkptError, LookupError, TypeError, ValueError):
            return node  # the rules do not know this form

    def meta(self, node: Argument) -> torch.Tensor:
        """Return a tensor without data of the node's shape and dtype."""
        if not isinstance(node, (Ref, Op)):
            raise TypeError(f"not a tensor: {node!r}")
        if isinstance(node, Ref):
            return self.leaves[node.key]
        if node not in self.metas:
            self.metas[node] = evaluate(node, self.leaves.__getitem__)
        return self.metas[node]

    def shape(self, node: Argument) -> Shape:
        return tuple(self.meta(node).shape)

    def _apply(self, node: Op) -> Argument:
        source, effect = node.args[0], OPS[node.op].effect
        if effect == "same":
            return source
        if effect == "permute":
            return self._permute(source, self._order(node))
        if effect == "reshape":
            return self._reshape(source, self.shape(node))
        if effect == "undo":
            return self._undone(node)
        rule = _RULES.get(node.op)
        return node if rule is None else rule(self, node)

    def _undone(self, node: Op) -> Argument:
        """Return the value itself if the same operator, applied twice, changes nothing."""
        source = node.args[0]
        if not isinstance(source, Op) or source.op != node.op or source.args[1:] != node.args[1:]:
            return node
        return source.args[0]

    def _expanded(self, node: Op) -> Argument:
        source = node.args[0]
        return source if self.shape(node) == self.shape(source) else node

    def _sliced(self, node: Op) -> Argument:
        if len(node.args) != 4:
            return node
        source, dim = node.args[0], self._dim(node, 1, node.args[0])
        bounds = slice(_int(node.args[2]), _int(node.args[3]))
        start, end, _ = bounds.indices(self.shape(source)[dim])
        return self._slice(source, dim, start, end)

    def _selected(self, node: Op) -> Argument:
        source = node.args[0]
        return self._select(source, self._dim(node, 1, source), _int(node.args[2]))

    def _joined(self, node: Op) -> Argument:
        parts = _tuple(node.args[0])
        return self._cat(list(parts), self._dim(node, 1, parts[0]))

    def _stacked(self, node: Op) -> Argument:
        parts = _tuple(node.args[0])
        rank = len(self.shape(parts[0])) + 1
        dim = _int(node.args[1]) % rank if len(node.args) > 1 else 0
        return self._cat([self._slab(part, dim) for part in parts], dim)

    def _slab(self, source: Argument, dim: int) -> Argument:
        """Return the value with a dimension of size 1 at `dim`."""
        shape = self.shape(source)
        return self._reshape(source, (*shape[:dim], 1, *shape[dim:]))

    def _getitem(self, node: Op) -> Argument:
        whole, index = node.args[0], _int(node.args[1])
        if not isinstance(whole, Op):
            return node
        source = whole.args[0]
        if whole.op == "aten.unbind.int":
            return self._select(source, self._dim(whole, 1, source), index)
        if whole.op not in ("aten.split.Tensor", "aten.split_with_sizes.default"):
            return node
        dim, sizes = self._dim(whole, 2, source), whole.args[1]
        if isinstance(sizes, tuple):
            start = sum(map(_int, sizes[:index]))
            return self._slice(source, dim, start, start + _int(sizes[index]))
        start, length = index * _int(sizes), self.shape(source)[dim]
        return self._slice(source, dim, start, min(start + _int(sizes), length))

    def _slice(self, source: Argument, dim: int, start: int, end: int) -> Argument:
        if (start, end) == (0, self.shape(source)[dim]):
            return source
        if start >= end:  # empty
            return Op(_SLICE, (source, dim, start, end))
        inner, offset, _ = self._extent(source, dim)
        if inner is not source:
            return self._slice(inner, dim, offset + start, offset + end)
        parts = self._cat_parts(source, dim)
        if len(parts) == 1:
            return Op(_SLICE, (source, dim, start, end))
        kept, begin = [], 0
        for part in parts:
            size = self.shape(part)[dim]
            low, high = max(start - begin, 0), min(end - begin, size)
            if low < high:
                kept.append(self._slice(part, dim, low, high))
            begin += size
        return self._cat(kept, dim)

    def _cat(self, parts: list[Argument], dim: int) -> Argument:
        """Join the parts; adjacent slices of one value become one slice: ``x[:2], x[2:5]`` is
        ``x[:5]``.
        """
        joined: list[Argument] = []
        for part in chain.from_iterable(self._cat_parts(outer, dim) for outer in parts):
            source, start, end = self._extent(part, dim)
            if joined:
                last_source, first, last_end = self._extent(joined[-1], dim)
                if last_source == source and last_end == start:
                    joined[-1] = self._slice(source, dim, first, end)
                    continue
            joined.append(part)
        return joined[0] if len(joined) == 1 else Op(_CAT, (tuple(joined), dim))

    def _cat_parts(self, node: Argument, dim: int) -> tuple[Argument, ...]:
        if not isinstance(node, Op) or node.op != _CAT:
            return (node,)
        parts = _tuple(node.args[0])
        if self._dim(node, 1, parts[0]) != dim or len(set(map(self._dtype, parts))) > 1:
            return (node,)  # with several dtypes, some parts are cast
        return parts

    def _extent(self, node: Argument, dim: int) -> tuple[Argument, int, int]:
        """Return the value that the node is a slice of along `dim`, perhaps itself, and the slice's
        start and end.
        """
        if isinstance(node, Op) and node.op == _SLICE and len(node.args) == 4:
            source, of_dim, start, end = node.args
            if of_dim == dim:
                return source, _int(start), _int(end)
        return node, 0, self.shape(node)[dim]

    def _select(self, source: Argument, dim: int, index: int) -> Argument:
        shape = self.shape(source)
        index %= shape[dim]
        part = self._slice(source, dim, index, index + 1)
        return self._reshape(part, shape[:dim] + shape[dim + 1 :])

    def _copy(self, node: Op) -> Argument:
        source, target = node.args[0], dict(node.kwargs).get("dtype")
        if not isinstance(target, Special):
            return node
        if self._dtype(source) == target.name:
            return source
        if isinstance(source, Op) and source.op == _COPY:
            inner = source.args[0]
            if self._dtype(source) in _LOSSLESS.get(self._dtype(inner), ()):
                return self._copy(Op(_COPY, (inner,), node.kwargs))
        return node

    def _reshape(self, source: Argument, shape: Shape) -> Argument:
        while isinstance(source, Op) and source.op == _RESHAPE:
            source = source.args[0]
        return source if self.shape(source) == shape else Op(_RESHAPE, (source, shape))

    def _permute(self, source: Argument, order: Shape) -> Argument:
        """Move a permutation inwards, past slices and joins, so that two of them meet.

        permute(cat(a, permute(b)))  ─▶  cat(permute(a), b)
        """
        if order == tuple(range(len(order))):
            return source
        if isinstance(source, Op) and source.op == _PERMUTE:
            inner = _tuple(source.args[1])
            return self._permute(source.args[0], tuple(_int(inner[dim]) for dim in order))
        if isinstance(source, Op) and source.op == _SLICE and len(source.args) == 4:
            dim, start, end = map(_int, source.args[1:])
            whole = self._permute(source.args[0], order)
            return self._slice(whole, order.index(dim), start, end)
        if isinstance(source, Op) and source.op == _CAT:
            parts = _tuple(source.args[0])
            dim = order.index(self._dim(source, 1, parts[0]))
            return self._cat([self._permute(part, order) for part in parts], dim)
        return Op(_PERMUTE, (source, order))

    def _order(self, node: Op) -> Shape:
        rank = len(self.shape(node.args[0]))
        if node.op == _PERMUTE:
            return tuple(_int(dim) % rank for dim in _tuple(node.args[1]))
        order = list(range(rank))
        if node.op != "aten.transpose.int":
            return tuple(reversed(order))
        first, second = _int(node.args[1]) % rank, _int(node.args[2]) % rank
        order[first], order[second] = second, first
        return tuple(order)

    def _dim(self, node: Op, position: int, source: Argument) -> int:
        dim = dict(node.kwargs).get("dim", 0)
        if len(node.args) > position:
            dim = node.args[position]
        return _int(dim) % max(len(self.shape(source)), 1)

    def _dtype(self, node: Argument) -> str:
        return str(self.meta(node).dtype).removeprefix("torch.")


# Operator -> what simplifies a call of it; operators with an `effect` need none.
_RULES: Mapping[str, Callable[[Simplifier, Op], Argument]] = {
    "aten.expand.default": Simplifier._expanded,
    "getitem": Simplifier._getitem,
    _SLICE: Simplifier._sliced,
    "aten.select.int": Simplifier._selected,
    _CAT: Simplifier._joined,
    "aten.stack.default": Simplifier._stacked,
    _COPY: Simplifier._copy,
}


def _int(arg: Argument) -> int:
    if not isinstance(arg, int):
        raise TypeError(f"not an integer: {arg!r}")
    return arg


def _tuple(arg: Argument) -> tuple[Argument, ...]:
    if not isinstance(arg, tuple) or not arg:
        raise TypeError(f"not a list of arguments: {arg!r}")
    return arg
