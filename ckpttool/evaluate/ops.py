"""The operators that an expression may hold: a closed list, with the checks of their arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from math import isfinite
from typing import Any

from ckpttool.core.limits import limits
from ckpttool.core.values import dataclass

Arguments = Mapping[str, Any]  # by their names in torch's schema; what is left out is not there
Check = Callable[[Arguments], "str | None"]  # what is wrong with them, or None

_INTEGERS = range(-(2**63), 2**63)  # what an integer argument of a kernel holds


@dataclass(frozen=True, slots=True)
class Operator:
    """What an operator demands. `most` are the bytes that it gives at most, where only the values tell how many."""

    check: Check = lambda given: None
    most: Callable[[Arguments], int] | None = None


def problem(name: str) -> str | None:
    """Why no expression may hold the operator of that name; None where it may."""
    return None if name in OPERATORS else f"{name[:100]!r} is not an operator that a plan may hold"


def is_integer(value: object) -> bool:
    """Whether the value is an integer that a kernel can hold."""
    return type(value) is int and value in _INTEGERS


# What operators demand


def _inside(given: Arguments) -> str | None:
    """`as_strided` counts the elements of its tensor: the last one that it reaches has to be one of them."""
    size, stride, offset = given["size"], given["stride"], given.get("storage_offset") or 0
    if len(size) != len(stride) or min((*size, *stride, offset), default=0) < 0:
        return "sizes, strides and the offset are not those of a tensor"
    last = offset + sum((n - 1) * step for n, step in zip(size, stride))
    if 0 not in size and last >= given["self"].numel():
        return f"it reaches element {last:,} of {given['self'].numel():,}"
    return None


def _few_parts(given: Arguments) -> str | None:
    """A dimension without elements may be as long as it likes: its parts are counted before they are made."""
    shape, dim = given["self"].shape, given.get("dim", 0)
    if not -len(shape) <= dim < len(shape):
        return f"there is no dimension {dim}"
    size = given.get("split_size", 1)
    if size < 1:
        return "parts without elements have no number"
    count = given["chunks"] if "chunks" in given else -(-shape[dim] // size)
    return None if count <= limits().made_parts else f"{count:,} parts; {limits().named('made_parts')}"


def _divides(given: Arguments) -> str | None:
    """Integers are divided by the machine, which ends a program that divides by zero, or its least number by -1."""
    parts = [given["self"], given["other"]]
    if any(_is_inexact(part) for part in parts):
        return None
    if _any(parts[1], 0):
        return "integers are divided by zero"
    return "the least integer is divided by -1" if _any(parts[1], -1) and _holds_least(parts[0]) else None


def _is_inexact(part: Any) -> bool:
    if isinstance(part, (int, float, complex)):
        return not isinstance(part, int)
    return bool(part.is_floating_point() or part.is_complex())


def _any(part: Any, value: int) -> bool:
    if isinstance(part, int):
        return part == value
    return not part.is_meta and bool((part == value).any())


def _holds_least(part: Any) -> bool:
    return isinstance(part, int) or any(_any(part, -(2**bits)) for bits in (63, 31, 15, 7) if _fits(part, bits))


def _fits(part: Any, bits: int) -> bool:
    return str(part.dtype) == f"torch.int{bits + 1}"


def _indices_inside(given: Arguments) -> str | None:
    """The values of `index` lie inside of the dimension `dim`."""
    shape, dim = given["self"].shape, given["dim"]
    if not -max(len(shape), 1) <= dim < max(len(shape), 1):
        return f"there is no dimension {dim}"
    return _outside(given["index"], shape[dim] if shape else 1, negative=False)


def _outside(index: Any, length: int, *, negative: bool) -> str | None:
    """With `negative` indices count from the end, too."""
    if str(index.dtype) not in ("torch.int64", "torch.int32"):
        return f"an index of dtype {index.dtype}"
    if index.is_meta or not index.numel():
        return None
    low, high = int(index.min()), int(index.max())
    return None if (-length if negative else 0) <= low and high < length else f"an index is not inside of {length:,}"


def _all_indices_inside(given: Arguments) -> str | None:
    """As `_indices_inside` for a list of indices, one a dimension; or masks alone, of which torch checks the shapes."""
    shape, indices = given["self"].shape, given["indices"]
    if len(indices) > len(shape):
        return f"{len(indices)} indices for {len(shape)} dimensions"
    real = [(index, length) for index, length in zip(indices, shape) if index is not None]
    masks = [str(index.dtype) == "torch.bool" for index, _ in real]
    if any(masks):
        return None if all(masks) else "masks and numbers as indices of one tensor"
    return next(filter(None, (_outside(index, length, negative=True) for index, length in real)), None)


def _scales(given: Arguments) -> str | None:
    """The factors of an interpolation are those that lead from the input's size to the output's."""
    size = given.get("output_size")
    before = (given.get("self", given.get("input"))).shape[2:]
    factors = [value for name, value in given.items() if name.startswith("scales")]
    factors = given.get("scale_factors") or factors
    if not before or 0 in before or (size is not None and len(size) != len(before)):
        return "it interpolates dimensions that the tensor has not"
    if size is None and not factors:
        return "neither a size nor factors are given"
    for index, factor in enumerate(factors):
        if factor is None:
            continue
        if not isfinite(factor) or not 0 < factor < 1e6 or index >= len(before):
            return f"no factor: {factor}"
        if size is not None and abs(factor * before[index] - size[index]) > 1:
            return f"a factor {factor} does not lead from {before[index]} to {size[index]}"
    return None


def _as_many_as_it(given: Arguments) -> int:
    return sizes(given["self"])


def _as_many_as_both(given: Arguments) -> int:
    """Bytes of `self` where it and `mask` are expanded to one shape."""
    left, right = tuple(given["self"].shape), tuple(given["mask"].shape)
    numel = 1
    for pair in zip_longest(reversed(left), reversed(right), fillvalue=1):
        numel *= int(max(pair))
    return numel * int(given["self"].element_size())


def _an_index_each(given: Arguments) -> int:
    return 8 * max(1, len(given["self"].shape)) * max(1, int(given["self"].numel()))


# The list


def _each(names: str) -> list[str]:
    return [f"aten.{name}" if "." in name else f"aten.{name}.default" for name in names.split()]


def _overloads(names: str, overloads: str) -> list[str]:
    return [f"aten.{name}.{overload}" for name in names.split() for overload in overloads.split()]


_SAME_ELEMENTS = _each(
    "alias detach clone contiguous _to_copy copy resolve_conj resolve_neg t numpy_T transpose.int permute movedim.int "
    "movedim.intlist swapaxes view _unsafe_view reshape view.dtype squeeze squeeze.dim squeeze.dims unsqueeze "
    "flatten.using_ints unflatten.int view_as_real view_as_complex real imag _conj conj_physical flip roll rot90 "
    "pixel_shuffle pixel_unshuffle channel_shuffle"
)
_FEWER_OR_MORE = _each(
    "select.int slice.Tensor narrow diagonal unfold expand repeat tile repeat_interleave.self_int cat stack tril triu "
    "constant_pad_nd diag diag_embed slice_scatter select_scatter diagonal_scatter block_diag"
)
_MADE_OF_NUMBERS = _each(
    "full zeros ones scalar_tensor eye eye.m arange arange.start arange.start_step linspace tril_indices triu_indices"
)
_OF_ONE = _each(
    "abs neg sign sqrt rsqrt square reciprocal exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan sinh "
    "cosh tanh asinh acosh atanh sigmoid erf erfc floor ceil round round.decimals trunc frac relu silu gelu softplus "
    "leaky_relu elu nan_to_num isnan isinf isposinf isneginf isfinite bitwise_not logical_not signbit sgn angle "
    "positive logit erfinv"
)
_OF_TWO = [
    *_overloads("add sub rsub mul div eq ne lt le gt ge", "Tensor Scalar"),
    *_overloads("bitwise_and bitwise_or bitwise_xor", "Tensor Scalar Scalar_Tensor"),
    *_overloads("pow", "Tensor_Tensor Tensor_Scalar Scalar"),
    *_overloads("bitwise_left_shift bitwise_right_shift", "Tensor Tensor_Scalar Scalar_Tensor"),
    *_overloads("__lshift__ __rshift__", "Tensor Scalar"),
    *_overloads("lerp masked_fill", "Scalar Tensor"),
    *_overloads("where", "self ScalarSelf ScalarOther Scalar"),
    *_each("maximum minimum fmax fmin logical_and logical_or logical_xor atan2 hypot copysign.Tensor copysign.Scalar"),
    *_each("complex polar ldexp.Tensor xlogy.Tensor logaddexp heaviside"),
    *_each("addcmul addcdiv clamp clamp.Tensor clamp_min clamp_min.Tensor clamp_max clamp_max.Tensor"),
]
_INTEGER_DIVISION = [
    *_overloads("div", "Tensor_mode Scalar_mode"),
    *_overloads("remainder fmod", "Tensor Scalar"),
    *_each("floor_divide floor_divide.Scalar"),
]
_REDUCTIONS = [
    *_overloads("any all", "default dim"),
    *_overloads("max min", "default dim"),
    *_overloads("std var std_mean var_mean", "correction"),
    *_each(
        "sum sum.dim_IntList mean mean.dim prod prod.dim_int amax amin argmax argmin norm.Scalar norm.ScalarOpt_dim"
    ),
    *_each("linalg_vector_norm logsumexp cumsum cumprod count_nonzero.dim_IntList _softmax _log_softmax"),
    *_each("nansum aminmax trace"),
    *_each("sort sort.stable argsort argsort.stable topk"),
]
_PRODUCTS = _each("mm bmm mv dot vdot addmm addmv addr baddbmm matmul outer")
_OF_LISTS = [
    *_overloads("_foreach_add _foreach_sub _foreach_mul _foreach_div", "Scalar List"),
    *_each("_foreach_neg _foreach_abs _foreach_sqrt"),
]
_INTERPOLATIONS = [
    *_overloads("upsample_nearest1d upsample_nearest2d upsample_nearest3d", "default vec"),
    *_overloads("_upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d", "default vec"),
    *_overloads("upsample_linear1d upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d", "default vec"),
    *_overloads("_upsample_bilinear2d_aa _upsample_bicubic2d_aa", "default vec"),
]
_ROWS: tuple[tuple[list[str], Operator], ...] = (
    (_SAME_ELEMENTS, Operator()),
    (_FEWER_OR_MORE, Operator()),
    (_MADE_OF_NUMBERS, Operator()),
    (_OF_ONE, Operator()),
    (_OF_TWO, Operator()),
    (_REDUCTIONS, Operator()),
    (_PRODUCTS, Operator()),
    (_OF_LISTS, Operator()),
    (_INTEGER_DIVISION, Operator(_divides)),
    (_INTERPOLATIONS, Operator(_scales)),
    (_each("as_strided as_strided_scatter"), Operator(_inside)),
    (_each("split.Tensor unbind.int chunk unsafe_split.Tensor unsafe_chunk"), Operator(_few_parts)),
    (_each("split_with_sizes unsafe_split_with_sizes"), Operator()),
    (_each("index_select gather scatter.src scatter.value scatter_add"), Operator(_indices_inside)),
    (_each("index_copy index_add index_fill.int_Scalar"), Operator(_indices_inside)),
    (_each("index.Tensor"), Operator(_all_indices_inside, _as_many_as_it)),
    (_each("index_put"), Operator(_all_indices_inside)),
    (_each("masked_select"), Operator(most=_as_many_as_both)),
    (_each("nonzero"), Operator(most=_an_index_each)),
)
GETITEM = "getitem"  # one of the tensors that another operator gives
OPERATORS: Mapping[str, Operator] = {GETITEM: Operator()} | {name: row for names, row in _ROWS for name in names}


def unfit(name: str, given: Arguments) -> str | None:
    """What is wrong with the arguments of an operator of the list; None where nothing is."""
    return OPERATORS[name].check(given)


def sizes(found: Any) -> int:
    """Bytes of a tensor, or of all tensors of a list."""
    if isinstance(found, Sequence):
        return sum(map(sizes, found))
    return int(found.numel()) * int(found.element_size())
