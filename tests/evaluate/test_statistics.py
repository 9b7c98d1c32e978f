"""`inspect --stats` matches torch, in bounded memory, and without torch for dtypes that numpy
knows.
"""

from __future__ import annotations

import hashlib
import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

import ckpttool
from command import main, notes_in
from files import run_measured

FLOATS = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
)
INTEGERS = (
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.bool,
)


def stats_of(tensor: torch.Tensor) -> dict[str, Any]:
    found = ckpttool.inspect({"t": tensor}, stats=True).to_json()
    (entry,) = found["tensors"]
    stats: dict[str, Any] = entry["stats"]
    return stats


def expected(tensor: torch.Tensor) -> dict[str, Any]:
    """Compute the statistics of the complete tensor with torch."""
    data = tensor.contiguous().reshape(-1).view(torch.uint8)
    wide = tensor.double().reshape(-1)
    finite = wide[wide.isfinite()]
    low, high, mean = (
        (finite.min().item(), finite.max().item(), finite.mean().item())
        if finite.numel()
        else (None,) * 3
    )
    zeros, nan, inf = (int(hits.sum()) for hits in (wide == 0, wide.isnan(), wide.isinf()))
    digest = hashlib.sha256(bytes(data.tolist())).hexdigest()
    return {
        "min": low,
        "max": high,
        "mean": mean,
        "zeros": zeros,
        "nan": nan,
        "inf": inf,
        "sha256": digest,
    }


def alike(found: dict[str, Any], other: dict[str, Any]) -> bool:
    """Compare; the mean may differ by the order of the sum."""
    if found["mean"] is None or other["mean"] is None:
        return found == other
    close = math.isclose(found["mean"], other["mean"], rel_tol=1e-6, abs_tol=1e-6)
    return close and {**found, "mean": other["mean"]} == other


@settings(max_examples=100)
@given(st.sampled_from(FLOATS + INTEGERS), st.binary(max_size=96), st.booleans())
def test_statistics_of_random_bits_match_torch(
    dtype: torch.dtype, data: bytes, transposed: bool
) -> None:
    if dtype == torch.bool:
        data = bytes(byte & 1 for byte in data)
    size = dtype.itemsize
    data = data[: len(data) // (2 * size) * 2 * size]
    tensor = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
    tensor = tensor.reshape(-1, 2)
    tensor = tensor.t() if transposed else tensor
    wide = tensor.double()
    if wide.isfinite().any() and wide[wide.isfinite()].abs().max() > (
        2**53 if dtype in INTEGERS else 1e300
    ):
        return  # the sum overflows, or torch rounds and Python does not
    assert alike(stats_of(tensor), expected(tensor))


def test_statistics_of_several_chunks_match_torch(tmp_path: Path) -> None:
    tensor = torch.randn(3, 200_001, generator=torch.Generator().manual_seed(0))
    tensor[1, 7], tensor[2, -1], tensor[0, 5] = float("nan"), float("inf"), 0.0
    assert alike(stats_of(tensor), expected(tensor))


def test_complex_numbers_have_only_a_hash() -> None:
    found = stats_of(torch.zeros(2, dtype=torch.complex64))
    assert found == {
        **dict.fromkeys(("min", "max", "mean", "zeros", "nan", "inf")),
        "sha256": hashlib.sha256(bytes(16)).hexdigest(),
    }


@pytest.mark.parametrize("name", ["w.pt", "w.safetensors"])
def test_inspect_stats_shows_statistics(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = {
        "good": torch.tensor([1.0, -3.0]),
        "nan": torch.tensor([float("nan"), 2.0]),
        "zero": torch.zeros(4),
    }
    state |= {
        "step": torch.zeros(()),
        "rest": torch.tensor([0.0, 0.0, float("inf")]),
        "c": torch.zeros(2, dtype=torch.complex64),
    }
    path = tmp_path / name
    sparse = {"sparse": torch.eye(2).to_sparse()}
    torch.save({**state, **sparse}, path) if name.endswith("pt") else save_file(state, path)
    assert main(["inspect", str(path), "--stats", "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    stats = {tensor["key"]: tensor["stats"] for tensor in found["tensors"]}
    assert {**stats["good"], "sha256": ""} == {
        "min": -3.0,
        "max": 1.0,
        "mean": -1.0,
        "zeros": 0,
        "nan": 0,
        "inf": 0,
        "sha256": "",
    }
    assert (stats["nan"]["nan"], stats["nan"]["min"], stats["zero"]["zeros"]) == (1, 2.0, 4)
    assert stats.get("sparse") is None
    assert notes_in(found) == [
        "1 tensor with NaN: nan",
        "1 tensor with infinite values: rest",
        "1 tensor with only zeros: zero",
    ]
    assert main(["inspect", str(path), "--stats"]) == 0
    shown = capsys.readouterr()
    assert "1 tensor with NaN: nan" in shown.out + shown.err
    assert stats["good"]["sha256"][:12] in shown.out


def test_without_stats_no_values_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"nan": torch.tensor([float("nan")] * 2)}, tmp_path / "w.pt")
    assert main(["inspect", str(tmp_path / "w.pt"), "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (notes_in(found), "stats" in found["tensors"][0]) == ([], False)


def test_statistics_do_not_import_torch(tmp_path: Path) -> None:
    save_file(
        {"a": torch.ones(3), "b": torch.ones(3, dtype=torch.bfloat16)}, tmp_path / "w.safetensors"
    )
    code = (
        "import sys; from ckpttool.cli.app import main; main(sys.argv[1:]); assert 'torch' not"
        " in sys.modules"
    )
    words = [sys.executable, "-c", code, "inspect", str(tmp_path / "w.safetensors"), "--stats"]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)


def test_memory_does_not_grow_with_the_tensor(tmp_path: Path) -> None:
    peaks = []
    for count in (1 << 10, 1 << 24):  # 64 MiB
        save_file({"w": torch.zeros(count)}, tmp_path / "w.safetensors")
        command = [
            sys.executable,
            "-m",
            "ckpttool",
            "inspect",
            str(tmp_path / "w.safetensors"),
            "--stats",
        ]
        peaks.append(run_measured(command, tmp_path)[1])
    assert peaks[1] - peaks[0] < 32 << 20


def notes_of(
    state: dict[str, torch.Tensor], path: Path, capsys: pytest.CaptureFixture[str]
) -> list[str]:
    torch.save(state, path)
    assert main(["inspect", str(path), "--format", "json"]) == 0
    notes: list[str] = notes_in(json.loads(capsys.readouterr().out))
    return notes


@pytest.mark.parametrize("count", [3, 8])
def test_a_note_reports_partitioned_parameters(
    count: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """transformers#20082: ZeRO-3 saves placeholders of partitioned parameters."""
    state = {f"layers.{n}.self_attn.q_proj.weight": torch.ones(1) for n in range(count)}
    (note,) = notes_of(state, tmp_path / "w.pt", capsys)
    assert note.startswith(
        f"{count} tensors of shape [1], as ZeRO-3 leaves parameters that it has partitioned (likely"
    )
    whole = {f"layers.{n}.bias": torch.ones(4) for n in range(count)}
    weights = {f"layers.{n}.weight": torch.ones(1) for n in range(count)}
    (note,) = notes_of(weights | whole, tmp_path / "w.pt", capsys)
    assert "(layers.0.weight next to a bias of 4)" in note


@pytest.mark.parametrize("make", [
    lambda: nn.Sequential(*[nn.PReLU() for _ in range(5)]),
    lambda: nn.Sequential(*[nn.BatchNorm1d(1) for _ in range(5)]),
    lambda: nn.Sequential(*[nn.Linear(1, 1) for _ in range(5)], nn.LayerNorm(1)),
    lambda: nn.Sequential(nn.Linear(2, 2), nn.PReLU()),
    lambda: nn.ParameterDict({f"scale_{n}": nn.Parameter(torch.ones(1)) for n in range(6)}),
])  # fmt: skip
def test_models_of_single_elements_are_not_placeholders(
    make: Callable[[], nn.Module], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert notes_of(make().state_dict(), tmp_path / "w.pt", capsys) == []
