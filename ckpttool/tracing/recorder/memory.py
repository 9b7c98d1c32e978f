"""What is in one storage while a model saves or loads: an expression for each view of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from math import prod
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ckpttool.core.expression import OPAQUE, Argument, Expression, Op, Ref, Special, refs
from ckpttool.core.values import dataclass

_MOST_PIECES = 1024
_SMALL = 1 << 22  # elements; below, the overlap of two strided tensors is found by marking every element


class Geometry(NamedTuple):
    """How a tensor lies in its storage, in elements of its dtype; strides of dimensions of size 1 are 0."""

    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    conj: bool
    neg: bool

    @property
    def numel(self) -> int:
        """Elements of the tensor, however often an element of the storage is among them."""
        return prod(self.shape)

    @property
    def end(self) -> int:
        """One past the last element that the tensor reaches."""
        if not self.numel:
            return self.offset
        return self.offset + sum((size - 1) * step for size, step in zip(self.shape, self.stride)) + 1

    @property
    def order(self) -> tuple[int, ...]:
        """The dimensions from the slowest to the fastest in memory."""
        return tuple(sorted(range(len(self.shape)), key=lambda d: -self.stride[d] if self.shape[d] > 1 else 0))

    @property
    def is_dense(self) -> bool:
        """True where the elements fill offset..end without gap or overlap, in some order of the dimensions."""
        return self.end - self.offset == self.numel and not self.overlaps_itself

    @property
    def overlaps_itself(self) -> bool:
        """Whether one element of the storage may be several of the tensor (as after ``expand``)."""
        step = 1
        for size, stride in sorted(zip(self.shape, self.stride), key=lambda pair: pair[1]):
            if size > 1:
                if stride < step:
                    return True
                step = stride * size
        return False

    @property
    def is_plain(self) -> bool:
        """Whether the bytes are the values: neither conjugated nor negated lazily."""
        return not self.conj and not self.neg


def geometry(tensor: torch.Tensor) -> Geometry:
    """The geometry of a strided tensor."""
    shape = tuple(tensor.shape)
    stride = tuple(step if size != 1 else 0 for size, step in zip(shape, tensor.stride()))
    return Geometry(int(tensor.storage_offset()), shape, stride, tensor.dtype, tensor.is_conj(), tensor.is_neg())


@dataclass(slots=True)
class Memory:
    """One storage. `roots` are geometries with a value of their own, `views` those derived since the last write.

    `storage` keeps the address from being given to another tensor. `author` is who created it or wrote it last,
    `stale` says that its real bytes no longer are what the expressions say, `pieces` are the parts of a root that were
    written one by one.
    """

    storage: Any
    roots: dict[Geometry, Expression] = field(default_factory=dict)
    views: dict[Geometry, Expression] = field(default_factory=dict)
    author: Any = None
    stale: bool = False
    pieces: dict[Geometry, dict[Geometry, Expression]] = field(default_factory=dict)

    def known(self, geom: Geometry) -> Expression | None:
        """The value seen through `geom` if it has been noted."""
        for table in (self.roots, self.views, *self.pieces.values()):
            if geom in table:
                return table[geom]
        return None

    def read(self, geom: Geometry) -> Expression:
        """The value seen through `geom`, derived from a root that holds all of it where it has not been noted."""
        found = self.known(geom)
        if found is None:
            found = self.views[geom] = self._derive(geom)
        return found

    def _derive(self, geom: Geometry) -> Expression:
        for root, value in self.roots.items():
            inner = _window(root, value, geom)
            if inner is not None:
                return inner
        return opaque(*self.roots.values())

    def write(self, geom: Geometry, value: Expression) -> None:
        """Replaces what is seen through `geom`; every other root that it reaches into is changed along."""
        if geom.overlaps_itself:  # one place is given several values, and keeps the last of them
            value = opaque(value)
        self.pieces = {root: _untouched(parts, geom) for root, parts in self.pieces.items() if root != geom}
        reached = {root: old for root, old in self.roots.items() if root != geom and meet(root, geom)}
        changed = {root: _overwritten(root, old, geom, value) for root, old in reached.items()}
        for root, new in changed.items():
            whole = _made_of(root, self._pieced(root, geom, value)) or new
            self.roots[root] = whole or self._through_whole(root, geom, changed) or opaque(self.roots[root], value)
        if geom in self.roots or not any(_holds(root, geom) for root in self.roots):
            self.roots[geom] = value
        self.views = {geom: value}

    def _pieced(self, root: Geometry, geom: Geometry, value: Expression) -> Mapping[Geometry, Expression]:
        """The parts of `root` that were written one by one and still hold what was written, `geom` the last of them."""
        known = self.pieces.get(root, {})
        self.pieces[root] = {**(known if len(known) < _MOST_PIECES else {}), geom: value}
        return self.pieces[root]

    @staticmethod
    def _through_whole(
        root: Geometry, geom: Geometry, changed: Mapping[Geometry, Expression | None]
    ) -> Expression | None:
        """What `root` sees of a third tensor that holds both it and what was written."""
        for whole, value in changed.items():
            if value is not None and _holds(whole, root) and _holds(whole, geom):
                return _window(whole, value, root)
        return None


def opaque(*parts: Argument) -> Op:
    """Computed in a way that cannot be written down: only what it was computed from is known."""
    keys = dict.fromkeys(key for part in parts for key in refs(part))
    return Op(OPAQUE, tuple(Ref(key) for key in keys))


def _holds(outer: Geometry, inner: Geometry) -> bool:
    return outer.dtype == inner.dtype and outer.offset <= inner.offset and inner.end <= outer.end


def _untouched(parts: Mapping[Geometry, Expression], geom: Geometry) -> dict[Geometry, Expression]:
    return {part: value for part, value in parts.items() if not meet(part, geom)}


def meet(one: Geometry, other: Geometry) -> bool:
    """True where the two share an element (or might: very large interleaved ones are not looked into)."""
    size, others = one.dtype.itemsize, other.dtype.itemsize  # bytes: a view may have elements of another size
    if one.offset * size >= other.end * others or other.offset * others >= one.end * size:
        return False
    if one.dtype != other.dtype or max(one.end, other.end) > _SMALL:
        return True
    touched = torch.zeros(max(one.end, other.end), dtype=torch.bool)
    touched.as_strided(one.shape, one.stride, one.offset).fill_(True)
    return bool(touched.as_strided(other.shape, other.stride, other.offset).any())


def _made_of(root: Geometry, pieces: Mapping[Geometry, Expression]) -> Expression | None:
    """`root` as made of the pieces alone, where they cover it all (they do not overlap)."""
    if sum(piece.numel for piece in pieces) != root.numel or not all(_holds(root, piece) for piece in pieces):
        return None
    joined = _joined(root, pieces)
    if joined is not None:
        return joined
    dtype = Special("dtype", str(root.dtype).removeprefix("torch."))
    whole: Expression | None = Op("aten.full.default", (root.shape, 0), (("dtype", dtype),))
    for piece, value in pieces.items():
        whole = None if whole is None else _overwritten(root, whole, piece, value)
    return whole


def _joined(root: Geometry, pieces: Mapping[Geometry, Expression]) -> Expression | None:
    """The pieces put behind each other, where they make up all of `root` along one dimension."""
    ordered = sorted(pieces, key=lambda piece: piece.offset)
    for dim in range(len(root.shape)):
        at = 0
        for piece in ordered:
            rest = piece.shape[:dim] + piece.shape[dim + 1 :] == root.shape[:dim] + root.shape[dim + 1 :]
            if not rest or len(piece.shape) != len(root.shape) or not _is_slice(root, piece, dim, at):
                break
            at += piece.shape[dim]
        else:
            return Op("aten.cat.default", (tuple(pieces[piece] for piece in ordered), dim))
    return None


def _is_slice(root: Geometry, piece: Geometry, dim: int, start: int) -> bool:
    strides = all(size == 1 or a == b for size, a, b in zip(piece.shape, piece.stride, root.stride))
    same = (piece.dtype, piece.conj, piece.neg) == (root.dtype, root.conj, root.neg)
    return strides and same and piece.offset == root.offset + start * root.stride[dim]


def _flat(root: Geometry, value: Expression) -> Expression | None:
    """`value` in memory order in a storage of its own, so that strides can be applied to it."""
    if not root.is_dense or not root.is_plain:
        return None
    if root.order != tuple(range(len(root.shape))):
        value = Op("aten.permute.default", (value, root.order))
    return Op("aten.clone.default", (value,), (("memory_format", Special("memory_format", "contiguous_format")),))


def _window(root: Geometry, value: Expression, geom: Geometry) -> Expression | None:
    flat = _flat(root, value) if geom.is_plain and _holds(root, geom) else None
    if flat is None:
        return None
    return Op("aten.as_strided.default", (flat, geom.shape, geom.stride, geom.offset - root.offset))


def _overwritten(root: Geometry, old: Expression, geom: Geometry, value: Expression) -> Expression | None:
    """The value of `root` after `value` was written through `geom`; None where strides cannot say it."""
    covered = _window(geom, value, root)
    if covered is not None:
        return covered
    flat = _flat(root, old) if geom.is_plain and _holds(root, geom) else None
    if flat is None:
        return None
    changed = Op("aten.as_strided_scatter.default", (flat, value, geom.shape, geom.stride, geom.offset - root.offset))
    order = root.order
    if order == tuple(range(len(order))):
        return changed
    return Op("aten.permute.default", (changed, tuple(order.index(d) for d in range(len(order)))))


Token = tuple[Any, ...]  # (address of the storage, geometry), or what else identifies a tensor that has no storage


def token(tensor: torch.Tensor) -> Token:
    """What is equal for two tensors exactly when they are the same elements of the same memory."""
    if torch.nn.parameter.is_lazy(tensor):
        return ("object", id(tensor))
    if is_traceable_wrapper_subclass(tensor):
        return (type(tensor), tuple(tensor.shape), *map(token, inside(tensor)))
    try:
        if tensor.layout == torch.strided:
            return (address(tensor), geometry(tensor))
        return (tensor.layout, tuple(tensor.shape), *map(token, components(tensor)))
    except RuntimeError:
        return ("object", id(tensor))


def address(tensor: torch.Tensor) -> int:
    """A number for the tensor's storage: where its bytes lie (numpy may share them), or the storage object on meta."""
    storage = tensor.untyped_storage()
    return (0 if tensor.device.type == "meta" else storage.data_ptr()) or storage._cdata


def components(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The dense tensors that a sparse tensor is made of."""
    if tensor.layout == torch.sparse_coo:
        return (tensor._indices(), tensor._values())
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    raise NotImplementedError(tensor.layout)


def inside(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that a wrapper subclass or a sparse tensor is made of."""
    if torch.nn.parameter.is_lazy(tensor):
        return []
    if is_traceable_wrapper_subclass(tensor):
        parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        return [part for part in parts if isinstance(part, torch.Tensor)]  # a DTensor lists its mesh too
    try:
        return list(components(tensor))
    except RuntimeError:
        return []
