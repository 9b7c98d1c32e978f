"""Quantized weights: the sentence, `diff` against a plain model, and parts in one shard.

transformers and bitsandbytes write the weights where they can, other layouts are as documented.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn, zeros
from transformers.integrations.eetq import EetqLinear
from transformers.integrations.higgs import HiggsLinear

from command import Run

FP8, INT8, UINT8, INT32 = torch.float8_e4m3fn, torch.int8, torch.uint8, torch.int32


def by_transformers() -> dict[str, torch.Tensor]:
    module = pytest.importorskip("transformers.integrations.finegrained_fp8")
    state: dict[str, torch.Tensor] = module.FP8Linear(64, 32, block_size=(16, 16)).state_dict()
    return state


def by_bitsandbytes(bits: int) -> dict[str, torch.Tensor]:
    bnb = pytest.importorskip("bitsandbytes")
    if bits == 4:
        layer = bnb.nn.Linear4bit(64, 32, bias=False, quant_type="nf4")
    else:
        layer = bnb.nn.Linear8bitLt(64, 32, bias=False, has_fp16_weights=False)
    state: dict[str, torch.Tensor] = layer.to("cpu").state_dict()
    return state


# the parts of a weight [32, 64], and the words of the sentence
LAYOUTS: dict[str, tuple[Any, str]] = {
    "transformers FP8": (by_transformers, "block FP8, 3 weights with `weight_scale_inv`"),
    "bitsandbytes nf4": (lambda: by_bitsandbytes(4), "bitsandbytes, 4 bit, 3 weights with `absmax`"),
    "bitsandbytes int8": (lambda: by_bitsandbytes(8), "bitsandbytes, 8 bit, 3 weights with `SCB`"),
    "nf4": (
        lambda: {
            "weight": zeros(1024, 1, dtype=UINT8), "weight.absmax": zeros(32),
            "weight.quant_map": zeros(16),
            "weight.quant_state.bitsandbytes__nf4": zeros(88, dtype=UINT8),
        },
        "bitsandbytes, 4 bit, 3 weights with `absmax`, `quant_map`, `quant_state.bitsandbytes__nf4`",
    ),
    "one scale": (
        lambda: {"weight": zeros(32, 64, dtype=FP8), "weight_scale": zeros(()), "input_scale": zeros(())},
        "FP8, a scale for each tensor, 3 weights",
    ),
    "a scale for each row": (
        lambda: {"weight": zeros(32, 64, dtype=FP8), "weight_scale": zeros(32, 1)},
        "FP8, a scale for each channel, 3 weights with `weight_scale`",
    ),
    "GPTQ": (
        lambda: {
            "qweight": zeros(8, 32, dtype=INT32), "qzeros": zeros(1, 4, dtype=INT32),
            "scales": zeros(1, 32), "g_idx": zeros(64, dtype=INT32),
        },
        "GPTQ, 3 weights",
    ),
    "AWQ": (
        lambda: {
            "qweight": zeros(64, 4, dtype=INT32), "qzeros": zeros(1, 4, dtype=INT32),
            "scales": zeros(1, 32),
        },
        "AWQ, 3 weights with `qzeros`, `scales`",
    ),
    "compressed-tensors": (
        lambda: {
            "weight_packed": zeros(32, 8, dtype=INT32), "weight_scale": zeros(32, 1),
            "weight_shape": torch.tensor([32, 64]),
        },
        "compressed-tensors, 3 weights with `weight_scale`, `weight_shape`",
    ),
    "MLX": (
        lambda: {
            "weight": zeros(32, 8, dtype=torch.uint32), "scales": zeros(32, 1), "biases": zeros(32, 1)
        },
        "MLX, 3 weights with `scales`, `biases`",
    ),
    "HQQ": (
        lambda: {
            "W_q": zeros(16, 64, dtype=UINT8), "scale": zeros(32, 1), "zero": zeros(32, 1),
            "shape": torch.tensor([32, 64]), "nbits": torch.tensor(4),
        },
        "HQQ, 3 weights with `scale`, `zero`, `shape`, `nbits`",
    ),
    "EETQ": (
        lambda: dict(EetqLinear(64, 32).state_dict()),
        "EETQ, 3 weights with `weight_scales`",
    ),
    "HIGGS": (
        lambda: dict(HiggsLinear(64, 32, 4, bias=False, group_size=64).state_dict()),
        "HIGGS, 3 weights with `scales`, `tables`, `tables2`",
    ),
    "AQLM": (
        lambda: {
            "codes": zeros(32, 8, 1, dtype=torch.int16), "codebooks": zeros(1, 16, 1, 8),
            "scales": zeros(32, 1, 1, 1),
        },
        "AQLM, 3 weights with `codebooks`, `scales`",
    ),
    "marlin-24 of compressed-tensors": (
        lambda: {
            "weight_packed": zeros(2, 64, dtype=INT32), "scale_packed": zeros(1, 32),
            "meta": zeros(4, 16, dtype=torch.int16),
        },
        "compressed-tensors, 3 weights with `scale_packed`, `meta`",
    ),
    "QuIP#": (
        lambda: {
            "Qidxs": zeros(32, 8, dtype=torch.int16), "SU": torch.ones(64), "SV": torch.ones(32),
            "Wscale": torch.ones(()),
        },
        "QuIP#, 3 weights with `Wscale`, `SU`, `SV`",
    ),
    "VPTQ": (
        lambda: {
            "indices": zeros(1, 8, 16, dtype=INT32), "centroids.weight": zeros(1, 2048),
            "weight_scale": torch.ones(64), "weight_bias": zeros(64),
            "perm": torch.arange(64, dtype=torch.int16),
        },
        "VPTQ, 3 weights with `centroids.weight`, `weight_scale`, `weight_bias`, `perm`",
    ),
    "quanto": (
        lambda: {"weight._data": zeros(32, 64, dtype=torch.int8), "weight._scale": zeros(32, 1)},
        "quanto, 3 weights with `_scale`",
    ),
    "packed by quanto": (
        lambda: {
            "weight._data._data": zeros(16, 64, dtype=UINT8), "weight._scale": zeros(32, 1),
            "weight._shift": zeros(32, 1),
        },
        "quanto, 3 weights with `_scale`, `_shift`",
    ),
}  # fmt: skip
MODEL = """
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 32, bias=False) for _ in range(3))
        self.norm = nn.LayerNorm(4)
"""


def saved(layout: str, path: Path) -> dict[str, torch.Tensor]:
    parts = {name: value for name, value in LAYOUTS[layout][0]().items() if name != "bias"}
    state = {f"layers.{n}.{name}": value.clone() for n in range(3) for name, value in parts.items()}
    norm = {f"norm.{name}": value for name, value in nn.LayerNorm(4).state_dict().items()}
    save_file({**state, **norm}, path)
    return {**state, **norm}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_plain_model_is_told_that_the_file_is_quantized(
    layout: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plain.py").write_text(MODEL)
    state = saved(layout, tmp_path / "q.safetensors")
    lines = run("inspect", "q.safetensors").out.splitlines()[:4]
    assert any("is quantized: " + LAYOUTS[layout][1] in line for line in lines), lines
    done = run("diff", "q.safetensors", "--model", "plain.py:Net")
    assert done.status == 1
    assert "is quantized: " + LAYOUTS[layout][1] in "\n".join(done.out.splitlines()[:4])
    assert "build the model as it was" not in done.out + done.err
    done = run("diff", "q.safetensors", "--model", "plain.py:Net", "--format", "json")
    differing = [entry for entry in done.data["entries"] if entry["status"] != "same"]
    assert {entry["code"] for entry in differing} == {"quantized"}
    assert {key for entry in differing for key in entry["left"]} == {
        key for key in state if not key.startswith("norm")
    }


@pytest.mark.parametrize("names", [("indices", "perm"), ("codes", "scales"), ("Qidxs", "Wscale")])
def test_names_that_a_plain_model_may_have_are_not_a_scheme(
    run: Run, tmp_path: Path, names: tuple[str, str]
) -> None:
    """A flow has the order of its channels in such buffers."""
    state = {f"flow.{name}": torch.arange(4) for name in names}
    save_file({**state, "flow.weight": torch.ones(4, 4)}, tmp_path / "flow.safetensors")
    assert "quantized" not in run("inspect", tmp_path / "flow.safetensors").out
    words = ("--dtype", "bfloat16", "-o", tmp_path / "half.safetensors")
    assert run("convert", tmp_path / "flow.safetensors", *words).status == 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_cast_of_the_scales_is_refused(layout: str, run: Run, tmp_path: Path) -> None:
    saved(layout, tmp_path / "q.safetensors")
    out = tmp_path / "out.safetensors"
    done = run("convert", tmp_path / "q.safetensors", "-o", out, "--dtype", "bfloat16")
    assert done.status == 1, done.said
    assert "cannot be cast: " in done.err
    assert not out.exists()


SHAPES: list[tuple[int, ...]] = [(), (0,), (3,), (2, 0), (2, 3), (1, 2, 3)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["weight_scale", "weight_scale_inv", "weight_scale_2"])
def test_scales_of_any_shape_are_read(
    run: Run, tmp_path: Path, name: str, shape: tuple[int, ...]
) -> None:
    """A file may hold a scale that does not fit its weight."""
    path, out = tmp_path / "q.safetensors", tmp_path / "out.safetensors"
    rules = '[[rule]]\ndequantize = "*"\ndtype = "float32"\n'
    (tmp_path / "rules.toml").write_text(rules)
    for scale in SHAPES:
        save_file({"weight": zeros(shape).to(FP8), name: torch.ones(scale)}, path)
        assert "is quantized: " in run("inspect", path).out
        assert run("diff", path, path, "--values").status == 0
        done = run("remap", path, "-o", out, "--rules", tmp_path / "rules.toml", "--dry-run")
        assert done.status in (0, 1), done.said


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_parts_of_a_weight_are_in_one_shard(
    layout: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in a renamed checkpoint."""
    monkeypatch.chdir(tmp_path)
    state = saved(layout, tmp_path / "q.safetensors")
    rules = ("--rule", "layers.{n}.{x*} => blocks.{n}.{x*}")
    assert run("remap", "q.safetensors", *rules, "-o", "r.safetensors").status == 0
    size = ("--max-shard-size", "600")
    assert run("convert", "r.safetensors", "-o", "out/", *size).status == 0
    index = json.loads(Path("out/model.safetensors.index.json").read_text())["weight_map"]
    assert len({*index.values()}) >= 3
    for number in range(3):
        assert len({shard for key, shard in index.items() if f"blocks.{number}." in key}) == 1
    assert len(index) == len(state)
    assert "is quantized" in run("inspect", "out").out
