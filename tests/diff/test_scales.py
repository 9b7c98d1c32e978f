"""`diff --values` of quantized weights: through the scales if only one side has them quantized, or
in another scheme. Oracle: the formulas of the schemes, in torch.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckpttool
from command import Run

State = dict[str, torch.Tensor]
FP8 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def numbers() -> torch.Tensor:
    return torch.randn(256, 384, generator=torch.Generator().manual_seed(0)).to(FP8)


def block(prefix: str = "") -> State:
    scale = torch.rand(2, 3, generator=torch.Generator().manual_seed(1)) + 0.5
    return {
        f"{prefix}fc.weight": numbers(),
        f"{prefix}fc.weight_scale_inv": scale,
        f"{prefix}norm.weight": torch.ones(4, dtype=torch.bfloat16),
    }


def channel() -> State:
    scale = torch.rand(256, 1, generator=torch.Generator().manual_seed(2)) + 0.5
    return {
        "fc.weight": numbers(),
        "fc.weight_scale": scale,
        "norm.weight": torch.ones(4, dtype=torch.bfloat16),
    }


def plain(state: State, dtype: torch.dtype = torch.bfloat16, prefix: str = "") -> State:
    """Return the values of the weight, as the schemes define them."""
    (scale,) = [value for key, value in state.items() if "scale" in key]
    if "fc.weight_scale_inv" in state:
        scale = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    weight = (state["fc.weight"].float() * scale).to(dtype)
    return {f"{prefix}fc.weight": weight, f"{prefix}norm.weight": state["norm.weight"]}


def mxfp4() -> tuple[State, State]:
    """Return packed 4-bit numbers with a power of two for each 32 of them, and their values."""
    table = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    values = torch.tensor([*table, *(-value for value in table)])
    generator = torch.Generator().manual_seed(3)
    blocks = torch.randint(0, 256, (2, 5, 3, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(120, 130, (2, 5, 3), generator=generator, dtype=torch.uint8)
    pairs = torch.stack([values[(blocks & 15).long()], values[(blocks >> 4).long()]], dim=-1)
    rows = pairs.flatten(-2) * torch.exp2(scales.float() - 127)[..., None]
    weight = rows.flatten(-2).transpose(1, 2).contiguous().bfloat16()
    packed = {"experts.down_proj_blocks": blocks, "experts.down_proj_scales": scales}
    return packed, {"experts.down_proj": weight}


PAIRS = {
    "block": (block(), plain(block())),
    "float32": (block(), plain(block(), torch.float32)),
    "channel": (channel(), plain(channel())),
    "wrapped": (block("module."), plain(block())),
    "wrapped right": (block(), plain(block(), prefix="module.")),
    "MXFP4": mxfp4(),
}


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("is_reversed", [False, True])
def test_the_same_values_are_the_same_through_the_scales(
    name: str, is_reversed: bool, run: Run
) -> None:
    left, right = reversed(PAIRS[name]) if is_reversed else PAIRS[name]
    save_file(left, "left.safetensors")
    save_file(right, "right.safetensors")
    done = run("diff", "left.safetensors", "right.safetensors", "--values")
    assert done.status == 1, done.said
    assert "with the same values through the scales" in done.out
    assert "elements differ" not in done.out
    assert "not compared" not in done.out
    assert "--dtype" not in done.out  # a cast of the numbers is no fix
    same_values = run("diff", "left.safetensors", "right.safetensors", "--values", "--ignore-dtype")
    assert same_values.status == (1 if "wrapped" in name else 0), same_values.said


@pytest.mark.parametrize("name", PAIRS)
def test_other_values_are_measured_through_the_scales(name: str, run: Run) -> None:
    left, right = PAIRS[name]
    key = next(key for key in right if "norm" not in key)
    other = right[key].clone()
    other.view(-1)[7] += 2
    save_file(left, "left.safetensors")
    save_file({**right, key: other}, "right.safetensors")
    done = run("diff", "left.safetensors", "right.safetensors", "--values")
    assert done.status == 1
    assert re.search(rf": 1 of {other.numel():,} elements differ, by (1.9|2)", done.out)
    assert "compared through the scales" in done.out


def test_two_schemes_are_compared_by_their_values(run: Run) -> None:
    left, right = block(), channel()
    save_file(left, "left.safetensors")
    save_file(right, "right.safetensors")
    done = run("diff", "left.safetensors", "right.safetensors", "--values", "--format", "json")
    (entry,) = [entry for entry in done.data["entries"] if entry["status"] == "value"]
    assert entry["left"] == ["fc.weight", "fc.weight_scale_inv"]
    assert entry["right"] == ["fc.weight", "fc.weight_scale"]
    difference = plain(right, torch.float32)["fc.weight"] - plain(left, torch.float32)["fc.weight"]
    largest = float(difference.abs().max())
    assert entry["change"]["maximum"] == pytest.approx(largest, rel=1e-5)


def test_numbers_of_one_scheme_are_compared_as_they_are(run: Run) -> None:
    save_file(block(), "left.safetensors")
    save_file({**block(), "fc.weight_scale_inv": torch.ones(2, 3)}, "right.safetensors")
    done = run("diff", "left.safetensors", "right.safetensors", "--values")
    assert "fc.weight_scale_inv: 6 of 6 elements differ" in done.out
    assert "through the scales" not in done.out


@pytest.mark.parametrize("number", [1.0, 2.0])
def test_values_of_a_scheme_that_is_not_known_are_not_compared(number: float, run: Run) -> None:
    """Numbers of bitsandbytes are no values: a difference of the numbers says nothing."""
    state = {
        "fc.weight": torch.ones(4, 4, dtype=torch.int8),
        "fc.SCB": torch.ones(4),
        "fc.weight_format": torch.tensor(0, dtype=torch.uint8),
    }
    save_file(state, "left.safetensors")
    save_file({"fc.weight": torch.full((4, 4), number)}, "right.safetensors")
    done = run("diff", "left.safetensors", "right.safetensors", "--values")
    assert done.status == 1
    assert "values not compared" in done.out
    assert "elements differ" not in done.out


def test_values_of_other_shapes_are_not_compared(run: Run) -> None:
    right = plain(block())
    save_file(block(), "left.safetensors")
    save_file({**right, "fc.weight": right["fc.weight"][:7].clone()}, "right.safetensors")
    done = run("diff", "left.safetensors", "right.safetensors", "--values")
    assert done.status == 1
    assert "[256, 384] instead of [7, 384]" in done.out
    assert "through the scales" not in done.out


def test_each_key_is_looked_up_once_for_all_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    section_class = type(ckpttool.open_checkpoint(channel()).section(""))
    by_key, calls = section_class.by_key, list[Any]()

    def counting(section: Any) -> Any:
        calls.append(section)
        return by_key(section)

    counts = []
    for number in (2, 20):
        left: State = {}
        right: State = {}
        for layer in range(number):
            left.update({f"{layer}.{key}": value for key, value in channel().items()})
            right.update({f"{layer}.{key}": value for key, value in plain(channel()).items()})
        calls.clear()
        with monkeypatch.context() as patch:
            patch.setattr(section_class, "by_key", counting)
            diff = ckpttool.diff(left, right, values=True)
        assert {entry.status for entry in diff.entries} == {"same", "dtype"}
        counts.append(len(calls))
    assert counts[0] == counts[1]
