"""Read bytes as numbers and compare two tensors of one dtype, with numpy alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from ckpttool.core.checkpoint import Lazy, Span, TensorEntry
from ckpttool.core.dtypes import itemsize
from ckpttool.core.values import dataclass
from ckpttool.io.ranges import read_all, read_span, read_spans

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]
    Read = Callable[[bytes], Array]

EQUAL = "the values are equal, their bytes are not (-0.0, or another kind of NaN)"
_EXPONENTS, _BIAS = 2048, 1023  # of float64
Chunks = Iterable[bytes | memoryview]
TILE = 1 << 26  # bytes of a tensor that are put in order at a time; three times as much is held
_FLOATS = frozenset({"float64", "float32", "float16", "bfloat16"})
_DIRECT = frozenset(
    {"float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool"}
)
# dtype -> bits of the exponent, its bias, and which patterns are no numbers: IEEE's infinities and NaNs, NaN where all
# bits are set, or NaN in the place of -0 (https://arxiv.org/abs/2209.05433, https://arxiv.org/abs/2206.02915).
_EIGHT_BITS = {
    "float8_e5m2": (5, 15, "ieee"),
    "float8_e4m3fn": (4, 7, "all"),
    "float8_e5m2fnuz": (5, 16, "-0"),
    "float8_e4m3fnuz": (4, 8, "-0"),
}


@dataclass(frozen=True, slots=True)
class Difference:
    """How the values of two tensors differ: in words, and how far.

    `spread` are pairs ``(exponent, count)``, sorted: so many elements are 2**exponent or more apart, and less than
    twice that; from 1023 on, they are not apart by a number. Empty where it was not measured.
    """

    text: str
    spread: tuple[tuple[int, int], ...] = ()


def reader(dtype: str) -> Read | None:
    """What makes numbers of little-endian bytes, exactly; None for a dtype whose values are no real numbers."""
    if dtype in _DIRECT:
        return partial(_direct, "uint8" if dtype == "bool" else dtype)
    if dtype == "bfloat16":
        return _bfloat16
    return partial(_looked_up, dtype) if dtype in _EIGHT_BITS or dtype == "float8_e8m0fnu" else None


def in_order(entry: TensorEntry) -> Iterator[memoryview]:
    """The bytes of a dense tensor in row-major order, whatever its dtype and strides, `TILE` of them at a time."""
    assert entry.storage is not None
    whole = isinstance(entry.storage.data, Lazy)  # it would be computed for each tile
    if whole or entry.nbytes <= TILE or not entry.shape:
        yield gathered(entry)
        return
    count = max(1, TILE * entry.shape[0] // entry.nbytes)
    for first in range(0, entry.shape[0], count):
        shape = (min(count, entry.shape[0] - first), *entry.shape[1:])
        tile = replace(entry, shape=shape, offset=entry.offset + first * entry.stride[0])
        if shape[0] == 1:
            tile = replace(tile, shape=shape[1:], stride=entry.stride[1:])
        yield from in_order(tile)


def gathered(entry: TensorEntry) -> memoryview:
    """The bytes of a dense tensor in row-major order, whatever its dtype and strides; reads only those it spans."""
    import numpy as np

    assert entry.storage is not None
    if not entry.numel:
        return memoryview(b"")
    data, size, offset, steps = entry.storage.data, itemsize(entry.dtype), 0, entry.stride
    if isinstance(data, Lazy):
        read, offset = read_all(data), entry.offset * size
    else:
        read, steps = _spanned(Span(data.path, data.offset + entry.offset * size, 0), entry, size)
    strides = [step * size for step in steps]
    view = np.ndarray(entry.shape, f"V{size}", read, offset, strides)  # raises ValueError for strides that lead outside
    return np.ascontiguousarray(view).reshape(-1).view(np.uint8).data


def _spanned(start: Span, entry: TensorEntry, size: int) -> tuple[bytearray, tuple[int, ...]]:
    """What a tensor spans from there on, and its strides in that: without the gaps along its longest stride, where
    these are more than the rest, as in a tile of a transposed matrix."""
    extents = [(length - 1) * stride for length, stride in zip(entry.shape, entry.stride)]
    whole = 1 + sum(extents)
    axis = max(range(len(extents)), key=lambda dim: entry.stride[dim] if extents[dim] else -1, default=0)
    count = whole - extents[axis] if extents else 1  # elements at each place along it
    if not extents or 2 * count * entry.shape[axis] > whole:
        return read_span(replace(start, length=whole * size)), entry.stride
    places = (start.offset + index * entry.stride[axis] * size for index in range(entry.shape[axis]))
    read = read_spans([Span(start.path, place, count * size) for place in places])
    return read, (*entry.stride[:axis], count, *entry.stride[axis + 1 :])


def cast(old: str, new: str) -> Callable[[bytes], memoryview] | None:
    """What makes elements of one dtype of those of another, rounded as torch rounds them; a NaN stays one.

    None for dtypes that are left to torch.
    """
    return partial(_cast, old, new) if {old, new} <= _FLOATS else None


def _cast(old: str, new: str, data: bytes) -> memoryview:
    import numpy as np

    values = _bfloat16(data) if old == "bfloat16" else _direct(old, data)
    with np.errstate(all="ignore"):
        if new == "bfloat16":
            made = _rounded(values.astype("<f4", copy=False))
        else:
            single = (
                values.astype("<f4", copy=False) if new == "float16" else values
            )  # torch makes no half of a double at once
            made = single.astype(np.dtype(new).newbyteorder("<"))
    return made.view(np.uint8).data


def _rounded(values: Array) -> Array:
    """The upper halves of float32, rounded to the nearest, of two to the even one."""
    import numpy as np

    bits = values.view("<u4")
    made = bits >> 16
    made &= 1
    made += bits
    made += 0x7FFF
    made >>= 16
    made[np.isnan(values)] = 0x7FC0
    rounded: Array = made.astype("<u2")
    return rounded


def whole_elements(chunks: Chunks, size: int) -> Iterator[bytes]:
    """The bytes, in chunks of whole elements of `size` bytes."""
    rest = b""
    for chunk in chunks:
        data = rest + bytes(chunk)
        end = len(data) - len(data) % size
        rest = data[end:]
        if end:
            yield data[:end]


def difference(dtype: str, left: Chunks, right: Chunks, rtol: float, atol: float) -> Difference | None:
    """How two tensors differ, in the words of `with_torch.difference`, streamed; the dtype is one that `reader` has.

    None where every element is within the tolerances (NaN equals NaN). With both 0 they are known to differ in a byte.
    """
    import numpy as np

    read, count, total, farthest = reader(dtype), 0, 0, 0.0
    exponents = np.zeros(_EXPONENTS, np.int64)
    assert read is not None
    with np.errstate(all="ignore"):
        for mine, yours in in_step(left, right, itemsize(dtype)):
            raw = read(mine), read(yours)
            a, b = (values.astype(np.float64) for values in raw)
            equal = (a == b) | (np.isnan(a) & np.isnan(b)) if raw[0].dtype.kind == "f" else raw[0] == raw[1]
            apart = _distance(*raw) if raw[0].dtype.kind in "iu" else np.abs(a - b)
            far = np.nan_to_num(np.where(equal, 0.0, apart), nan=np.inf, posinf=np.inf)
            within = apart <= atol + np.abs(rtol * b)
            close = equal | (np.isfinite(apart) & within) if rtol or atol else equal
            count, total = count + int(np.count_nonzero(~close)), total + a.size
            farthest = max(farthest, float(far.max()))
            exponents += np.bincount(far.view(np.uint64).astype(np.int64).reshape(-1) >> 52, minlength=_EXPONENTS)
    if count:
        spread = tuple((int(at) - _BIAS, int(exponents[at])) for at in np.flatnonzero(exponents) if at)
        return Difference(f"{count:,} of {total:,} elements differ, by {farthest:.3g} at most", spread)
    return None if rtol or atol else Difference(EQUAL)


def other_bits(dtype: str, left: Chunks, right: Chunks) -> Difference:
    """How many elements of two tensors differ, of a dtype that neither `reader` nor torch makes numbers of."""
    import numpy as np

    size, count, total = itemsize(dtype), 0, 0
    for mine, yours in in_step(left, right, size):
        apart = np.frombuffer(mine, f"u{size}") != np.frombuffer(yours, f"u{size}")
        count, total = count + int(np.count_nonzero(apart)), total + apart.size
    return Difference(f"{count:,} of {total:,} elements differ")


def _distance(left: Array, right: Array) -> Array:
    """How far whole numbers are apart: float64 has no room for all of them, but for that (modulo 2^64)."""
    import numpy as np

    larger, smaller = np.maximum(left, right), np.minimum(left, right)
    return (larger.astype(np.uint64) - smaller.astype(np.uint64)).astype(np.float64)


def in_step(left: Chunks, right: Chunks, size: int) -> Iterator[tuple[bytes, bytes]]:
    """The same elements of both, as many as there are of both at a time."""
    ours, theirs = whole_elements(left, size), whole_elements(right, size)
    a = b = b""
    while (a := a or next(ours, b"")) and (b := b or next(theirs, b"")):
        count = min(len(a), len(b))
        yield a[:count], b[:count]
        a, b = a[count:], b[count:]


def _direct(dtype: str, data: bytes) -> Array:
    import numpy as np

    return np.frombuffer(data, np.dtype(dtype).newbyteorder("<"))


def _bfloat16(data: bytes) -> Array:
    """The upper halves of float32."""
    import numpy as np

    return (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")


def _looked_up(dtype: str, data: bytes) -> Array:
    import numpy as np

    values: Array = _values(dtype)[np.frombuffer(data, np.uint8)]
    return values


@cache
def _values(dtype: str) -> Array:
    """What each of the 256 patterns of a dtype of eight bits is."""
    import numpy as np

    value = _scale if dtype == "float8_e8m0fnu" else partial(_small_float, *_EIGHT_BITS[dtype])
    return np.array([value(bits) for bits in range(256)], np.float32)


def _scale(bits: int) -> float:
    """A power of two without a sign."""
    return float("nan") if bits == 0xFF else 2.0 ** (bits - 127)


def _small_float(exponent_bits: int, bias: int, special: str, bits: int) -> float:
    fraction_bits = 7 - exponent_bits
    fraction, exponent = bits % (1 << fraction_bits), (bits & 0x7F) >> fraction_bits
    sign = -1.0 if bits >> 7 else 1.0
    if special == "ieee" and exponent == (1 << exponent_bits) - 1:
        return float("nan") if fraction else sign * float("inf")
    if (special == "all" and bits & 0x7F == 0x7F) or (special == "-0" and bits == 0x80):
        return float("nan")
    steps = fraction + ((1 << fraction_bits) if exponent else 0)  # without the leading one: a subnormal number
    return sign * steps * 2.0 ** (max(exponent, 1) - bias - fraction_bits)
