"""Read, cast and reorder the elements of tensors with numpy. Import it late: numpy takes time to
load.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np

from ckpttool.core.checkpoint import Lazy, Span, TensorEntry
from ckpttool.core.dtypes import itemsize
from ckpttool.core.strides import Shape
from ckpttool.io.pieces import read_all, read_span, read_spans

Array = np.ndarray[Any, Any]

TILE = 1 << 26  # bytes of a tensor that are put in order at a time; three times as much is held
_FLOATS = frozenset({"float64", "float32", "float16", "bfloat16"})
_DIRECT = {
    name: f"<{name[0]}{itemsize(name)}"
    for name in ("float64", "float32", "float16", "complex128", "complex64")
}
_DIRECT |= {f"int{bits}": f"<i{bits // 8}" for bits in (64, 32, 16, 8)}
_DIRECT |= {f"uint{bits}": f"<u{bits // 8}" for bits in (64, 32, 16, 8)} | {"bool": "u1"}
# dtype -> bits of the exponent, its bias, and which patterns are not numbers: IEEE's infinities and
# NaNs, NaN if all bits are set, or NaN instead of -0 (https://arxiv.org/abs/2209.05433,
# https://arxiv.org/abs/2206.02915).
_EIGHT_BITS = {
    "float8_e5m2": (5, 15, "ieee"),
    "float8_e4m3fn": (4, 7, "all"),
    "float8_e5m2fnuz": (5, 16, "-0"),
    "float8_e4m3fnuz": (4, 8, "-0"),
}


def reader(dtype: str) -> Callable[[bytes], Array] | None:
    """Return a function that reads little-endian bytes as numbers, exactly; None for a dtype
    without numbers.
    """
    if dtype in _DIRECT:
        return partial(np.frombuffer, dtype=_DIRECT[dtype])
    if dtype == "bfloat16":
        return lambda data: _from_upper_halves(data).view("<f4")
    if dtype == "bcomplex32":
        return lambda data: _from_upper_halves(data).view("<c8")
    if dtype == "complex32":
        return lambda data: np.frombuffer(data, "<f2").astype("<f4").view("<c8")
    if dtype in _EIGHT_BITS or dtype == "float8_e8m0fnu":
        return lambda data: _all_values(dtype)[np.frombuffer(data, np.uint8)]
    return None


def _from_upper_halves(data: bytes) -> Array:
    """Return the bits of the float32 numbers whose upper halves are given."""
    return np.frombuffer(data, "<u2").astype("<u4") << 16


@cache
def _all_values(dtype: str) -> Array:
    """Return the value of each of the 256 patterns of a dtype of eight bits."""
    if dtype == "float8_e8m0fnu":  # a power of two without a sign
        powers = [2.0 ** (bits - 127) for bits in range(255)]
        return np.array([*powers, np.nan], np.float32)
    return np.array([_value_of(bits, *_EIGHT_BITS[dtype]) for bits in range(256)], np.float32)


def _value_of(bits: int, exponent_bits: int, bias: int, special: str) -> float:
    """Return the value of a pattern of eight bits::

    sign | exponent | fraction
    """
    fraction_bits = 7 - exponent_bits
    fraction, exponent = bits % (1 << fraction_bits), (bits & 0x7F) >> fraction_bits
    sign = -1.0 if bits >> 7 else 1.0
    if special == "ieee" and exponent == (1 << exponent_bits) - 1:
        return float("nan") if fraction else sign * float("inf")
    if special == "all" and bits & 0x7F == 0x7F:
        return float("nan")
    if special == "-0" and bits == 0x80:
        return float("nan")
    if exponent:
        fraction += 1 << fraction_bits  # the leading one, which a subnormal number does not have
    return sign * fraction * 2.0 ** (max(exponent, 1) - bias - fraction_bits)


def cast(old: str, new: str) -> Callable[[bytes], memoryview] | None:
    """Return a function that casts elements and rounds as torch does (a NaN stays a NaN); None for
    other dtypes.
    """
    read = reader(old)
    if read is None or not {old, new} <= _FLOATS:
        return None

    def convert(data: bytes) -> memoryview:
        values = read(data)
        with np.errstate(all="ignore"):
            if new in ("float16", "bfloat16"):  # torch converts a double to float32 first
                values = values.astype("<f4", copy=False)
            result = (
                _round_to_bfloat16(values) if new == "bfloat16" else values.astype(_DIRECT[new])
            )
        return result.view(np.uint8).data

    return convert


def _round_to_bfloat16(values: Array) -> Array:
    """Return the upper halves of float32, rounded to the nearest, ties to even."""
    bits = values.view("<u4")
    rounded = bits >> 16  # in place from here on: the array is large
    rounded &= 1
    rounded += bits
    rounded += 0x7FFF
    rounded >>= 16
    rounded[np.isnan(values)] = 0x7FC0
    return rounded.astype("<u2")


def in_order(entry: TensorEntry) -> Iterator[memoryview]:
    """Yield the bytes of a dense tensor in row-major order, whatever its dtype and strides, `TILE`
    bytes at a time.
    """
    assert entry.storage is not None
    is_lazy = isinstance(entry.storage.data, Lazy)  # it would be computed for each tile
    if is_lazy or entry.nbytes <= TILE or not entry.shape:
        yield gathered(entry)
        return
    length, *rest = entry.shape
    step = max(1, TILE * length // entry.nbytes)
    for first in range(0, length, step):
        count = min(step, length - first)
        tile = replace(entry, shape=(count, *rest), offset=entry.offset + first * entry.stride[0])
        if count == 1:
            tile = replace(tile, shape=tuple(rest), stride=entry.stride[1:])
        yield from in_order(tile)


def gathered(entry: TensorEntry) -> memoryview:
    """Return the bytes of a dense tensor in row-major order. Reads only the bytes that it spans:
    all at once, or, if that is less than half of them, those at each place along its longest
    stride.

    a tile of a transposed matrix   |██░░░░░░|██░░░░░░|██░░░░░░|   █ is read
    """
    assert entry.storage is not None
    if not entry.numel:
        return memoryview(b"")
    data, size = entry.storage.data, itemsize(entry.dtype)
    offset, stride = 0, entry.stride
    if isinstance(data, Lazy):
        buffer, offset = read_all(data), entry.offset * size
    else:
        buffer, stride = _read_spanned(entry, data)
    strides = [step * size for step in stride]
    # raises ValueError if strides lead outside
    view = np.ndarray(entry.shape, f"V{size}", buffer, offset, strides)
    return np.ascontiguousarray(view).reshape(-1).view(np.uint8).data


def _read_spanned(entry: TensorEntry, data: Span) -> tuple[bytearray, Shape]:
    """Return the bytes that the tensor spans, and its strides in them, as `gathered` reads them."""
    size, stride = itemsize(entry.dtype), entry.stride
    start = data.offset + entry.offset * size
    extents = [(length - 1) * step for length, step in zip(entry.shape, stride)]
    spanned = 1 + sum(extents)
    everything = Span(data.path, start, spanned * size)
    dims = [dim for dim, extent in enumerate(extents) if extent]
    if not dims:
        return read_span(everything), stride
    longest = max(dims, key=lambda dim: stride[dim])
    places = entry.shape[longest]
    count = spanned - extents[longest]  # elements at each place
    if 2 * count * places > spanned:
        return read_span(everything), stride
    spans = []
    for place in range(places):
        offset = start + place * stride[longest] * size
        spans.append(Span(data.path, offset, count * size))
    return read_spans(spans), (*stride[:longest], count, *stride[longest + 1 :])
