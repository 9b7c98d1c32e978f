"""The values of quantized weights as expressions over their parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ckpttool.core.checkpoint import Section, in_row_major
from ckpttool.core.expression import Argument, Expression, Op, Special
from ckpttool.core.strides import Shape
from ckpttool.kinds.quantized import FLOAT8, QuantizedWeight, quantized_weights
from ckpttool.ruleset.tensor_ops import DENSE, Value, cast, refusal

Block = tuple[int, int]  # rows and columns that share a scale

_SCALES = ("_scale", "_scale_inv", "scale_weight")  # ends of the parts that a weight is scaled by
_OF_INPUTS = ("input_scale", "scale_input")  # scales of activations
_E8M0 = "float8_e8m0fnu"  # a power of two, as MXFP4 and some FP8 write their scales


def weights_of(state: Mapping[str, Value]) -> Sequence[QuantizedWeight]:
    """Return the quantized weights among the tensors."""
    entries = []
    for key, value in state.items():
        if value.dtype:  # else it is not a tensor
            entries.append(in_row_major(key, value.dtype, value.shape, None))
    return quantized_weights(Section("", "state_dict", tuple(entries)))


def is_without_scale(value: Value) -> bool:
    """Return whether the tensor is FP8, whose values mean nothing without a scale."""
    return value.dtype in FLOAT8


def dequantized(
    weight: QuantizedWeight, state: Mapping[str, Value], dtype: str, block: Block | None
) -> Value:
    """Return the values of a weight in a floating-point dtype. Raise `Refused` for schemes that
    only the library that quantized it knows.
    """
    numbers = state[weight.weight]
    is_mxfp4 = weight.scheme == "MXFP4"
    parts = [key for key in weight.others if not key.endswith(_OF_INPUTS)]
    is_scaled = len(parts) == 1 and (is_mxfp4 or parts[0].endswith(_SCALES))
    if not is_scaled or numbers.dtype not in (*FLOAT8, "int8", "uint8"):
        raise refusal(f"{weight.scheme}: only the library that quantized it knows the values")
    scale = state[parts[0]]
    if numbers.layout != DENSE or scale.layout != DENSE:
        raise refusal("not a dense tensor")
    if is_mxfp4:
        return _of_mxfp4(numbers, scale, dtype)
    if numbers.dtype == "uint8":
        raise refusal(f"{weight.scheme}: uint8 without a zero point")
    return _scaled(numbers, scale, dtype, block)


def _scaled(numbers: Value, scale: Value, dtype: str, block: Block | None) -> Value:
    """Return numbers times their scales: one for each tensor, channel, or block."""
    shape, grid = numbers.shape, scale.shape
    values = cast(numbers, "float32")
    scales = cast(_as_float(scale), "float32").source
    mismatch = refusal(f"a scale of shape {list(grid)} for a tensor of shape {list(shape)}")
    if len(shape) < 2:
        raise mismatch
    if scale.numel == 1:
        product: Expression = _multiplied(values.source, _reshaped(scales, ()))
    elif len(shape) == 2 and grid == shape[:1]:
        product = _multiplied(values.source, _reshaped(scales, (*grid, 1)))
    elif len(grid) == len(shape) and grid[:-2] == shape[:-2]:
        product = _by_block(values.source, scales, shape, grid, block)
    else:
        raise mismatch
    return cast(replace(values, source=product, origin=None), dtype)


def _by_block(
    numbers: Expression,
    scale: Expression,
    shape: Shape,
    grid: Shape,
    block: Block | None,
) -> Expression:
    """Return the numbers times the scale of their block.

    Complete blocks become dimensions:   [rows, columns] -> [i, rows of a block, j, ...]
    else the scales are repeated, and cut to the shape.
    """
    lead = shape[:-2]
    high, wide = grid[-2:]  # how many blocks
    rows, columns = block or (None, None)
    rows = _block_size(shape[-2], high, rows)
    columns = _block_size(shape[-1], wide, columns)
    if (high * rows, wide * columns) == shape[-2:]:
        blocks = _reshaped(numbers, (*lead, high, rows, wide, columns))
        scales = _reshaped(scale, (*lead, high, 1, wide, 1))
        return _reshaped(_multiplied(blocks, scales), shape)
    for dim, size in ((len(lead), rows), (len(lead) + 1, columns)):
        scale = _op("repeat_interleave.self_int", scale, size, dim)
        scale = _op("narrow.default", scale, dim, 0, shape[dim])
    return _multiplied(numbers, scale)


def _block_size(length: int, count: int, given: int | None) -> int:
    """Return the size of blocks, `count` of which cover the length. Raise `Refused` if several
    sizes do, and none is given.
    """
    if given is not None:
        if -(-length // given) != count:
            raise refusal(f"{count} blocks of {given} do not cover {length}")
        return given
    sizes = set()
    if count and length % count == 0:
        sizes.add(length // count)
    power = 1
    while count > 1 and -(-length // power) > count:
        power *= 2
    if -(-length // power) == count:
        sizes.add(power)
    if count == 1:
        sizes = {length}
    if len(sizes) != 1:
        fitting = " or ".join(map(str, sorted(sizes))) or "no size"
        raise refusal(
            f"{count} blocks cover {length} with {fitting}: block = [128, 128] says which"
        )
    return sizes.pop()


def _of_mxfp4(blocks: Value, scales: Value, dtype: str) -> Value:
    """Return the values of pairs of 4-bit numbers (e2m1) with a power of two for each group, as
    transformers loads them: experts, columns, rows.
    """
    if len(blocks.shape) != 4 or blocks.shape[:-1] != scales.shape:
        raise refusal(f"blocks of shape {list(blocks.shape)}, scales of {list(scales.shape)}")
    experts, rows, groups, pairs = blocks.shape
    columns = groups * pairs * 2
    low = _op("bitwise_and.Scalar", blocks.source, 15)
    high = _op("bitwise_right_shift.Tensor_Scalar", blocks.source, 4)
    bits = _op("stack.default", (low, high), -1)
    # The sign and the other bits at their places in e4m3. Its bias is larger by 6: times 64
    sign = _op("bitwise_left_shift.Tensor_Scalar", _op("bitwise_and.Scalar", bits, 8), 4)
    rest = _op("bitwise_left_shift.Tensor_Scalar", _op("bitwise_and.Scalar", bits, 7), 2)
    numbers = _viewed(_op("bitwise_or.Tensor", sign, rest), "float8_e4m3fn")
    wide = "bfloat16" if dtype == "bfloat16" else "float32"
    values = _op("mul.Scalar", _cast_to(numbers, wide), 64)
    factors = _cast_to(_viewed(scales.source, _E8M0), wide)
    factors = _reshaped(factors, (*scales.shape, 1, 1))
    by_row = _reshaped(_multiplied(values, factors), (experts, rows, columns))
    by_column = _op("clone.default", _op("permute.default", by_row, (0, 2, 1)))
    return cast(Value(by_column, wide, (experts, columns, rows), None, DENSE), dtype)


def _as_float(scale: Value) -> Value:
    """Return a scale; one in bytes is the exponent of a power of two."""
    if scale.dtype != "uint8":
        return scale
    return replace(scale, source=_viewed(scale.source, _E8M0), dtype=_E8M0)


def _op(name: str, *args: Argument) -> Op:
    return Op(f"aten.{name}", args)


def _multiplied(left: Expression, right: Expression) -> Op:
    return _op("mul.Tensor", left, right)


def _reshaped(source: Expression, shape: Shape) -> Op:
    return _op("reshape.default", source, shape)


def _viewed(source: Expression, dtype: str) -> Op:
    return _op("view.dtype", source, Special("dtype", dtype))


def _cast_to(source: Expression, dtype: str) -> Op:
    return Op("aten._to_copy.default", (source,), (("dtype", Special("dtype", dtype)),))
