"""Sizes with names, conditions, and changes of shape and dtype: the operations of a rules file on
tensors.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Union

from ckpttool.core.checkpoint import TensorEntry
from ckpttool.core.dtypes import PLAIN
from ckpttool.core.errors import Refused
from ckpttool.core.expression import Expression, Op, Special, filled
from ckpttool.core.strides import Shape
from ckpttool.core.text import shape_text
from ckpttool.core.values import dataclass
from ckpttool.evaluate.ops import ROW_MAJOR
from ckpttool.ruleset.patterns import matches

# Sizes

Size = Union[int, str]  # a text is an expression with names that have no value yet
Sizes = Mapping[str, int]

_NAME = re.compile(r"\{([A-Za-z_]\w*)\}")
_OPERAND = r"\s*(?:\d{1,15}|\{[A-Za-z_]\w*\})\s*"
_EXPRESSION = re.compile(rf"{_OPERAND}(?:[-+*/]{_OPERAND})*")
_OPERATION = re.compile(r"\s*([-+*/]?)\s*(\d+|\{\w+\})")


def is_expression(text: str) -> bool:
    """Return whether the text is numbers and ``{names}`` with ``+ - * /`` between them."""
    return len(text) < 1000 and _EXPRESSION.fullmatch(text) is not None


def size_names(size: Size) -> set[str]:
    return set() if isinstance(size, int) else set(_NAME.findall(size))


def resolve_size(size: Size, sizes: Sizes) -> Size:
    """Replace the names that have values: a number if none is left. Raises `Refused` as
    `size_value` does.
    """
    if isinstance(size, int):
        return size
    text = _NAME.sub(lambda name: str(sizes.get(name[1], name[0])), size)
    return text if _NAME.search(text) else size_value(text, sizes)


def size_value(size: Size, sizes: Sizes) -> int:
    """Return the value of the size, whose names are in `sizes`. Raises `Refused` if a division
    leaves a remainder.
    """
    if isinstance(size, int):
        return size
    total, product = 0, 0
    for operation, operand in _OPERATION.findall(size):
        number = sizes[operand[1:-1]] if operand.startswith("{") else int(operand)
        if operation == "-":
            total, product = total + product, -number
        elif operation in ("", "+"):  # the first has none
            total, product = total + product, number
        elif operation == "*":
            product *= number
        elif not number or product % number:
            raise Refused(f"{size} does not divide without a rest", hint="sizes are whole numbers")
        else:
            product //= number
    return total + product


def lone_name(size: Size) -> str | None:
    """Return the name if the size is nothing else."""
    name = None if isinstance(size, int) else _NAME.fullmatch(size.strip())
    return None if name is None else name[1]


# Conditions and examples


_TENSOR = re.compile(
    r"(\S(?:.*\S)?)\s+\[((?:\s*(?:-1|\d{1,15})\s*(?:,|(?=\])))*)\](?:\s+(\w+))?\s*"
)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A key or a pattern of keys, with the shape (-1 for any size) and the dtype if they are
    given.
    """

    key: str
    shape: Shape | None = None
    dtype: str | None = None

    def is_like(self, tensor: TensorEntry | Value) -> bool:
        if self.dtype not in (None, tensor.dtype):
            return False
        return self.shape is None or _fits_shape(self.shape, tensor.shape)


def _fits_shape(expected: Shape, shape: Shape) -> bool:
    """Return whether the shape is the expected one, in which -1 is any size."""
    if len(expected) != len(shape):
        return False
    return all(size in (-1, actual) for size, actual in zip(expected, shape))


def shown(text: str) -> TensorSpec | None:
    """Parse ``KEY [SHAPE] DTYPE``; None for a text without a shape at its end."""
    parts = _TENSOR.fullmatch(text)
    if parts is None or parts[3] not in (None, *PLAIN):
        return None
    sizes = parts[2].split(",")
    shape = tuple(int(size) for size in sizes if size.strip())
    return TensorSpec(parts[1], shape, parts[3])


_SHAPE = re.compile(r"(\S(?:.*\S)?)\s+\[([^\[\]]*)\]\s*")
_PLAIN_SIZE = re.compile(r"-1|\d{1,15}|\{[A-Za-z_]\w*\}")


@dataclass(frozen=True, slots=True)
class NamedShape:
    """A pattern of keys and the shape of their tensors: sizes are numbers, -1 for any, or
    ``{names}``.
    """

    pattern: str
    sizes: tuple[Size, ...]


def named_shape(text: str) -> NamedShape | None:
    """Parse ``PATTERN [8, {width}, -1]``; None for another text."""
    parts = _SHAPE.fullmatch(text)
    if parts is None:
        return None
    sizes: list[Size] = []
    for word in parts[2].split(","):
        size = word.strip()
        if not _PLAIN_SIZE.fullmatch(size):
            return None
        sizes.append(size if size.startswith("{") else int(size))
    return NamedShape(parts[1], tuple(sizes))


def holds(
    when: Sequence[TensorSpec], unless: Sequence[TensorSpec], state: Mapping[str, Value]
) -> bool:
    """Return whether the state has a tensor for each of `when`, and none for any of `unless`."""

    def is_present(spec: TensorSpec) -> bool:
        for key, tensor in state.items():
            if spec.is_like(tensor) and matches(spec.key, key):
                return True
        return False

    return all(map(is_present, when)) and not any(map(is_present, unless))


def tensor_text(tensor: TensorEntry | Value) -> str:
    """Return shape and dtype: ``[4, 12] float32``."""
    return f"{shape_text(tensor.shape)} {tensor.dtype}"


# Changes


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor between steps: its expression, dtype and shape.

    `origin` is its key in the source, if it is one tensor of the source. `layout` is `DENSE`, or
    says why the value can only be renamed; `REFUSED` if an earlier step failed, which is reported
    once.
    """

    source: Expression
    dtype: str
    shape: Shape
    origin: str | None
    layout: str

    @property
    def numel(self) -> int:
        """The elements of the tensor."""
        return prod(self.shape)


DENSE, REFUSED = "strided", "refused"


def transpose(value: Value, dims: Sequence[int]) -> Value:
    first, second = (dimension(dim, value.shape) for dim in dims)
    order = list(range(len(value.shape)))
    order[first], order[second] = second, first
    return _permuted(value, order)


def permute(value: Value, dims: Sequence[int], rows: Sequence[int] | None) -> Value:
    """Reorder the dimensions: dimension ``dims[i]`` becomes dimension i.

    With `rows`, they are the dimensions that dimension 0 consists of, such as heads and halves: the
    shape stays.
    """
    shape = value.shape
    if rows is None:
        if len(dims) != len(shape):
            raise refusal(f"shape {list(shape)} has {len(shape)} dimensions, not {len(dims)}")
        return _permuted(value, dims)
    dimension(0, shape)
    filled = _fill_shape(rows, shape[0])
    if filled is None:
        raise refusal(f"dimension 0 of {list(shape)} is {shape[0]}, not {list(rows)} rows")
    unfolded = (*filled, *shape[1:])
    others = range(len(filled), len(unfolded))
    permuted = _permuted(_reshaped(value, unfolded), (*dims, *others))
    return _reshaped(permuted, shape)


def reshape(value: Value, shape: Sequence[Size], old: Sequence[Size] | None) -> Value:
    """Give the elements another shape, with one -1 at most. `old` is the required shape, if it is
    given.

    A name without a value is in `old` the size that the tensor has, and in `shape` the same size.
    """
    sizes: dict[str, int] = {}
    if old is not None:
        for size, length in zip(old, value.shape):
            name = lone_name(size)
            if name is not None:
                sizes.setdefault(name, length)
        if not _is_shape(value.shape, old, sizes):
            raise refusal(f"the shape is {list(value.shape)}, not {_sizes_text(old)}")
    filled = _fill_shape([size_value(size, sizes) for size in shape], value.numel)
    if filled is None:
        raise refusal(f"the elements of shape {list(value.shape)} do not fill {_sizes_text(shape)}")
    return _reshaped(value, filled)


def _sizes_text(sizes: Sequence[Size]) -> str:
    return f"[{', '.join(map(str, sizes))}]"


def _is_shape(shape: Shape, expected: Sequence[Size], sizes: Sizes) -> bool:
    if len(expected) != len(shape):
        return False
    for size, length in zip(expected, shape):
        if size != -1 and size_value(size, sizes) != length:
            return False
    return True


def cast(value: Value, dtype: str) -> Value:
    """Cast the tensor, unless it has the dtype."""
    if value.dtype == dtype:
        return value
    source = Op("aten._to_copy.default", (value.source,), (("dtype", Special("dtype", dtype)),))
    return replace(value, source=source, dtype=dtype)


def pad(value: Value, dim: int, size: int, fill: float | bool) -> Value:
    """Append elements filled with one number, up to `size` in dimension `dim`."""
    dim = dimension(dim, value.shape)
    missing = size - value.shape[dim]
    if missing < 0:
        raise refusal(f"dimension {dim} of {list(value.shape)} is larger than {size}")
    if not missing:
        return value
    filling = constant(_with_size(value.shape, dim, missing), value.dtype, fill)
    padded = join([value, filling], dim, [value.shape[dim], missing])
    return replace(value, source=padded.source, shape=padded.shape)


def multiple_of(factor: int, value: Value, dim: int) -> int:
    """Return the size of the dimension, rounded up to a multiple of `factor`."""
    size = value.shape[dimension(dim, value.shape)]
    return -(-size // factor) * factor


def narrow(value: Value, dim: int, start: int, size: int) -> Value:
    """Keep `size` elements of dimension `dim`, from element `start` on."""
    dim = dimension(dim, value.shape)
    length = value.shape[dim]
    if start + size > length:
        raise refusal(f"dimension {dim} of {list(value.shape)} ends before {start + size}")
    if size == length:
        return value
    source = _row_major(Op("aten.narrow.default", (value.source, dim, start, size)))
    return replace(value, source=source, shape=_with_size(value.shape, dim, size))


def check_size(value: Value, dim: int, size: int) -> None:
    """Raise `Refused` if the dimension has another size."""
    dim = dimension(dim, value.shape)
    if value.shape[dim] != size:
        raise refusal(f"dimension {dim} of {list(value.shape)} is {value.shape[dim]}, not {size}")


def dtypes_like(dtype: str) -> tuple[str, ...]:
    """Return the dtypes of the same kind, which ``Module.to`` casts too."""
    return tuple(name for name in PLAIN if _kind(name) == _kind(dtype))


def split(value: Value, count: int, dim: int, sizes: Sequence[int] | None) -> list[Value]:
    """Return the parts of a tensor along `dim`, `count` of equal size or of these `sizes`, each in
    a new storage.
    """
    dim = dimension(dim, value.shape)
    length = value.shape[dim]
    sizes = sizes or [length // count] * count
    if sum(sizes) != length:
        text = f"{count} times {sizes[0]}"
        if len(set(sizes)) > 1:
            text = " + ".join(map(str, sizes))
        raise refusal(f"dimension {dim} of {list(value.shape)} is {length}, not {text}")
    parts: list[Value] = []
    start = 0
    for size in sizes:
        parts.append(_part(value, dim, start, size))
        start += size
    return parts


def _part(value: Value, dim: int, start: int, size: int) -> Value:
    """Return `size` elements of the dimension, from element `start` on, in a new storage."""
    source = _row_major(Op("aten.narrow.default", (value.source, dim, start, size)))
    return Value(source, value.dtype, _with_size(value.shape, dim, size), None, DENSE)


def unstack(value: Value, count: int, dim: int) -> list[Value]:
    """Return the `count` slices of a tensor along `dim`, without that dimension, each in a new
    storage.
    """
    dim = dimension(dim, value.shape)
    if value.shape[dim] != count:
        raise refusal(f"dimension {dim} of {list(value.shape)} is {value.shape[dim]}, not {count}")
    shape = (*value.shape[:dim], *value.shape[dim + 1 :])
    slices = []
    for index in range(count):
        source = _row_major(Op("aten.select.int", (value.source, dim, index)))
        slices.append(Value(source, value.dtype, shape, None, DENSE))
    return slices


def join(values: Sequence[Value], dim: int, sizes: Sequence[int] | None) -> Value:
    """Put tensors of these `sizes`, or of equal size, end to end along `dim`. Other parts could not
    be split again.
    """
    first = values[0]
    dim = dimension(dim, first.shape)
    layouts = {(len(value.shape), _with_size(value.shape, dim, 0)) for value in values}
    _check_fit(values, layouts)
    actual = [value.shape[dim] for value in values]
    if sizes is not None and actual != list(sizes):
        raise refusal(f"the parts have sizes {actual} in dimension {dim}, not {list(sizes)}")
    if sizes is None and len(set(actual)) > 1:
        raise refusal(f"the parts are not equal: sizes = {actual} allows this")
    source = Op("aten.cat.default", (_sources(values), dim))
    shape = _with_size(first.shape, dim, sum(actual))
    return Value(source, first.dtype, shape, None, DENSE)


def _sources(values: Sequence[Value]) -> tuple[Expression, ...]:
    return tuple(value.source for value in values)


def _with_size(shape: tuple[int, ...], dim: int, size: int) -> tuple[int, ...]:
    """Return the shape with another size in one dimension."""
    return (*shape[:dim], size, *shape[dim + 1 :])


def stack(values: Sequence[Value], dim: int) -> Value:
    """Stack tensors of one shape along a new dimension `dim`."""
    count, shape = len(values), values[0].shape
    dim = dimension(dim, (count, *shape))
    _check_fit(values, {value.shape for value in values})
    source = Op("aten.stack.default", (_sources(values), dim))
    stacked = (*shape[:dim], count, *shape[dim:])
    return Value(source, values[0].dtype, stacked, None, DENSE)


def constant(shape: Shape, dtype: str, fill: float | bool) -> Value:
    """Return a tensor filled with one number. Raises `Refused` if the dtype cannot hold it."""
    kind, can_hold = _kind(dtype), True
    if kind == "bool":
        can_hold = fill in (0, 1)
    elif kind == "int":
        is_whole = float(fill).is_integer() and not isinstance(fill, bool)
        can_hold = is_whole and (fill >= 0 or not dtype.startswith("uint"))
    if not can_hold:
        raise refusal(f"{dtype} cannot hold {fill}")
    return Value(filled(shape, dtype, fill), dtype, shape, None, DENSE)


def _check_fit(values: Sequence[Value], layouts: Collection[object]) -> None:
    """Raise `Refused` for parts of several dtypes or `layouts`."""
    dtypes = dict.fromkeys(value.dtype for value in values)
    if len(dtypes) > 1:
        raise refusal(f"the parts have dtypes {', '.join(dtypes)}")
    if len(layouts) > 1:
        shapes = dict.fromkeys(str(list(value.shape)) for value in values)
        raise refusal(f"parts of shapes {', '.join(shapes)} do not fit together")


def dimension(dim: int, shape: Sequence[int]) -> int:
    """Return the dimension counted from the front. Raises `Refused` if the shape does not have
    it.
    """
    if not -len(shape) <= dim < len(shape):
        raise refusal(f"shape {list(shape)} has no dimension {dim}")
    return dim % len(shape)


def refusal(message: str) -> Refused:
    """Return the error for a change that does not fit its tensor; the caller adds rule and key."""
    return Refused(message, hint="`ckpttool inspect CKPT` lists dtypes and shapes")


def _permuted(value: Value, order: Sequence[int]) -> Value:
    source = Op("aten.permute.default", (value.source, tuple(order)))
    shape = tuple(value.shape[dim] for dim in order)
    return replace(value, source=_row_major(source), shape=shape)


def _reshaped(value: Value, shape: Shape) -> Value:
    return replace(value, source=Op("aten.reshape.default", (value.source, shape)), shape=shape)


def _row_major(source: Expression) -> Expression:
    return Op("aten.clone.default", (source,), ROW_MAJOR)


def _fill_shape(shape: Sequence[int], numel: int) -> Shape | None:
    """Return the shape with a size for its -1; None if `numel` elements do not fill it."""
    rest = prod(size for size in shape if size != -1)
    missing = numel // rest if rest else 0
    filled = tuple(missing if size == -1 else size for size in shape)
    return filled if prod(filled) == numel else None


def _kind(dtype: str) -> str:
    """``float8_e4m3fn`` and ``bfloat16`` are both floating, ``uint8`` and ``int64`` both
    integers.
    """
    word = re.split(r"\d", dtype)[0]
    return {"bfloat": "float", "uint": "int"}.get(word, word)
