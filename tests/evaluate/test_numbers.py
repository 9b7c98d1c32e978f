"""Numbers are read, compared and cast like torch does, without torch: every bit pattern of small
dtypes, random ones of others.
"""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpttool
from files import run_measured
from places import ROOT

INTEGERS = ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
FLOATS = ["float64", "float32", "float16", "bfloat16"]
SMALL_FLOATS = ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"]
SMALL_FLOATS += ["float8_e8m0fnu"] * hasattr(torch, "float8_e8m0fnu")
COMPLEX = ["complex64", "complex128"]
NUMBERS = [*INTEGERS, *FLOATS, *SMALL_FLOATS, *COMPLEX]
ENDS = [0x00, 0x01, 0x7C, 0x7E, 0x7F, 0x80, 0xFC, 0xFF]


def dtype_of(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def patterns(dtype: str, count: int, chance: random.Random) -> bytes:
    """Return elements of random bits, and zeros, subnormals, infinities and NaN."""
    size = dtype_of(dtype).itemsize
    if dtype == "bool":
        return bytes(chance.choices([0, 1], k=count))
    elements = []
    for _ in range(count):
        special = bytes([chance.choice([0, 1, 0xF0, 0xFF])]) * (size - 1)
        special += bytes([chance.choice(ENDS)])
        elements.append(chance.choice([special, chance.randbytes(size)]))
    return b"".join(elements)


def tensor(data: bytes, dtype: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype_of(dtype))


def described(left: torch.Tensor, right: torch.Tensor, rtol: float, atol: float) -> str | None:
    """Describe with torch how tensors differ; None if they do not."""
    wide = torch.complex128 if left.is_complex() else torch.float64
    a, b = left.to(wide), right.to(wide)
    equal = (a == b) | (a.isnan() & b.isnan())
    apart = (a - b).abs()
    # float64 cannot hold all of them: the distance of the integers is rounded once
    if left.dtype in (torch.int64, torch.uint64):
        x, y = (t.view(-1).tolist() for t in (left, right))
        equal = torch.tensor([p == q for p, q in zip(x, y)])
        apart = torch.tensor([abs(p - q) for p, q in zip(x, y)], dtype=torch.float64)
    close = equal
    if rtol or atol:
        close = equal | (apart.isfinite() & (apart <= atol + (rtol * b).abs()))
    count = int((~close).sum())
    if not count:
        return None
    far = torch.where(equal | ~apart.isfinite(), 0.0, apart).max().item()
    text = f"{count:,} of {left.numel():,} elements differ"
    if far:
        text += f", by {far:.3g} at most"
    counts = {
        "NaN in left": a.isnan().sum(),
        "infinite in left": a.isinf().sum(),
        "NaN in right": b.isnan().sum(),
        "infinite in right": b.isinf().sum(),
    }
    not_finite = ", ".join(f"{int(number)} {what}" for what, number in counts.items() if number)
    return f"{text}; {not_finite}" if not_finite else text


@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize(
    ("rtol", "atol"), [(0.0, 0.0), (1e-9, 0.0), (0.01, 1.0), (0.0, 1.0), (1e30, 0.0)]
)
def test_differences_are_those_of_torch(
    dtype: str, rtol: float, atol: float, tmp_path: Path
) -> None:
    chance = random.Random(f"{dtype} {rtol} {atol}")
    sides: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]] = ({}, {})
    for number in range(40):
        count = chance.randint(1, 6)
        for side in sides:
            side[f"k{number:02}"] = tensor(patterns(dtype, count, chance), dtype)
    left, right = (str(tmp_path / f"{name}.pt") for name in ("left", "right"))
    torch.save(sides[0], left)
    torch.save(sides[1], right)
    entries = ckpttool.diff(left, right, values=True, rtol=rtol, atol=atol).entries
    found = {entry.left[0]: entry.detail for entry in entries}
    for key, value in sides[0].items():
        expected = described(value, sides[1][key], rtol, atol)
        if expected is None and not (rtol or atol) and found[key] is not None:
            assert "elements differ" not in (found[key] or "")  # other bits of the same numbers
            continue
        assert found[key] == expected, key


@pytest.mark.parametrize("dtype", ["int64", "uint64", "int8", "uint8", "int32"])
@pytest.mark.parametrize("atol", [0.5, 1.0, 2.0])
def test_integers_within_a_tolerance_are_those_of_python(
    dtype: str, atol: float, tmp_path: Path
) -> None:
    """float64 cannot hold all of these integers."""
    chance, info = random.Random(f"{dtype} {atol}"), torch.iinfo(dtype_of(dtype))
    left, right = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    near: dict[str, bool] = {}
    for number in range(60):
        one = int(tensor(patterns(dtype, 1, chance), dtype).item())
        other = min(max(one + chance.randint(-3, 3), info.min), info.max)
        key = f"k{number:02}"
        left[key], right[key] = (torch.tensor([n], dtype=dtype_of(dtype)) for n in (one, other))
        near[key] = abs(one - other) <= atol
    entries = ckpttool.diff(left, right, values=True, atol=atol).entries
    assert {entry.left[0]: entry.status == "same" for entry in entries} == near


@pytest.mark.parametrize("dtype", [name for name in NUMBERS if dtype_of(name).itemsize <= 2])
def test_statistics_of_every_bit_pattern_are_those_of_torch(dtype: str) -> None:
    size = dtype_of(dtype).itemsize
    data = np.arange(256**size, dtype=f"<u{size}").tobytes()
    if dtype == "bool":
        data = bytes([0, 1])
    # one tensor for each pattern would be slow: one for each high byte
    values = tensor(data, dtype).reshape(-1, min(16, len(data) // size))
    rows = {f"k{at}": row.clone() for at, row in enumerate(values)}
    found = ckpttool.inspect(rows, stats=True).to_json()["tensors"]
    for one in found:
        row = rows[one["key"]].double()
        finite = row[row.isfinite()]
        stats = one["stats"]
        assert (stats["nan"], stats["inf"]) == (int(row.isnan().sum()), int(row.isinf().sum()))
        assert stats["zeros"] == int((row == 0).sum())
        if len(finite):
            assert (stats["min"], stats["max"]) == (finite.min().item(), finite.max().item())


@pytest.mark.parametrize("new", FLOATS)
@pytest.mark.parametrize("old", FLOATS)
def test_casts_are_those_of_torch(old: str, new: str, tmp_path: Path) -> None:
    """Every pattern of two bytes; of larger dtypes special and random ones, and those half-way
    between two results.
    """
    if old == new:
        return
    size = dtype_of(old).itemsize
    if size == 2:
        values = tensor(np.arange(1 << 16, dtype="<u2").tobytes(), old)
    else:
        numbers = torch.randn(20_000, generator=torch.manual_seed(0), dtype=torch.float64)
        numbers = numbers * 2.0 ** torch.randint(-160, 140, numbers.shape)
        halves = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
        near = [halves.view(one).double() for one in (torch.float16, torch.bfloat16)]
        infinities = [torch.tensor(float(way)).double() for way in ("inf", "-inf")]
        half = [torch.nextafter(n, way) for n in near for way in infinities]
        half += [(n[:-1] + n[1:]) / 2 for n in near]
        values = torch.cat([numbers, *near, *half]).to(dtype_of(old))
        values = torch.cat([values, tensor(random.Random(1).randbytes(size << 14), old)])
    save_file({"w": values}, tmp_path / "in.safetensors")
    out = str(tmp_path / "out.safetensors")
    ckpttool.convert(str(tmp_path / "in.safetensors"), out, dtype=new, no_fsync=True)
    found, expected = load_file(out)["w"], values.to(dtype_of(new))
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))
    assert torch.equal(found.signbit()[~expected.isnan()], expected.signbit()[~expected.isnan()])


def test_a_large_matrix_is_transposed_in_tiles(tmp_path: Path) -> None:
    """Less is in memory than the matrix, with Python and numpy."""
    matrix = torch.zeros(8192, 8192)
    torch.save({"w": matrix.t()}, tmp_path / "in.pt")
    line = ["convert", f"{tmp_path}/in.pt", "-o", f"{tmp_path}/out.safetensors", "--no-fsync"]
    _, peak = run_measured([sys.executable, "-m", "ckpttool", *line], ROOT)
    assert peak < matrix.nbytes


_COUNTED = """
import sys, torch, ckpttool
state = {f"w{number}": torch.ones(4).to(torch.float8_e4m3fn) for number in range(5)}
found = 0
def count(frame, event, _):
    global found
    found += event == "call" and frame.f_code.co_name == "_value_of"
sys.setprofile(count)
ckpttool.inspect(state, stats=True)
sys.setprofile(None)
print(found)
"""


def test_the_values_of_eight_bits_are_found_once() -> None:
    """Afterwards each byte of a float8 tensor is looked up."""
    command = [sys.executable, "-c", _COUNTED]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "256\n"
