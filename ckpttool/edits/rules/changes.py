"""What the steps of a rules file make of a tensor, on the index: its expression, its dtype and its shape.

Nothing is computed here, and torch is not needed: `evaluate` makes values of the expressions.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from math import prod
from typing import Union

from ckpttool.edits.rules.sizes import Size, bound, lone, names
from ckpttool.edits.rules.sizes import value as number
from ckpttool.errors import CkptError, Refused
from ckpttool.evaluate.without_torch import ROW_MAJOR
from ckpttool.expression import Expression, Op, Special
from ckpttool.values import dataclass


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor on its way: what it is made of, its dtype and its shape.

    `origin` is its key in the source, as long as it is one tensor of the source. `layout` is `DENSE`, or says why the
    value can only be renamed; `REFUSED` is what an earlier step failed to make, which is said once.
    """

    source: Expression
    dtype: str
    shape: tuple[int, ...]
    origin: str | None
    layout: str


DENSE, REFUSED = "strided", "refused"


class _OfAll:
    """A change that whatever its patterns name has to undergo."""

    __slots__ = ()

    def concerns(self, value: Value) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class Transpose(_OfAll):
    """Two dimensions change places."""

    dims: tuple[int, int]

    def make(self, value: Value) -> Value:
        """The tensor with the two dimensions swapped. Raises `Refused` for a dimension that it does not have."""
        first, second = (dimension(dim, value.shape) for dim in self.dims)
        order = list(range(len(value.shape)))
        order[first], order[second] = second, first
        return _permuted(value, order)

    def reversed(self) -> Transpose:
        """The step back: the same."""
        return self


@dataclass(frozen=True, slots=True)
class Permute(_OfAll):
    """The dimensions in another order: dimension ``dims[i]`` becomes dimension i.

    With `rows` they are those that dimension 0 consists of, as of heads and halves: the shape stays as it is.
    """

    dims: tuple[int, ...]
    rows: tuple[int, ...] | None = None

    def make(self, value: Value) -> Value:
        """The tensor in the new order. Raises `Refused` where it has more or fewer dimensions."""
        if self.rows is not None:
            return self._rows_made(value, self.rows)
        if len(self.dims) != len(value.shape):
            raise refusal(f"shape {list(value.shape)} has {len(value.shape)} dimensions, not {len(self.dims)}")
        return _permuted(value, self.dims)

    def _rows_made(self, value: Value, rows: tuple[int, ...]) -> Value:
        dimension(0, value.shape)
        filled, rest = _filled(rows, value.shape[0]), value.shape[1:]
        if filled is None:
            raise refusal(f"dimension 0 of {list(value.shape)} is {value.shape[0]}, not {list(rows)} rows")
        order = (*self.dims, *range(len(rows), len(rows) + len(rest)))
        return _reshaped(_permuted(_reshaped(value, (*filled, *rest)), order), value.shape)

    def reversed(self) -> Permute:
        """The step back: the inverse order."""
        rows = None if self.rows is None else tuple(self.rows[dim] for dim in self.dims)
        return Permute(tuple(self.dims.index(dim) for dim in range(len(self.dims))), rows)


@dataclass(frozen=True, slots=True)
class Reshape(_OfAll):
    """The same elements in another shape, with one -1 at most. `was`, where given, is the shape there has to be.

    A name that has no value stands in `was` for the size that is there, and in `shape` for the same.
    """

    shape: tuple[Size, ...]
    was: tuple[Size, ...] | None

    def __post_init__(self) -> None:
        """Raises `CkptError` for names in `shape` that no size of `was` is."""
        known = {lone(size) for size in self.was or ()}
        unknown = [name for size in (*self.shape, *(self.was or ())) for name in names(size) if name not in known]
        if unknown:
            raise CkptError(f"{{{unknown[0]}}} has no value: neither from_shape nor --size gives it one", hint="")

    def make(self, value: Value) -> Value:
        """The tensor in the new shape. Raises `Refused` where its own is not `was`, or it does not fill the new one."""
        known: Mapping[str, int] = {}
        if self.was is not None:
            found = bound(self.was, value.shape)
            if found is None:
                raise refusal(f"the shape is {list(value.shape)}, not {_shown(self.was)}")
            known = found
        shape = _filled([number(size, known) for size in self.shape], prod(value.shape))
        if shape is None:
            raise refusal(f"the elements of shape {list(value.shape)} do not fill {_shown(self.shape)}")
        return _reshaped(value, shape)

    def reversed(self) -> Reshape | None:
        """The step back; None where `was` does not say from which shape."""
        return None if self.was is None else Reshape(self.was, self.shape)


@dataclass(frozen=True, slots=True)
class Cast:
    """Another dtype, for tensors of the dtypes `was`; without these for all of the same kind, as in ``Module.to``."""

    dtype: str
    was: tuple[str, ...] | None

    def concerns(self, value: Value) -> bool:
        """Whether the tensor is one to cast: others are left as they are."""
        return _kind(value.dtype) == _kind(self.dtype) if self.was is None else value.dtype in self.was

    def make(self, value: Value) -> Value:
        """The tensor in the new dtype, rounded as torch does."""
        if value.dtype == self.dtype:
            return value
        cast = Op("aten._to_copy.default", (value.source,), (("dtype", Special("dtype", self.dtype)),))
        return replace(value, source=cast, dtype=self.dtype)

    def reversed(self) -> None:
        """None: what a cast rounds away does not come back."""
        return


Change = Union[Transpose, Permute, Reshape, Cast]


def split(value: Value, count: int, dim: int, sizes: Sequence[int] | None) -> list[Value]:
    """The parts of a tensor along `dim`, `count` of equal size or of these `sizes`; each gets its own storage."""
    dim = dimension(dim, value.shape)
    length = value.shape[dim]
    sizes = sizes or [length // count] * count
    if sum(sizes) != length:
        wanted = " + ".join(map(str, sizes)) if len(set(sizes)) > 1 else f"{count} times {sizes[0]}"
        raise refusal(f"dimension {dim} of {list(value.shape)} is {length}, not {wanted}")
    return [_part(value, dim, end - size, size) for end, size in zip(accumulate(sizes), sizes)]


def unstack(value: Value, count: int, dim: int) -> list[Value]:
    """The `count` slices of a tensor along `dim`, which they lack; each gets its own storage."""
    dim = dimension(dim, value.shape)
    if value.shape[dim] != count:
        raise refusal(f"dimension {dim} of {list(value.shape)} is {value.shape[dim]}, not {count}")
    shape = (*value.shape[:dim], *value.shape[dim + 1 :])
    slices = (Op("aten.select.int", (value.source, dim, index)) for index in range(count))
    return [Value(_row_major(one), value.dtype, shape, None, DENSE) for one in slices]


def join(values: Sequence[Value], dim: int, sizes: Sequence[int] | None) -> Value:
    """The tensors end to end along `dim`. They have to be of these `sizes`, or of equal size: else nobody could part
    them again.
    """
    shapes = [value.shape for value in values]
    dim = dimension(dim, shapes[0])
    _fit_together(values, {(len(shape), shape[:dim], shape[dim + 1 :]) for shape in shapes})
    have = [shape[dim] for shape in shapes]
    if sizes is not None and have != list(sizes):
        raise refusal(f"the parts have sizes {have} in dimension {dim}, not {list(sizes)}")
    if sizes is None and len(set(have)) > 1:
        raise refusal(f"the parts are not equal: sizes = {have} says that this is meant")
    shape = (*shapes[0][:dim], sum(have), *shapes[0][dim + 1 :])
    source = Op("aten.cat.default", (tuple(value.source for value in values), dim))
    return Value(source, values[0].dtype, shape, None, DENSE)


def stack(values: Sequence[Value], dim: int) -> Value:
    """The tensors, of one shape, as the slices of a new one along `dim`, which it has and they lack."""
    shape = values[0].shape
    dim = dimension(dim, (len(values), *shape))
    _fit_together(values, {value.shape for value in values})
    source = Op("aten.stack.default", (tuple(value.source for value in values), dim))
    return Value(source, values[0].dtype, (*shape[:dim], len(values), *shape[dim:]), None, DENSE)


def constant(shape: tuple[int, ...], dtype: str, fill: float | bool) -> Value:
    """A tensor filled with one value. Raises `Refused` where the dtype does not hold it."""
    whole = float(fill).is_integer() and not isinstance(fill, bool) and (fill >= 0 or not dtype.startswith("uint"))
    if not {"int": whole, "bool": fill in (0, 1)}.get(_kind(dtype), True):
        raise refusal(f"{fill} is no {dtype}")
    source = Op("aten.full.default", (shape, fill), (("dtype", Special("dtype", dtype)),))
    return Value(source, dtype, shape, None, DENSE)


def _fit_together(values: Sequence[Value], alike: Collection[object]) -> None:
    """Raises `Refused` for parts of several dtypes, or where what has to be `alike` is not one."""
    if len({value.dtype for value in values}) > 1:
        raise refusal(f"the parts have dtypes {', '.join(dict.fromkeys(value.dtype for value in values))}")
    if len(alike) > 1:
        shapes = dict.fromkeys(str(list(value.shape)) for value in values)
        raise refusal(f"parts of shapes {', '.join(shapes)} do not fit together")


def dimension(dim: int, shape: Sequence[int]) -> int:
    """The dimension counted from the front. Raises `Refused` where the shape has no such dimension."""
    if not -len(shape) <= dim < len(shape):
        raise refusal(f"shape {list(shape)} has no dimension {dim}")
    return dim % len(shape)


def refusal(message: str) -> Refused:
    """The refusal of a change that does not fit its tensor; the caller says which rule and key."""
    return Refused(message, hint="`ckpttool inspect CKPT` lists dtypes and shapes")


def _part(value: Value, dim: int, start: int, size: int) -> Value:
    shape = (*value.shape[:dim], size, *value.shape[dim + 1 :])
    rows = Op("aten.narrow.default", (value.source, dim, start, size))
    return Value(_row_major(rows), value.dtype, shape, None, DENSE)


def _permuted(value: Value, order: Sequence[int]) -> Value:
    source = Op("aten.permute.default", (value.source, tuple(order)))
    return replace(value, source=_row_major(source), shape=tuple(value.shape[dim] for dim in order))


def _reshaped(value: Value, shape: tuple[int, ...]) -> Value:
    return replace(value, source=Op("aten.reshape.default", (value.source, shape)), shape=shape)


def _row_major(source: Expression) -> Expression:
    return Op("aten.clone.default", (source,), ROW_MAJOR)


def _shown(sizes: Sequence[Size]) -> str:
    return f"[{', '.join(map(str, sizes))}]"


def _filled(shape: Sequence[int], numel: int) -> tuple[int, ...] | None:
    """The shape with its -1 filled in; None where `numel` elements do not fill it."""
    known = prod(size for size in shape if size != -1)
    rest = numel // known if known else 0
    full = tuple(rest if size == -1 else size for size in shape)
    return full if prod(full) == numel else None


def _kind(dtype: str) -> str:
    """``float8_e4m3fn`` and ``bfloat16`` are both floating, ``uint8`` and ``int64`` both integers."""
    word = re.split(r"\d", dtype)[0]
    return {"bfloat": "float", "uint": "int"}.get(word, word)
