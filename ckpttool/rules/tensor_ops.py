"""What the steps of a rules file do to a tensor: its expression, dtype and shape."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from math import prod
from typing import Protocol, Union

from ckpttool.core.dtypes import PLAIN
from ckpttool.core.errors import CkptError, Refused
from ckpttool.core.expression import Expression, Op, Special
from ckpttool.core.text import shape_text
from ckpttool.core.values import dataclass
from ckpttool.evaluate.ops import ROW_MAJOR
from ckpttool.rules.patterns import matches

Size = Union[int, str]  # a text is an expression whose names have no value yet
Named = Mapping[str, int]

_NAME = re.compile(r"\{([A-Za-z_]\w*)\}")
_OPERAND = r"\s*(?:\d{1,15}|\{[A-Za-z_]\w*\})\s*"
_EXPRESSION = re.compile(rf"{_OPERAND}(?:[-+*/]{_OPERAND})*")
_OPERATION = re.compile(r"\s*([-+*/]?)\s*(\d+|\{\w+\})")


def is_expression(text: str) -> bool:
    """Whether the text is one: numbers and ``{names}`` with ``+ - * /`` between them."""
    return len(text) < 1000 and _EXPRESSION.fullmatch(text) is not None


def size_names(size: Size) -> set[str]:
    """The names that the size is made of."""
    return set() if isinstance(size, int) else set(_NAME.findall(size))


def lone_size(size: Size) -> str | None:
    """The name that is all of the size; None where it is more than that, or a number."""
    found = None if isinstance(size, int) else _NAME.fullmatch(size.strip())
    return None if found is None else found[1]


def resolve_size(size: Size, known: Named) -> Size:
    """The size with the names that have values replaced by these; a number where none is left. Raises `Refused`."""
    if isinstance(size, int):
        return size
    text = _NAME.sub(lambda name: str(known.get(name[1], name[0])), size)
    return text if _NAME.search(text) else size_value(text, known)


def size_value(size: Size, known: Named) -> int:
    """The number that the size is, whose names are `known`. Raises `Refused` where a division leaves a rest."""
    if isinstance(size, int):
        return size
    total, product = 0, 0
    for operation, operand in _OPERATION.findall(size):
        number = known[operand[1:-1]] if operand.startswith("{") else int(operand)
        if operation in "+-":  # the first has none
            total, product = total + product, -number if operation == "-" else number
        elif operation == "*":
            product *= number
        else:
            if not number or product % number:
                raise Refused(f"{size} does not divide without a rest", hint="sizes are whole numbers")
            product //= number
    return total + product


def bind_sizes(sizes: Sequence[Size], shape: Sequence[int]) -> Named | None:
    """What the names that stand alone are in this shape; None where the shape is another. -1 fits any size."""
    if len(sizes) != len(shape):
        return None
    found: dict[str, int] = {}
    for size, length in zip(sizes, shape):
        name = lone_size(size)
        if name is not None:
            found.setdefault(name, length)
    fits = all(size == -1 or size_value(size, found) == length for size, length in zip(sizes, shape))
    return found if fits else None


def given_sizes(texts: Sequence[str]) -> dict[str, int]:
    """The values of ``NAME=N`` on the command line. Raises `CkptError` for what is none."""
    return dict(_given(texts))


def _given(texts: Sequence[str]) -> Iterator[tuple[str, int]]:
    for text in texts:
        name, _, number = text.partition("=")
        if _NAME.fullmatch(f"{{{name}}}") is None or re.fullmatch(r"[1-9]\d{0,14}", number) is None:
            raise CkptError(f"not a size: {text!r:.100}", hint="as in --size heads=32")
        yield name, int(number)


_TENSOR = re.compile(r"(\S(?:.*\S)?)\s+\[((?:\s*(?:-1|\d{1,15})\s*(?:,|(?=\])))*)\](?:\s+(\w+))?\s*")


class Tensor(Protocol):
    """What has a dtype and a shape."""

    @property
    def dtype(self) -> str:
        """As in ``bfloat16``."""

    @property
    def shape(self) -> tuple[int, ...]:
        """In elements."""


@dataclass(frozen=True, slots=True)
class Shown:
    """A key or a pattern of keys, with the shape (-1 for any size) and the dtype where they are said."""

    key: str
    shape: tuple[int, ...] | None = None
    dtype: str | None = None

    def names(self, key: str, tensor: Tensor) -> bool:
        """Whether it is a tensor of this kind that stands under `key`."""
        return self.is_like(tensor) and matches(self.key, key)

    def is_like(self, tensor: Tensor) -> bool:
        """Whether the tensor has the shape and the dtype."""
        if self.dtype not in (None, tensor.dtype):
            return False
        if self.shape is None:
            return True
        return len(self.shape) == len(tensor.shape) and all(
            size in (-1, length) for size, length in zip(self.shape, tensor.shape)
        )


def shown(text: str) -> Shown | None:
    """The text as a tensor; None where it ends in no shape and dtype that could be one."""
    found = _TENSOR.fullmatch(text)
    if found is None or found[3] not in (None, *PLAIN):
        return None
    return Shown(found[1], tuple(int(size) for size in found[2].split(",") if size.strip()), found[3])


def condition(text: str) -> Shown:
    """The text as a pattern of keys, with a shape or without."""
    return shown(text) or Shown(text)


def holds(when: Sequence[Shown], unless: Sequence[Shown], state: Mapping[str, Tensor]) -> bool:
    """Whether each of `when` names a tensor of the state, and none of `unless` does."""

    def there(one: Shown) -> bool:
        return any(one.names(key, tensor) for key, tensor in state.items())

    return all(map(there, when)) and not any(map(there, unless))


def tensor_text(tensor: Tensor) -> str:
    """Shape and dtype: ``[4, 12] float32``."""
    return f"{shape_text(tensor.shape)} {tensor.dtype}"


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
        known = {lone_size(size) for size in self.was or ()}
        unknown = [name for size in (*self.shape, *(self.was or ())) for name in size_names(size) if name not in known]
        if unknown:
            raise CkptError(f"{{{unknown[0]}}} has no value: neither from_shape nor --size gives it one", hint="")

    def make(self, value: Value) -> Value:
        """The tensor in the new shape. Raises `Refused` where its own is not `was`, or it does not fill the new one."""
        known: Mapping[str, int] = {}
        if self.was is not None:
            found = bind_sizes(self.was, value.shape)
            if found is None:
                raise refusal(f"the shape is {list(value.shape)}, not {_shown(self.was)}")
            known = found
        shape = _filled([size_value(size, known) for size in self.shape], prod(value.shape))
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
