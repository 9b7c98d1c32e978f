"""numpy_eval reads, casts and compares like torch: every bit pattern of small dtypes, random ones
of others.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from types import FrameType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ckpttool
from ckpttool.core.checkpoint import Lazy, Span, Storage, TensorEntry
from ckpttool.core.dtypes import BY_NAME, itemsize
from ckpttool.evaluate import numpy_eval, torch_eval
from ckpttool.evaluate.compare import EQUAL, difference_of_elements
from files import run_measured
from places import ROOT

NUMERIC = [name for name in BY_NAME if numpy_eval.reader(name) is not None]
SMALL = [name for name in NUMERIC if itemsize(name) <= 2 and name != "bool"]


def tensor(data: bytes, dtype: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype))


def same(found: np.ndarray, expected: torch.Tensor) -> bool:
    """Return True for equal numbers, NaN in the same positions, and the same signs of zeros."""
    with np.errstate(invalid="ignore"):  # a signalling NaN
        left, right = found.astype(np.float64), expected.to(torch.float64).numpy()
    signs = np.signbit(left) == np.signbit(right)
    return bool(np.array_equal(left, right, equal_nan=True) and (signs | np.isnan(right)).all())


@pytest.mark.parametrize("dtype", [dtype for dtype in SMALL if hasattr(torch, dtype)])
def test_reading_every_bit_pattern_matches_torch(dtype: str) -> None:
    size = itemsize(dtype)
    data = np.arange(256**size, dtype=f"<u{size}").tobytes()
    read = numpy_eval.reader(dtype)
    assert read is not None
    assert same(read(data), tensor(data, dtype))


def test_every_dtype_with_numbers_is_supported() -> None:
    named = [name for name in BY_NAME if hasattr(torch, name)]
    numbers = {
        name
        for name in named
        if getattr(torch, name).is_complex
        or getattr(torch, name).is_floating_point
        or name in _INTEGERS
    }
    assert set(NUMERIC) & set(named) == numbers - {"float4_e2m1fn_x2"}


_INTEGERS = {"bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"}


def difference(left: torch.Tensor, right: torch.Tensor, rtol: float, atol: float) -> str | None:
    """Describe with torch how tensors with different bytes differ."""
    wide = torch.complex128 if left.is_complex() else torch.float64
    a, b = left.to(wide), right.to(wide)
    equal = (a == b) | (a.isnan() & b.isnan())
    apart = (a - b).abs()
    # float64 cannot hold all of them: the distance of the integers is rounded once
    if left.dtype in (torch.int64, torch.uint64):
        x, y = (t.view(-1).tolist() for t in (left, right))
        equal = torch.tensor([p == q for p, q in zip(x, y)])
        apart = torch.tensor([abs(p - q) for p, q in zip(x, y)], dtype=torch.float64)
    close = (
        equal | (apart.isfinite() & (apart <= atol + (rtol * b).abs())) if rtol or atol else equal
    )
    count = int((~close).sum())
    if not count:
        return None if rtol or atol else EQUAL
    far = torch.where(equal | ~apart.isfinite(), 0.0, apart).max().item()
    text = f"{count:,} of {left.numel():,} elements differ" + (
        f", by {far:.3g} at most" if far else ""
    )
    counts = {
        "NaN in left": a.isnan().sum(),
        "infinite in left": a.isinf().sum(),
        "NaN in right": b.isnan().sum(),
        "infinite in right": b.isinf().sum(),
    }
    not_finite = ", ".join(f"{int(number)} {what}" for what, number in counts.items() if number)
    return f"{text}; {not_finite}" if not_finite else text


def patterns(dtype: str) -> st.SearchStrategy[bytes]:
    """Draw the bytes of an element: random bits, or zeros, subnormals, infinities and NaN."""
    size = itemsize(dtype)
    if dtype == "bool":
        return st.sampled_from([b"\0", b"\1"])
    ends = [0x00, 0x01, 0x7C, 0x7E, 0x7F, 0x80, 0xFC, 0xFF]
    special = st.sampled_from(
        [bytes([low]) * (size - 1) + bytes([high]) for low in (0, 1, 0xF0, 0xFF) for high in ends]
    )
    return st.binary(min_size=size, max_size=size) | special


@pytest.mark.parametrize("dtype", [dtype for dtype in NUMERIC if hasattr(torch, dtype)])
def test_differences_match_torch(dtype: str) -> None:
    tolerances = st.sampled_from([0.0, 1e-9, 0.01, 1.0, 1e30])

    @settings(max_examples=30)
    @given(
        st.lists(st.tuples(patterns(dtype), patterns(dtype)), min_size=1, max_size=6),
        tolerances,
        tolerances,
    )
    def agree(pairs: list[tuple[bytes, bytes]], rtol: float, atol: float) -> None:
        left, right = (b"".join(side) for side in zip(*pairs))
        expected = difference(tensor(left, dtype), tensor(right, dtype), rtol, atol)
        found = difference_of_elements(dtype, cut(left), cut(right), rtol, atol)
        assert (found and found.text) == expected
        if found is not None and (rtol, atol) == (0.0, 0.0):
            far, differing = (
                sum(count for _, count in found.spread),
                found.text.partition(" of ")[0],
            )
            # float64 may round different values to the same one
            wide = dtype in ("float64", "int64", "uint64")
            assert differing.startswith("the") or (
                far <= int(differing) if wide else far == int(differing)
            )

    agree()


@pytest.mark.parametrize("dtype", ["int64", "uint64", "int8", "uint8", "int32"])
def test_integers_within_a_tolerance_match_python(dtype: str) -> None:
    """float64 cannot hold all of these integers."""

    @settings(max_examples=60)
    @given(patterns(dtype), st.integers(-3, 3), st.sampled_from([0.5, 1.0, 2.0]))
    def agree(pattern: bytes, step: int, atol: float) -> None:
        signed = not dtype.startswith("u")
        one = int.from_bytes(pattern, "little", signed=signed)
        info = torch.iinfo(getattr(torch, dtype))
        other = min(max(one + step, info.min), info.max)
        near = other.to_bytes(len(pattern), "little", signed=signed)
        found = difference_of_elements(dtype, [pattern], [near], 0.0, atol)
        assert (found is None) == (abs(one - other) <= atol)

    agree()


def cut(data: bytes) -> list[bytes]:
    """Cut the bytes into chunks at random positions."""
    ends = sorted(random.Random(data).choices(range(len(data) + 1), k=2))
    return [data[: ends[0]], data[ends[0] : ends[1]], data[ends[1] :]]


@settings(max_examples=60)
@given(st.data())
def test_gathered_views_match_torch(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    dtype = data.draw(
        st.sampled_from([name for name in BY_NAME if hasattr(torch, name) and "x" not in name[4:]])
    )
    size = itemsize(dtype)
    path = tmp_path_factory.getbasetemp() / f"elements-of-{size}"
    if not path.exists():  # the file is shared by all examples
        path.write_bytes(random.Random(7).randbytes(200 * size))
    shape = tuple(data.draw(st.lists(st.integers(0, 4), max_size=3)))
    stride = tuple(data.draw(st.integers(0, 12)) for _ in shape)
    entry = TensorEntry(
        "w",
        dtype,
        shape,
        stride,
        data.draw(st.integers(0, 9)),
        Storage(Span(str(path), 0, 200 * size)),
    )
    numbers = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).view(200, size)
    expected = numbers.as_strided(
        (*shape, size), (*(s * size for s in stride), 1), entry.offset * size
    )
    assert bytes(numpy_eval.gathered(entry)) == bytes(torch_eval.to_bytes(expected))
    tile = data.draw(st.integers(1, 100))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(numpy_eval, "TILE", tile)
        tiles = list(numpy_eval.in_order(entry))
    assert b"".join(tiles) == bytes(torch_eval.to_bytes(expected))
    assert max(map(len, tiles)) <= max(tile, size)


_BIG = """
import os, sys
from ckpttool.core.checkpoint import Span, Storage, TensorEntry
from ckpttool.evaluate import numpy_eval
from ckpttool.evaluate.chunks import row_major
from ckpttool.io.pieces import Piece, stream
path, side, numpy_eval.TILE = sys.argv[1], *map(int, sys.argv[2:])
transposed = TensorEntry("w", "float32", (side, side), (1, side), 0, Storage(Span(path, 0, 4 * side * side)))
count = 0
for data in stream([Piece(row_major(transposed).storage.data)]):
    count += len(data)
assert count == 4 * side * side
"""


def test_a_large_matrix_is_transposed_in_tiles(tmp_path: Path) -> None:
    """For a sparse file of 64 MiB, three tiles are in memory (read, reorder, pass on), besides
    Python and numpy.
    """
    side, tile, path = 4096, 1 << 24, tmp_path / "zeros"
    with open(path, "wb") as file:
        file.truncate(4 * side * side)
    _, peak = run_measured([sys.executable, "-c", _BIG, *map(str, (path, side, tile))], ROOT)
    assert peak < 3 * tile + (60 << 20)


FLOATS = ["float64", "float32", "float16", "bfloat16"]


@pytest.mark.parametrize("new", FLOATS)
@pytest.mark.parametrize("old", FLOATS)
def test_casts_match_torch(old: str, new: str) -> None:
    """Every pattern of two bytes; of larger dtypes special and random ones, and those half-way
    between two results.
    """
    size = itemsize(old)
    if size == 2:
        data = np.arange(1 << 16, dtype="<u2").tobytes()
    else:
        values = torch.randn(20_000, generator=torch.manual_seed(0), dtype=torch.float64)
        values = values * 2.0 ** torch.randint(-160, 140, values.shape)
        halves = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
        near = [halves.view(one).double() for one in (torch.float16, torch.bfloat16)]
        half = [
            torch.nextafter(n, torch.tensor(float(way)).double())
            for n in near
            for way in ("inf", "-inf")
        ]
        half += [(n[:-1] + n[1:]) / 2 for n in near]
        numbers = torch.cat([values, *near, *half]).to(getattr(torch, old))
        data = random.Random(1).randbytes(size << 14) + bytes(torch_eval.to_bytes(numbers))
    change = numpy_eval.cast(old, new)
    assert change is not None
    found, expected = tensor(bytes(change(data)), new), tensor(data, old).to(getattr(torch, new))
    numbers = ~expected.isnan()
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch_eval.same_bits(found[numbers], expected[numbers])


def test_strides_outside_the_storage_are_an_error() -> None:
    lazy = Storage(Lazy(8, lambda: [bytes(8)]))
    for shape, stride, offset in [((3,), (1,), 0), ((2,), (-1,), 0), ((2, 2), (1, 1), 1)]:
        with pytest.raises(ValueError, match=r"incompatible|too small|offset"):
            numpy_eval.gathered(TensorEntry("w", "float32", shape, stride, offset, lazy))


def test_the_values_of_eight_bits_are_found_once() -> None:
    """Afterwards each byte of a float8 tensor is looked up."""
    state = {f"w{number}": torch.ones(4).to(torch.float8_e4m3fn) for number in range(5)}
    found = 0

    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal found
        found += event == "call" and frame.f_code.co_name == "_value_of"

    numpy_eval._all_values.cache_clear()
    sys.setprofile(count)
    try:
        ckpttool.inspect(state, stats=True)
    finally:
        sys.setprofile(None)
    assert found == 256
