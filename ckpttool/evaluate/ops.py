"""The operators that an expression may hold: a closed table. Each row says what an operator needs,
and how to apply it to an index entry if it only moves bytes. Needs no torch; `torch_eval` runs all
of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from math import isfinite, prod
from typing import Any, Literal, NamedTuple

from ckpttool.core.checkpoint import Entries, Lazy, Storage, TensorEntry, in_row_major
from ckpttool.core.dtypes import itemsize
from ckpttool.core.expression import Argument, Expression, Op, Ref, Special, refs
from ckpttool.core.limits import limits
from ckpttool.core.strides import Shape, contiguous_stride, distance_to_last
from ckpttool.core.values import dataclass
from ckpttool.evaluate.chunks import concatenated, row_major, window
from ckpttool.evaluate.compare import elements, whole_elements

Arguments = Mapping[str, Any]  # by their names in torch's schema, with torch's tensors

GETITEM = "getitem"  # one of the tensors that another operator returns
CONTIGUOUS = Special("memory_format", "contiguous_format")
# the keywords of a clone whose elements are in row-major order
ROW_MAJOR = (("memory_format", CONTIGUOUS),)
_INTEGERS = range(-(2**63), 2**63)  # the integers that a kernel takes


class OnIndex(NamedTuple):
    """How to apply an operator to index entries. `takes` are the kinds of its arguments (`_KINDS`),
    optional ones after ``|``; `keyword` is the argument that it takes by name.
    """

    run: Callable[..., Any]
    takes: str
    keyword: str = ""
    needs_keyword: bool = False


@dataclass(frozen=True, slots=True)
class Operator:
    """`check` says what is wrong with arguments. `most_bytes` is an upper bound for a result whose
    shape depends on values. `moves`: optimizer state may follow, since each element of the result
    is an element of an argument, at most cast to another dtype; set only for operators that hooks
    use. `effect` tells `tracing.simplify` what it can combine: ``same`` (the
    result is the argument), ``reshape``, ``permute``, or ``undo`` (applied again it gives the
    argument back).
    """

    check: Callable[[Arguments], str | None] = lambda given: None
    most_bytes: Callable[[Arguments], int] | None = None
    moves: bool = False
    on_index: OnIndex | None = None
    effect: Literal["same", "reshape", "permute", "undo", ""] = ""


def is_integer(value: object) -> bool:
    """Return whether the value is an integer that a kernel takes."""
    return type(value) is int and value in _INTEGERS


# Checks of arguments. Torch itself does not make them: a bad argument would read foreign memory or
# end the process.


def _check_stride(given: Arguments) -> str | None:
    size, stride, offset = given["size"], given["stride"], given.get("storage_offset") or 0
    if len(size) != len(stride) or min((*size, *stride, offset), default=0) < 0:
        return "sizes, strides and the offset do not describe a tensor"
    numel = given["self"].numel()
    last = offset + distance_to_last(size, stride)
    if 0 not in size and last >= numel:
        return f"it reaches element {last:,} of {numel:,}"
    return None


def _check_parts(given: Arguments) -> str | None:
    """Count the parts before they are made: a dimension without elements may have any length."""
    shape, dim = given["self"].shape, given.get("dim", 0)
    if not -len(shape) <= dim < len(shape):
        return f"dimension {dim} does not exist"
    size = given.get("split_size", 1)
    if size < 1:
        return "the split size must be positive"
    count = given.get("chunks", -(-shape[dim] // size))
    if count > limits().made_parts:
        return f"{count:,} parts; {limits().named('made_parts')}"
    return None


def _check_divisor(given: Arguments) -> str | None:
    """Integer division by zero, and of the least integer by -1, ends the process."""
    value, divisor = given["self"], given["other"]
    if not (_is_integral(value) and _is_integral(divisor)):
        return None
    if _has(divisor, 0):
        return "integers are divided by zero"
    if _may_be_least(value) and _has(divisor, -1):
        return "the least integer is divided by -1"
    return None


def _may_be_least(value: Any) -> bool:
    """Return whether a number, or an element of a tensor, may be the least of its dtype."""
    if isinstance(value, int):
        return True
    for bits in (64, 32, 16, 8):
        if str(value.dtype) == f"torch.int{bits}":
            return _has(value, -(2 ** (bits - 1)))
    return False


def _is_integral(part: Any) -> bool:
    if isinstance(part, (int, float, complex)):
        return isinstance(part, int)
    return not (part.is_floating_point() or part.is_complex())


def _has(part: Any, number: int) -> bool:
    if isinstance(part, int):
        return part == number
    return not part.is_meta and bool((part == number).any())


def _check_index(given: Arguments) -> str | None:
    shape, dim = given["self"].shape or (1,), given["dim"]
    if not -len(shape) <= dim < len(shape):
        return f"dimension {dim} does not exist"
    return _check_range(given["index"], 0, shape[dim])


def _check_indices(given: Arguments) -> str | None:
    """Check a list of indices, one for each dimension. Masks are fine: torch checks their
    shapes.
    """
    shape, indices = given["self"].shape, given["indices"]
    if len(indices) > len(shape):
        return f"{len(indices)} indices for {len(shape)} dimensions"
    masks = numbers = 0
    reason = None
    for index, length in zip(indices, shape):
        if index is None:
            continue
        if str(index.dtype) == "torch.bool":
            masks += 1
            continue
        numbers += 1
        reason = reason or _check_range(index, -length, length)
    if masks and numbers:
        return "masks and numbers as indices of one tensor"
    return reason


def _check_range(index: Any, start: int, end: int) -> str | None:
    if str(index.dtype) not in ("torch.int64", "torch.int32"):
        return f"an index of dtype {index.dtype}"
    if index.is_meta or not index.numel():
        return None
    if int(index.min()) < start or int(index.max()) >= end:
        return f"an index is outside of {start:,}..{end - 1:,}"
    return None


def _check_scales(given: Arguments) -> str | None:
    """Check that the factors of an interpolation lead from the input's size to the output's."""
    tensor = given.get("self", given.get("input"))
    before, after = tensor.shape[2:], given.get("output_size")
    factors = given.get("scale_factors")
    if not factors:
        factors = [value for name, value in given.items() if name.startswith("scales")]
    if not before or 0 in before or (after is not None and len(after) != len(before)):
        return "the tensor does not have the dimensions to interpolate"
    if after is None and not factors:
        return "it needs a size or factors"
    for dim, factor in enumerate(factors):
        if factor is None:
            continue
        if not isfinite(factor) or not 0 < factor < 1e6 or dim >= len(before):
            return f"{factor} is not a factor"
        if after is not None and abs(factor * before[dim] - after[dim]) > 1:
            return f"a factor {factor} does not lead from {before[dim]} to {after[dim]}"
    return None


def _most_bytes_masked(given: Arguments) -> int:
    """Return the bytes of `self` if it and `mask` are expanded to one shape."""
    tensor, mask = given["self"], given["mask"]
    sizes = zip_longest(reversed(tensor.shape), reversed(mask.shape), fillvalue=1)
    return prod(map(max, sizes)) * int(tensor.element_size())


# Operators on the index. Arguments have the right kinds; what else does not fit raises
# `NotOnIndex`.


class NotOnIndex(Exception):
    """The operator or its arguments need torch."""


class _Slices(NamedTuple):
    """What ``split`` returns, before ``getitem`` takes one: an entry, in parts of these sizes."""

    entry: TensorEntry
    dim: int
    sizes: list[int]


def _narrow(entry: TensorEntry, dim: int, start: int, length: int) -> TensorEntry:
    if dim >= len(entry.shape) or start + length > entry.shape[dim]:
        raise NotOnIndex
    shape = (*entry.shape[:dim], length, *entry.shape[dim + 1 :])
    return replace(entry, shape=shape, offset=entry.offset + start * entry.stride[dim])


def _slice(entry: TensorEntry, dim: int, start: int, end: int) -> TensorEntry:
    if dim >= len(entry.shape):
        raise NotOnIndex
    length = entry.shape[dim]
    start, end = min(start, length), min(end, length)
    if end < start:
        raise NotOnIndex
    return _narrow(entry, dim, start, end - start)


def _select(entry: TensorEntry, dim: int, index: int) -> TensorEntry:
    part = _narrow(entry, dim, index, 1)
    shape = (*part.shape[:dim], *part.shape[dim + 1 :])
    stride = (*part.stride[:dim], *part.stride[dim + 1 :])
    return replace(part, shape=shape, stride=stride)


def _split(entry: TensorEntry, size: int, dim: int = 0) -> _Slices:
    if dim >= len(entry.shape) or size < 1:
        raise NotOnIndex
    length = entry.shape[dim]
    if -(-length // size) > limits().made_parts:
        raise NotOnIndex
    sizes = [min(size, length - start) for start in range(0, length, size)]
    return _Slices(entry, dim, sizes)


def _chunk(entry: TensorEntry, count: int, dim: int = 0) -> _Slices:
    if dim >= len(entry.shape) or count < 1:
        raise NotOnIndex
    return _split(entry, -(-entry.shape[dim] // count), dim)


def _split_with_sizes(entry: TensorEntry, sizes: Shape, dim: int = 0) -> _Slices:
    if dim >= len(entry.shape) or sum(sizes) != entry.shape[dim]:
        raise NotOnIndex
    return _Slices(entry, dim, list(sizes))


def _item(parts: _Slices, index: int) -> TensorEntry:
    if index >= len(parts.sizes):
        raise NotOnIndex
    return _narrow(parts.entry, parts.dim, sum(parts.sizes[:index]), parts.sizes[index])


def _permute(entry: TensorEntry, dims: tuple[int, ...]) -> TensorEntry:
    if sorted(dims) != list(range(len(entry.shape))):
        raise NotOnIndex
    shape = tuple(entry.shape[dim] for dim in dims)
    stride = tuple(entry.stride[dim] for dim in dims)
    return replace(entry, shape=shape, stride=stride)


def _reshape(entry: TensorEntry, shape: Shape) -> TensorEntry:
    if not entry.is_contiguous or prod(shape) != entry.numel:
        raise NotOnIndex
    return replace(entry, shape=shape, stride=contiguous_stride(shape))


def _clone(entry: TensorEntry, memory_format: Special | None = None) -> TensorEntry:
    if memory_format == CONTIGUOUS:
        entry = row_major(entry)
    elif memory_format is not None or not entry.is_contiguous:
        raise NotOnIndex
    storage = concatenated([window(entry, 0, entry.numel)], entry.storage)
    return replace(entry, stride=contiguous_stride(entry.shape), offset=0, storage=storage)


def _to_copy(entry: TensorEntry, dtype: Special) -> TensorEntry:
    from ckpttool.evaluate import numpy_eval

    cast = numpy_eval.cast(entry.dtype, dtype.name)
    if cast is None or dtype.kind != "dtype":
        raise NotOnIndex
    assert entry.storage is not None
    lazy = Lazy(
        entry.numel * itemsize(dtype.name),
        lambda: map(cast, whole_elements(elements(entry), itemsize(entry.dtype))),
        reads=entry.nbytes,
        memory=entry.storage.held,
    )
    return in_row_major(entry.key, dtype.name, entry.shape, Storage(lazy, entry.storage))


def _cat(parts: tuple[TensorEntry, ...], dim: int = 0) -> TensorEntry:
    """Put contiguous tensors end to end: dimensions before `dim` must be 1."""
    first = parts[0]
    head, tail = first.shape[:dim], first.shape[dim + 1 :]
    if dim >= len(first.shape) or prod(head) != 1:
        raise NotOnIndex
    length = 0
    for part in parts:
        if part.dtype != first.dtype or not part.is_contiguous:
            raise NotOnIndex
        size = part.shape[dim : dim + 1]
        if (*head, *size, *tail) != part.shape or not size:
            raise NotOnIndex
        length += size[0]
    shape = (*head, length, *tail)
    storage = concatenated([window(part, 0, part.numel) for part in parts], first.storage)
    return replace(first, shape=shape, stride=contiguous_stride(shape), offset=0, storage=storage)


def _stack(parts: tuple[TensorEntry, ...], dim: int) -> TensorEntry:
    def unsqueezed(entry: TensorEntry) -> TensorEntry:
        if dim > len(entry.shape):
            raise NotOnIndex
        shape = (*entry.shape[:dim], 1, *entry.shape[dim:])
        stride = (*entry.stride[:dim], 1, *entry.stride[dim:])
        return replace(entry, shape=shape, stride=stride)

    return _cat(tuple(map(unsqueezed, parts)), dim)


def _is_size(value: object) -> bool:
    return type(value) is int and value >= 0


def _is_tensor(value: object) -> bool:
    return isinstance(value, TensorEntry)


def _are_tensors(value: object) -> bool:
    return type(value) is tuple and bool(value) and all(map(_is_tensor, value))


_KINDS: Mapping[str, Callable[[Any], bool]] = {
    "t": _is_tensor,
    "T": _are_tensors,
    "i": _is_size,
    "I": lambda value: type(value) is tuple and all(map(_is_size, value)),  # sizes
    "p": lambda value: isinstance(value, _Slices),  # parts of a tensor
}


def on_index(key: str, source: Expression, entries: Entries) -> TensorEntry | None:
    """Return the entry `key` with the value of `source`: as in torch a view if it is one, else
    bytes laid end to end.

    Return None if the value must be computed, if an operator does not fit its arguments, and if the
    value is far larger than what it is made of (by ``expand``): torch computes it within a limit.
    """
    try:
        entry = _value(source, entries)
    except NotOnIndex:
        return None
    nbytes = 0
    for name in set(refs(source)):
        read = entries[name]
        if isinstance(read, TensorEntry):
            nbytes += read.nbytes
    most = max(limits().made_bytes, limits().made_times * nbytes)
    if not isinstance(entry, TensorEntry) or entry.nbytes > most:
        return None
    # new tuples: a pickle refers back to a tuple it has written
    shape, stride = (*entry.shape,), (*entry.stride,)
    return replace(entry, key=key, shape=shape, stride=stride, payload=None)


def _value(node: Argument, entries: Entries) -> Any:
    if isinstance(node, Ref):
        entry = entries[node.key]
        if not isinstance(entry, TensorEntry) or entry.storage is None:
            raise NotOnIndex
        return entry
    if isinstance(node, tuple):
        return tuple(_value(item, entries) for item in node)
    if not isinstance(node, Op):
        return node
    operator = OPS.get(node.op)
    row = None if operator is None else operator.on_index
    if row is None:
        raise NotOnIndex
    args, kwargs = [_value(arg, entries) for arg in node.args], dict(node.kwargs)
    if not _fits(row, args, kwargs):
        raise NotOnIndex
    return row.run(*args, **kwargs)


def _fits(row: OnIndex, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether the row takes these arguments."""
    needed, _, optional = row.takes.partition("|")
    kinds = needed + optional
    if not len(needed) <= len(args) <= len(kinds):
        return False
    for kind, arg in zip(kinds, args):
        if not _KINDS[kind](arg):
            return False
    for name, value in kwargs.items():
        if name != row.keyword or not isinstance(value, Special):
            return False
    return bool(kwargs) or not row.needs_keyword


# The table

OPS: dict[str, Operator] = {GETITEM: Operator(moves=True, on_index=OnIndex(_item, "pi"))}


_COMPUTES, _MOVES = Operator(), Operator(moves=True)


def _rows(names: str, row: Operator = _COMPUTES, overloads: str = "default") -> None:
    for name in names.split():
        if "." in name:
            OPS[f"aten.{name}"] = row
            continue
        for overload in overloads.split():
            OPS[f"aten.{name}.{overload}"] = row


# Other order or shape of the same elements
_rows("alias detach contiguous", Operator(moves=True, effect="same"))
_rows("clone", Operator(moves=True, on_index=OnIndex(_clone, "t", "memory_format"), effect="same"))
_rows(
    "view unsqueeze squeeze squeeze.dim squeeze.dims flatten.using_ints",
    Operator(moves=True, effect="reshape"),
)
_rows("reshape", Operator(moves=True, on_index=OnIndex(_reshape, "tI"), effect="reshape"))
_rows("t transpose.int", Operator(moves=True, effect="permute"))
_rows("permute", Operator(moves=True, on_index=OnIndex(_permute, "tI"), effect="permute"))
_rows("numpy_T", Operator(effect="permute"))
_rows("flip", Operator(moves=True, effect="undo"))
_rows("movedim.int movedim.intlist swapaxes _unsafe_view view.dtype unflatten.int roll", _MOVES)
_rows(
    "_to_copy", Operator(moves=True, on_index=OnIndex(_to_copy, "t", "dtype", needs_keyword=True))
)
_rows(
    "copy resolve_conj resolve_neg view_as_real view_as_complex real imag _conj conj_physical"
    " rot90 pixel_shuffle pixel_unshuffle channel_shuffle"
)
# Fewer or more elements
_rows("narrow", Operator(moves=True, on_index=OnIndex(_narrow, "tiii")))
_rows("select.int", Operator(moves=True, on_index=OnIndex(_select, "tii")))
_rows("slice.Tensor", Operator(moves=True, on_index=OnIndex(_slice, "tiii")))
_rows("cat", Operator(moves=True, on_index=OnIndex(_cat, "T|i")))
_rows("stack", Operator(moves=True, on_index=OnIndex(_stack, "Ti")))
_rows("expand", _MOVES)
_rows("split.Tensor", Operator(_check_parts, moves=True, on_index=OnIndex(_split, "ti|i")))
_rows("chunk", Operator(_check_parts, moves=True, on_index=OnIndex(_chunk, "ti|i")))
_rows("split_with_sizes", Operator(moves=True, on_index=OnIndex(_split_with_sizes, "tI|i")))
_rows("unbind.int", Operator(_check_parts, moves=True))
_rows("unsafe_split.Tensor unsafe_chunk", Operator(_check_parts))
_rows("unsafe_split_with_sizes")
_rows("index_select", Operator(_check_index, moves=True))
_rows(
    "gather scatter.src scatter.value scatter_add index_copy index_add index_fill.int_Scalar",
    Operator(_check_index),
)
_rows("index.Tensor", Operator(_check_indices, lambda given: nbytes_of(given["self"]), moves=True))
_rows("index_put", Operator(_check_indices))
_rows("as_strided as_strided_scatter", Operator(_check_stride))
_rows("masked_select", Operator(most_bytes=_most_bytes_masked))
_rows(
    "nonzero",
    Operator(
        most_bytes=lambda given: (
            8 * max(1, given["self"].dim()) * max(1, int(given["self"].numel()))
        )
    ),
)
_rows(
    "diagonal unfold repeat tile repeat_interleave.self_int tril triu constant_pad_nd diag"
    " diag_embed slice_scatter select_scatter diagonal_scatter block_diag"
)
# Constants
_rows(
    "full zeros ones scalar_tensor eye eye.m arange arange.start arange.start_step linspace"
    " tril_indices triu_indices"
)
# Of one tensor, element by element
_rows("neg bitwise_not", Operator(effect="undo"))
_rows(
    "abs sign sqrt rsqrt square reciprocal exp exp2 expm1 log log2 log10 log1p sin cos tan asin"
    " acos atan sinh cosh tanh asinh acosh atanh sigmoid erf erfc floor ceil round"
    " round.decimals trunc frac relu silu gelu softplus leaky_relu elu nan_to_num isnan isinf"
    " isposinf isneginf isfinite logical_not signbit sgn angle positive logit erfinv"
)
# Of two tensors, element by element
_rows("add sub rsub mul div eq ne lt le gt ge __lshift__ __rshift__", overloads="Tensor Scalar")
_rows("bitwise_and bitwise_or bitwise_xor", overloads="Tensor Scalar Scalar_Tensor")
_rows("pow", overloads="Tensor_Tensor Tensor_Scalar Scalar")
_rows("bitwise_left_shift bitwise_right_shift", overloads="Tensor Tensor_Scalar Scalar_Tensor")
_rows("lerp masked_fill", overloads="Scalar Tensor")
_rows("where", overloads="self ScalarSelf ScalarOther Scalar")
_rows(
    "maximum minimum fmax fmin logical_and logical_or logical_xor atan2 hypot copysign.Tensor"
    " copysign.Scalar complex polar ldexp.Tensor xlogy.Tensor logaddexp heaviside addcmul"
    " addcdiv"
)
_rows("clamp clamp_min clamp_max", overloads="default Tensor")
_rows("div", Operator(_check_divisor), "Tensor_mode Scalar_mode")
_rows("remainder fmod", Operator(_check_divisor), "Tensor Scalar")
_rows("floor_divide floor_divide.Scalar", Operator(_check_divisor))
# Reductions and orders
_rows("any all max min", overloads="default dim")
_rows("std var std_mean var_mean", overloads="correction")
_rows(
    "sum sum.dim_IntList mean mean.dim prod prod.dim_int amax amin argmax argmin norm.Scalar"
    " norm.ScalarOpt_dim linalg_vector_norm logsumexp cumsum cumprod count_nonzero.dim_IntList"
    " _softmax _log_softmax nansum aminmax trace sort sort.stable argsort argsort.stable topk"
)
# Products
_rows("mm bmm mv dot vdot addmm addmv addr baddbmm matmul outer")
# Lists of tensors
_rows("_foreach_add _foreach_sub _foreach_mul _foreach_div", overloads="Scalar List")
_rows("_foreach_neg _foreach_abs _foreach_sqrt")
# Interpolations
_rows(
    "upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d"
    " _upsample_nearest_exact2d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d"
    " upsample_bicubic2d upsample_trilinear3d _upsample_bilinear2d_aa _upsample_bicubic2d_aa",
    Operator(_check_scales),
    "default vec",
)


def reason_not_allowed(name: str) -> str | None:
    """Return why an expression may not hold the operator, or None if it may."""
    return None if name in OPS else f"{name[:100]!r} is not an operator that a plan may hold"


def nbytes_of(result: Any) -> int:
    """Return the bytes of a torch tensor, or of all tensors of a list."""
    if isinstance(result, (list, tuple)):
        return sum(map(nbytes_of, result))
    return int(result.numel()) * int(result.element_size())
