"""Sizes with names, conditions, and changes of shape and dtype: the operations of a rules file on
tensors.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from math import prod
from typing import Union

from ckpttool.core.checkpoint import TensorEntry
from ckpttool.core.dtypes import PLAIN
from ckpttool.core.errors import Refused
from ckpttool.core.expression import Expression, Op, Special
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


def resolve_size(size: Size, known: Sizes) -> Size:
    """Replace the names that have values: a number if none is left. Raises `Refused` as
    `size_value` does.
    """
    if isinstance(size, int):
        return size
    text = _NAME.sub(lambda name: str(known.get(name[1], name[0])), size)
    return text if _NAME.search(text) else size_value(text, known)


def size_value(size: Size, known: Sizes) -> int:
    """Return the value of the size, whose names are `known`. Raises `Refused` if a division leaves
    a remainder.
    """
    if isinstance(size, int):
        return size
    total, product = 0, 0
    for operation, operand in _OPERATION.findall(size):
        number = known[operand[1:-1]] if operand.startswith("{") else int(operand)
        if operation in "+-":  # the first has none
            total, product = total + product, -number if operation == "-" else number
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
    shape: tuple[int, ...] | None = None
    dtype: str | None = None

    def is_like(self, tensor: TensorEntry | Value) -> bool:
        shape = tensor.shape if self.shape is None else self.shape
        fits = len(shape) == len(tensor.shape) and all(
            a in (-1, b) for a, b in zip(shape, tensor.shape)
        )
        return fits and self.dtype in (None, tensor.dtype)


def shown(text: str) -> TensorSpec | None:
    """Parse ``KEY [SHAPE] DTYPE``; None for a text without a shape at its end."""
    parts = _TENSOR.fullmatch(text)
    if parts is None or parts[3] not in (None, *PLAIN):
        return None
    return TensorSpec(
        parts[1], tuple(int(size) for size in parts[2].split(",") if size.strip()), parts[3]
    )


def holds(
    when: Sequence[TensorSpec], unless: Sequence[TensorSpec], state: Mapping[str, Value]
) -> bool:
    """Return whether the state has a tensor for each of `when`, and none for any of `unless`."""

    def is_present(spec: TensorSpec) -> bool:
        return any(spec.is_like(tensor) and matches(spec.key, key) for key, tensor in state.items())

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
    shape: tuple[int, ...]
    origin: str | None
    layout: str


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
    order = (*dims, *range(len(filled), len(filled) + len(shape) - 1))
    return _reshaped(_permuted(_reshaped(value, (*filled, *shape[1:])), order), shape)


def reshape(value: Value, shape: Sequence[Size], old: Sequence[Size] | None) -> Value:
    """Give the elements another shape, with one -1 at most. `old` is the required shape, if it is
    given.

    A name without a value is in `old` the size that the tensor has, and in `shape` the same size.
    """
    known: dict[str, int] = {}
    if old is not None:
        for size, length in zip(old, value.shape):
            name = lone_name(size)
            if name is not None:
                known.setdefault(name, length)
        fits = (
            size == -1 or size_value(size, known) == length
            for size, length in zip(old, value.shape)
        )
        if len(old) != len(value.shape) or not all(fits):
            raise refusal(f"the shape is {list(value.shape)}, not [{', '.join(map(str, old))}]")
    filled = _fill_shape([size_value(size, known) for size in shape], prod(value.shape))
    if filled is None:
        raise refusal(
            f"the elements of shape {list(value.shape)} do not fill [{', '.join(map(str, shape))}]"
        )
    return _reshaped(value, filled)


def cast(value: Value, dtype: str) -> Value:
    """Cast the tensor, unless it has the dtype."""
    if value.dtype == dtype:
        return value
    return replace(
        value,
        source=Op("aten._to_copy.default", (value.source,), (("dtype", Special("dtype", dtype)),)),
        dtype=dtype,
    )


def dtypes_like(dtype: str) -> tuple[str, ...]:
    """Return the dtypes of the same kind, which ``Module.to`` casts too."""
    return tuple(name for name in PLAIN if _kind(name) == _kind(dtype))


def split(value: Value, count: int, dim: int, sizes: Sequence[int] | None) -> list[Value]:
    """Return the parts of a tensor along `dim`, `count` of equal size or of these `sizes`, each in
    a new storage.
    """
    dim = dimension(dim, value.shape)
    length, shape = value.shape[dim], value.shape
    sizes = sizes or [length // count] * count
    if sum(sizes) != length:
        wanted = " + ".join(map(str, sizes)) if len(set(sizes)) > 1 else f"{count} times {sizes[0]}"
        raise refusal(f"dimension {dim} of {list(shape)} is {length}, not {wanted}")
    parts = []
    for end, size in zip(accumulate(sizes), sizes):
        source = _row_major(Op("aten.narrow.default", (value.source, dim, end - size, size)))
        parts.append(
            Value(source, value.dtype, (*shape[:dim], size, *shape[dim + 1 :]), None, DENSE)
        )
    return parts


def unstack(value: Value, count: int, dim: int) -> list[Value]:
    """Return the `count` slices of a tensor along `dim`, without that dimension, each in a new
    storage.
    """
    dim = dimension(dim, value.shape)
    if value.shape[dim] != count:
        raise refusal(f"dimension {dim} of {list(value.shape)} is {value.shape[dim]}, not {count}")
    shape = (*value.shape[:dim], *value.shape[dim + 1 :])
    slices = (Op("aten.select.int", (value.source, dim, index)) for index in range(count))
    return [Value(_row_major(one), value.dtype, shape, None, DENSE) for one in slices]


def join(values: Sequence[Value], dim: int, sizes: Sequence[int] | None) -> Value:
    """Put tensors of these `sizes`, or of equal size, end to end along `dim`. Other parts could not
    be split again.
    """
    shapes = [value.shape for value in values]
    dim = dimension(dim, shapes[0])
    _check_fit(values, {(len(shape), shape[:dim], shape[dim + 1 :]) for shape in shapes})
    actual = [shape[dim] for shape in shapes]
    if sizes is not None and actual != list(sizes):
        raise refusal(f"the parts have sizes {actual} in dimension {dim}, not {list(sizes)}")
    if sizes is None and len(set(actual)) > 1:
        raise refusal(f"the parts are not equal: sizes = {actual} allows this")
    shape = (*shapes[0][:dim], sum(actual), *shapes[0][dim + 1 :])
    source = Op("aten.cat.default", (tuple(value.source for value in values), dim))
    return Value(source, values[0].dtype, shape, None, DENSE)


def stack(values: Sequence[Value], dim: int) -> Value:
    """Stack tensors of one shape along a new dimension `dim`."""
    shape = values[0].shape
    dim = dimension(dim, (len(values), *shape))
    _check_fit(values, {value.shape for value in values})
    source = Op("aten.stack.default", (tuple(value.source for value in values), dim))
    return Value(source, values[0].dtype, (*shape[:dim], len(values), *shape[dim:]), None, DENSE)


def constant(shape: tuple[int, ...], dtype: str, fill: float | bool) -> Value:
    """Return a tensor filled with one number. Raises `Refused` if the dtype cannot hold it."""
    is_whole = (
        float(fill).is_integer()
        and not isinstance(fill, bool)
        and (fill >= 0 or not dtype.startswith("uint"))
    )
    if not {"int": is_whole, "bool": fill in (0, 1)}.get(_kind(dtype), True):
        raise refusal(f"{dtype} cannot hold {fill}")
    source = Op("aten.full.default", (shape, fill), (("dtype", Special("dtype", dtype)),))
    return Value(source, dtype, shape, None, DENSE)


def _check_fit(values: Sequence[Value], layouts: Collection[object]) -> None:
    """Raise `Refused` for parts of several dtypes or `layouts`."""
    if len({value.dtype for value in values}) > 1:
        raise refusal(
            f"the parts have dtypes {', '.join(dict.fromkeys(value.dtype for value in values))}"
        )
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
    return replace(value, source=_row_major(source), shape=tuple(value.shape[dim] for dim in order))


def _reshaped(value: Value, shape: tuple[int, ...]) -> Value:
    return replace(value, source=Op("aten.reshape.default", (value.source, shape)), shape=shape)


def _row_major(source: Expression) -> Expression:
    return Op("aten.clone.default", (source,), ROW_MAJOR)


def _fill_shape(shape: Sequence[int], numel: int) -> tuple[int, ...] | None:
    """Return the shape with a size for its -1; None if `numel` elements do not fill it."""
    known = prod(size for size in shape if size != -1)
    filled = tuple((numel // known if known else 0) if size == -1 else size for size in shape)
    return filled if prod(filled) == numel else None


def _kind(dtype: str) -> str:
    """``float8_e4m3fn`` and ``bfloat16`` are both floating, ``uint8`` and ``int64`` both
    integers.
    """
    word = re.split(r"\d", dtype)[0]
    return {"bfloat": "float", "uint": "int"}.get(word, word)
