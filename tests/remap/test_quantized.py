"""Quantized weights stay whole: no cast, no rename of one part, and `diff` does not suggest either.

The layouts are those that the libraries write, and document.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpttool
from command import Run, notes_in

State = dict[str, torch.Tensor]
NF4 = "bitsandbytes nf4"
FP8, INT8, UINT8, INT32 = torch.float8_e4m3fn, torch.int8, torch.uint8, torch.int32


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


SCHEMES: dict[str, State] = {
    "DeepSeek FP8 blocks": {"weight": zeros(4, 4, dtype=FP8), "weight_scale_inv": zeros(1, 1)},
    "FP8, one scale for each row": {"weight": zeros(4, 4, dtype=FP8), "weight_scale": zeros(4, 1)},
    "FP8 with activation scales": {
        "weight": zeros(4, 4, dtype=FP8), "weight_scale": zeros(1), "input_scale": zeros(1)
    },
    "ComfyUI scaled FP8": {"weight": zeros(4, 4, dtype=FP8), "scale_weight": zeros(1)},
    "FP8 experts": {"w13": zeros(2, 4, 4, dtype=FP8), "w13_scale_inv": zeros(2, 1, 1)},
    "compressed-tensors int8": {"weight": zeros(4, 4, dtype=INT8), "weight_scale": zeros(4, 1)},
    "compressed-tensors packed": {
        "weight_packed": zeros(4, 1, dtype=INT32), "weight_scale": zeros(4, 1),
        "weight_shape": torch.tensor([4, 4]),
    },
    "ModelOpt NVFP4": {
        "weight": zeros(4, 2, dtype=UINT8), "weight_scale": zeros(4, 1, dtype=FP8), "weight_scale_2": zeros(1)
    },
    "bitsandbytes int8": {"weight": zeros(4, 4, dtype=INT8), "SCB": zeros(4)},
    NF4: {
        "weight": zeros(8, 1, dtype=UINT8), "weight.absmax": zeros(1), "weight.quant_map": zeros(16),
        "weight.quant_state.bitsandbytes__nf4": zeros(8, dtype=UINT8),
    },
    "GPTQ": {
        "qweight": zeros(1, 4, dtype=INT32), "qzeros": zeros(1, 1, dtype=INT32), "scales": zeros(1, 4),
        "g_idx": zeros(4, dtype=INT32),
    },
    "AWQ": {"qweight": zeros(4, 1, dtype=INT32), "qzeros": zeros(1, 1, dtype=INT32), "scales": zeros(1, 4)},
    "GPT-OSS MXFP4": {
        "down_proj_blocks": zeros(2, 4, 1, 16, dtype=UINT8), "down_proj_scales": zeros(2, 4, 1, dtype=UINT8)
    },
    "MLX": {"weight": zeros(4, 1, dtype=torch.uint32), "scales": zeros(4, 1), "biases": zeros(4, 1)},
}  # fmt: skip


def saved(scheme: str, path: Path) -> State:
    state = {f"layers.0.{name}": value for name, value in SCHEMES[scheme].items()}
    state |= {"layers.0.bias": zeros(4), "norm.weight": zeros(4)}
    save_file({key: value.clone() for key, value in state.items()}, path)
    return state


@pytest.mark.parametrize("pattern", ["*", "layers.*"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_cast_is_refused(scheme: str, pattern: str, tmp_path: Path, run: Run) -> None:
    saved(scheme, tmp_path / "in.safetensors")
    (tmp_path / "rules.toml").write_text(f'[[rule]]\ncast = "{pattern}"\ndtype = "float16"\n')
    words = ("--rules", tmp_path / "rules.toml", "-o", tmp_path / "out.safetensors")
    done = run("remap", tmp_path / "in.safetensors", *words)
    if not any(value.is_floating_point() for value in SCHEMES[scheme].values()):
        assert done.status == 0  # a cast to a floating dtype leaves integers as they are
        return
    assert done.status == 1, done.err
    assert "quantized" in done.err
    assert not (tmp_path / "out.safetensors").exists()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_other_weights_of_the_file_can_be_cast(scheme: str, tmp_path: Path, run: Run) -> None:
    saved(scheme, tmp_path / "in.safetensors")
    (tmp_path / "rules.toml").write_text('[[rule]]\ncast = "norm.*"\ndtype = "float16"\n')
    words = ("--rules", tmp_path / "rules.toml", "-o", tmp_path / "out.safetensors")
    assert run("remap", tmp_path / "in.safetensors", *words).status == 0
    assert load_file(tmp_path / "out.safetensors")["norm.weight"].dtype == torch.float16


@pytest.mark.parametrize("scheme", SCHEMES)
def test_one_part_is_not_renamed_alone(scheme: str, tmp_path: Path, run: Run) -> None:
    state = saved(scheme, tmp_path / "in.safetensors")
    out = tmp_path / "out.safetensors"
    for name in SCHEMES[scheme]:
        rule = ("--rule", f"layers.0.{name} => blocks.0.{name}")
        refused = run("remap", tmp_path / "in.safetensors", *rule, "-o", out)
        assert (refused.status, out.exists()) == (1, False), (name, refused.err)
        assert "quantized" in refused.err
    done = run(
        "remap", tmp_path / "in.safetensors", "--rule", "layers.{x*} => blocks.{x*}", "-o", out
    )
    assert done.status == 0, done.err
    assert set(load_file(out)) == {key.replace("layers.", "blocks.") for key in state}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_one_part_is_not_dropped_alone(scheme: str, tmp_path: Path, run: Run) -> None:
    saved(scheme, tmp_path / "in.safetensors")
    out = tmp_path / "out.safetensors"
    for name in SCHEMES[scheme]:
        refused = run("remap", tmp_path / "in.safetensors", "--drop", f"layers.0.{name}", "-o", out)
        assert (refused.status, out.exists()) == (1, False), name
        assert "part of a quantized weight" in refused.err


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("options", [(), ("--ignore-dtype",)], ids=["", "ignore-dtype"])
def test_diff_with_plain_weights_does_not_suggest_a_cast(
    scheme: str, options: tuple[str, ...], tmp_path: Path, run: Run
) -> None:
    saved(scheme, tmp_path / "in.safetensors")
    weight = (
        next(iter(SCHEMES[scheme]))
        .removeprefix("q")
        .removesuffix("_packed")
        .removesuffix("_blocks")
    )
    plain = {f"layers.0.{weight}": zeros(4, 4), "layers.0.bias": zeros(4), "norm.weight": zeros(4)}
    save_file(plain, tmp_path / "plain.safetensors")
    for sides in (("in", "plain"), ("plain", "in")):
        paths = [tmp_path / f"{side}.safetensors" for side in sides]
        done = run("diff", *paths, *options, "--format", "json")
        assert done.status == 1
        advice = [
            note for note in notes_in(done.data) if "`cast`" in note or "--ignore-dtype" in note
        ]
        assert advice == []
        codes = {
            entry.get("code")
            for entry in done.data["entries"]
            if entry["left"] != entry["right"] or entry["status"] != "same"
        }
        assert "quantized" in codes


def test_cost_grows_with_the_number_of_weights(tmp_path: Path) -> None:
    """Each weight is searched for among its own keys, not among all keys."""
    calls = []
    for count in (50, 200):
        state = {
            f"{number}.{key}": value.clone()
            for number in range(count)
            for key, value in SCHEMES[NF4].items()
        }
        save_file(state, tmp_path / "in.safetensors")
        events: list[str] = []

        def note(_: FrameType, event: str, __: object, events: list[str] = events) -> None:
            events.append(event)

        sys.setprofile(note)
        try:
            inspection = ckpttool.inspect(str(tmp_path / "in.safetensors"))
        finally:
            sys.setprofile(None)
        assert any(str(count) in kind for kind in map(str, inspection.to_json()["kinds"]))
        calls.append(len(events))
    assert calls[1] < 5 * calls[0]
