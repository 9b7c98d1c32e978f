"""The content of one storage while a model saves or loads: an expression for each view."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from math import prod
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ckpttool.core.expression import OPAQUE, Argument, Expression, Op, Ref, Special
from ckpttool.core.strides import Shape, distance_to_last
from ckpttool.core.values import dataclass
from ckpttool.evaluate.ops import ROW_MAJOR

_MOST_PIECES = 1024
# elements; below, the overlap of two strided tensors is found by marking every element
_SMALL = 1 << 22


class Geometry(NamedTuple):
    """The place of a tensor in its storage, in elements of its dtype; strides of dimensions of size
    1 are 0.
    """

    offset: int
    shape: Shape
    stride: tuple[int, ...]
    dtype: torch.dtype
    conj: bool
    neg: bool

    @property
    def numel(self) -> int:
        """Count the elements of the tensor; one element of an expanded storage counts several
        times.
        """
        return prod(self.shape)

    @property
    def end(self) -> int:
        """Return the offset behind the last element."""
        if not self.numel:
            return self.offset
        return self.offset + 1 + distance_to_last(self.shape, self.stride)

    @property
    def order(self) -> tuple[int, ...]:
        """The dimensions from the slowest to the fastest in memory."""

        def speed(dim: int) -> int:
            return -self.stride[dim] if self.shape[dim] > 1 else 0

        return tuple(sorted(range(len(self.shape)), key=speed))

    @property
    def is_dense(self) -> bool:
        """Return whether the elements fill offset..end without gap or overlap, in any order of the
        dimensions.
        """
        return self.end - self.offset == self.numel and not self.overlaps_itself

    @property
    def overlaps_itself(self) -> bool:
        """Return whether one element of the storage may be several of the tensor (as after
        ``expand``).
        """
        step = 1
        for size, stride in sorted(zip(self.shape, self.stride), key=lambda pair: pair[1]):
            if size > 1:
                if stride < step:
                    return True
                step = stride * size
        return False

    def holds(self, inner: Geometry) -> bool:
        """Return whether all of `inner` is between the first and the last element of this one."""
        return self.dtype == inner.dtype and self.offset <= inner.offset and inner.end <= self.end


def geometry(tensor: torch.Tensor) -> Geometry:
    shape, stride = tuple(tensor.shape), tensor.stride()
    if 1 in shape:
        stride = tuple(step if size != 1 else 0 for size, step in zip(shape, stride))
    offset, conj, neg = int(tensor.storage_offset()), tensor.is_conj(), tensor.is_neg()
    return Geometry(offset, shape, stride, tensor.dtype, conj, neg)


@dataclass(slots=True)
class StorageValues:
    """One storage. `roots` are geometries with an independent value, `views` were derived from them
    after a write.

    `storage` keeps the address from being given to another tensor. `author` created it or wrote it
    last, `stale` says that its real bytes are no longer what the expressions say, `pieces` are the
    parts of a root that were written one by one.
    """

    storage: Any
    roots: dict[Geometry, Expression] = field(default_factory=dict)
    views: dict[Geometry, Expression] = field(default_factory=dict)
    author: Any = None
    stale: bool = False
    pieces: dict[Geometry, dict[Geometry, Expression]] = field(default_factory=dict)

    def value_of(self, geom: Geometry) -> Expression | None:
        """Return the value that was noted for `geom`, or None."""
        for table in (self.roots, self.views, *self.pieces.values()):
            if geom in table:
                return table[geom]
        return None

    def read(self, geom: Geometry) -> Expression:
        """Return the value seen through `geom`; if it was not noted, derived from a root that holds
        all of it.
        """
        value = self.value_of(geom)
        if value is None:
            value = self._derived(geom)
            self.views[geom] = value
        return value

    def _derived(self, geom: Geometry) -> Expression:
        for root, content in self.roots.items():
            window = _window(root, content, geom)
            if window is not None:
                return window
        return opaque(*self.roots.values())

    def write(self, geom: Geometry, value: Expression) -> None:
        """Replace what is seen through `geom`; every other root that shares an element changes
        too.

        roots  |────────── a ──────────|     a is told by its pieces, if they cover it;
        pieces |─ written before ─|            else by strides over its old value;
        geom                      |────|     else by a changed root that holds both
        """
        if geom.overlaps_itself:  # one place is given several values, and keeps the last
            value = opaque(value)
        self.pieces.pop(geom, None)
        for parts in self.pieces.values():
            for part in list(parts):
                if meet(part, geom):
                    del parts[part]
        changed: dict[Geometry, Expression | None] = {}
        for root, old in self.roots.items():
            if root != geom and meet(root, geom):
                changed[root] = _overwritten(root, old, geom, value)
        for root, by_strides in changed.items():
            parts = self.pieces.setdefault(root, {})
            if len(parts) >= _MOST_PIECES:
                parts.clear()
            parts[geom] = value
            new = _from_pieces(root, parts) or by_strides or _from_larger(root, geom, changed)
            self.roots[root] = new or opaque(self.roots[root], value)
        if geom in self.roots or not any(root.holds(geom) for root in self.roots):
            self.roots[geom] = value
        self.views = {geom: value}


def opaque(*parts: Argument) -> Op:
    """Return the expression of a value that cannot be written down, computed from `parts`."""
    keys: dict[str, None] = {}
    seen: set[int] = set()  # a loop may use one operator many times
    todo: list[Argument] = [*reversed(parts)]
    while todo:
        node = todo.pop()
        if isinstance(node, Ref):
            keys[node.key] = None
        elif isinstance(node, tuple):
            todo += reversed(node)
        elif isinstance(node, Op) and id(node) not in seen:
            seen.add(id(node))
            todo += reversed((*node.args, *(value for _, value in node.kwargs)))
    return Op(OPAQUE, tuple(map(Ref, keys)))


def meet(left: Geometry, right: Geometry) -> bool:
    """Return whether the two share an element (very large interleaved tensors count as sharing
    one).
    """
    # bytes: a view may have elements of another size
    left_size, right_size = left.dtype.itemsize, right.dtype.itemsize
    if left.offset * left_size >= right.end * right_size:
        return False
    if right.offset * right_size >= left.end * left_size:
        return False
    end = max(left.end, right.end)
    if left.dtype != right.dtype or end > _SMALL:
        return True
    touched = torch.zeros(end, dtype=torch.bool)
    touched.as_strided(left.shape, left.stride, left.offset).fill_(True)
    return bool(touched.as_strided(right.shape, right.stride, right.offset).any())


def _from_larger(
    root: Geometry, geom: Geometry, changed: Mapping[Geometry, Expression | None]
) -> Expression | None:
    """Return `root` as a window of a changed tensor that holds it and `geom`; None without one."""
    for whole, content in changed.items():
        if content is not None and whole.holds(root) and whole.holds(geom):
            return _window(whole, content, root)
    return None


def _from_pieces(root: Geometry, pieces: Mapping[Geometry, Expression]) -> Expression | None:
    """Return `root` as made of the pieces alone if they cover all of it (they do not overlap)."""
    if sum(piece.numel for piece in pieces) != root.numel or not all(map(root.holds, pieces)):
        return None
    ordered = sorted(pieces, key=lambda piece: piece.offset)
    for dim in range(len(root.shape)):
        start = 0
        for piece in ordered:
            if not _is_slice(root, piece, dim, start):
                break
            start += piece.shape[dim]
        else:
            parts = tuple(pieces[piece] for piece in ordered)
            return Op("aten.cat.default", (parts, dim))
    dtype = Special("dtype", str(root.dtype).removeprefix("torch."))
    whole: Expression | None = Op("aten.full.default", (root.shape, 0), (("dtype", dtype),))
    for piece, value in pieces.items():
        if whole is None:
            return None
        whole = _overwritten(root, whole, piece, value)
    return whole


def _is_slice(root: Geometry, piece: Geometry, dim: int, start: int) -> bool:
    """Return whether the piece is the root from place `start` of dimension `dim` on."""
    if (piece.dtype, piece.conj, piece.neg) != (root.dtype, root.conj, root.neg):
        return False
    if piece.offset != root.offset + start * root.stride[dim]:
        return False
    if len(piece.shape) != len(root.shape):
        return False
    for index, size in enumerate(piece.shape):
        if index != dim and size != root.shape[index]:
            return False
        if size != 1 and piece.stride[index] != root.stride[index]:
            return False
    return True


def _flat(root: Geometry, value: Expression, geom: Geometry) -> Expression | None:
    """Return `value` in memory order in its own storage, so that the strides of `geom` can be
    applied to it.
    """
    if geom.conj or geom.neg or root.conj or root.neg or not root.holds(geom) or not root.is_dense:
        return None
    if root.order != tuple(range(len(root.shape))):
        value = Op("aten.permute.default", (value, root.order))
    return Op("aten.clone.default", (value,), ROW_MAJOR)


def _window(root: Geometry, value: Expression, geom: Geometry) -> Expression | None:
    flat = _flat(root, value, geom)
    if flat is None:
        return None
    return Op("aten.as_strided.default", (flat, geom.shape, geom.stride, geom.offset - root.offset))


def _overwritten(
    root: Geometry, old: Expression, geom: Geometry, value: Expression
) -> Expression | None:
    """Return the value of `root` after `value` was written through `geom`; None if strides cannot
    express it.
    """
    covered = _window(geom, value, root)
    if covered is not None:
        return covered
    flat = _flat(root, old, geom)
    if flat is None:
        return None
    changed = Op(
        "aten.as_strided_scatter.default",
        (flat, value, geom.shape, geom.stride, geom.offset - root.offset),
    )
    order = root.order
    if order == tuple(range(len(order))):
        return changed
    return Op("aten.permute.default", (changed, tuple(order.index(d) for d in range(len(order)))))


class StorageView(NamedTuple):
    """The token of a tensor in a storage: the address of the storage, and what the tensor sees."""

    address: int
    geometry: Geometry


# a `StorageView`, or what else identifies a tensor without a storage
Token = StorageView | tuple[Any, ...]


def token(tensor: torch.Tensor) -> Token:
    """Return a value that is equal for two tensors exactly if they are the same elements of the
    same memory.
    """
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        if torch.nn.parameter.is_lazy(tensor):
            return ("object", id(tensor))
        if is_traceable_wrapper_subclass(tensor):
            return (type(tensor), tuple(tensor.shape), *map(token, inside(tensor)))
    try:
        if tensor.layout == torch.strided:
            return StorageView(address(tensor), geometry(tensor))
        return (tensor.layout, tuple(tensor.shape), *map(token, _components(tensor)))
    except RuntimeError:
        return ("object", id(tensor))


def place_of(mark: Token) -> Any:
    """Return the address of the storage, or what else identifies a tensor that has none."""
    return mark.address if isinstance(mark, StorageView) else mark


def address(tensor: torch.Tensor) -> int:
    """Return a number for the storage: the address of its bytes (numpy may share them), or of the
    object on meta.
    """
    storage = tensor.untyped_storage()
    return (0 if tensor.device.type == "meta" else storage.data_ptr()) or storage._cdata


def inside(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that a wrapper subclass or a sparse tensor is made of."""
    if torch.nn.parameter.is_lazy(tensor):
        return []
    if is_traceable_wrapper_subclass(tensor):
        parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        # a DTensor lists its mesh too
        return [part for part in parts if isinstance(part, torch.Tensor)]
    try:
        return list(_components(tensor))
    except RuntimeError:
        return []


def _components(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    if tensor.layout == torch.sparse_coo:
        return (tensor._indices(), tensor._values())
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    raise NotImplementedError(tensor.layout)
