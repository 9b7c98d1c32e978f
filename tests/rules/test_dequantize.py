"""The rule `dequantize` gives the values that transformers computes, for each scheme, across
shards.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import ckpttool
from ckpttool import CkptError, Refused

State = dict[str, torch.Tensor]
DTYPES = ["bfloat16", "float16", "float32"]


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)


def dequantized(state: State, dtype: str = "float32", more: str = "", source: str = "") -> State:
    if not source:
        save_file(state, "a.safetensors")
    rule = f'[[rule]]\ndequantize = "*"\ndtype = "{dtype}"\n{more}\n'
    ckpttool.remap(source or "a.safetensors", "b.safetensors", rules=rule, force=True)
    return load_file("b.safetensors")


def fp8(*shape: int, dtype: torch.dtype = torch.float8_e4m3fn) -> torch.Tensor:
    return (torch.randn(shape) * 20).to(dtype)


def same(left: State, right: State) -> bool:
    return left.keys() == right.keys() and all(
        value.dtype == right[key].dtype and torch.equal(value, right[key])
        for key, value in left.items()
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(256, 384), (2, 256, 128)])
def test_blocks_of_fp8(dtype: str, shape: tuple[int, ...]) -> None:
    weight = fp8(*shape)
    scale = torch.rand(*shape[:-2], shape[-2] // 128, shape[-1] // 128)
    plain = torch.randn(3).bfloat16()
    state = {"up.weight": weight, "up.weight_scale_inv": scale, "norm.weight": plain}
    oracle: Any = Fp8Dequantize(None)
    expected = oracle._dequantize_one(weight, scale, getattr(torch, dtype))
    assert same(dequantized(state, dtype), {"up.weight": expected, "norm.weight": plain})


def test_blocks_that_the_shape_cuts() -> None:
    """DeepSeek's kernel: the last block of a row or column is smaller."""
    weight, scale = fp8(300, 130), torch.rand(3, 2)
    whole = scale.repeat_interleave(128, 0)[:300].repeat_interleave(128, 1)[:, :130]
    result = dequantized(
        {"w.weight": weight, "w.weight_scale_inv": scale}, more="block = [128, 128]"
    )
    assert same(result, {"w.weight": weight.float() * whole})


def test_the_size_of_blocks_is_not_guessed() -> None:
    state = {"w.weight": fp8(192, 128), "w.weight_scale_inv": torch.rand(2, 1)}
    with pytest.raises(Refused) as caught:
        dequantized(state)
    assert "2 blocks cover 192 with 96 or 128" in caught.value.problems[0].problem
    last = state["w.weight"].float()[128:] * state["w.weight_scale_inv"][1]
    assert torch.equal(dequantized(state, more="block = [128, 128]")["w.weight"][128:], last)
    with pytest.raises(Refused) as caught:
        dequantized(state, more="block = [64, 128]")
    assert "2 blocks of 64 do not cover 192" in caught.value.problems[0].problem


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numbers", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
@pytest.mark.parametrize("shape", [(), (1,), (6, 1), (6,)])
def test_a_scale_for_a_tensor_or_a_channel(
    dtype: str, numbers: torch.dtype, shape: tuple[int, ...]
) -> None:
    """What compressed-tensors computes: numbers times scale."""
    weight = (torch.randn(6, 4) * 20).to(numbers)
    scale = torch.rand(shape).bfloat16()
    state = {"up.weight": weight, "up.weight_scale": scale, "up.input_scale": torch.rand(())}
    scale = scale.float()[:, None] if shape == (6,) else scale.float()
    expected = (weight.float() * scale).to(getattr(torch, dtype))
    assert same(dequantized(state, dtype), {"up.weight": expected})


def test_scales_that_are_powers_of_two_in_bytes() -> None:
    weight, scale = fp8(4, 64), torch.randint(100, 150, (4, 2), dtype=torch.uint8)
    oracle: Any = Fp8Dequantize(None)
    result = dequantized({"w.weight": weight, "w.weight_scale_inv": scale})
    assert same(result, {"w.weight": oracle._dequantize_one(weight, scale, torch.float32)})


@pytest.mark.parametrize("dtype", DTYPES)
def test_mxfp4(dtype: str) -> None:
    blocks = torch.randint(0, 256, (3, 10, 2, 16), dtype=torch.uint8)
    scales = torch.randint(110, 140, (3, 10, 2), dtype=torch.uint8)
    state = {"experts.up_proj_blocks": blocks, "experts.up_proj_scales": scales}
    expected = convert_moe_packed_tensors(blocks, scales, dtype=getattr(torch, dtype))
    assert same(dequantized(state, dtype), {"experts.up_proj": expected})


def test_large_and_small_scales_of_mxfp4() -> None:
    blocks = torch.arange(256, dtype=torch.uint8).reshape(1, 16, 1, 16)
    for exponent in (0, 1, 250, 254):
        scales = torch.full((1, 16, 1), exponent, dtype=torch.uint8)
        state = {"e.up_proj_blocks": blocks, "e.up_proj_scales": scales}
        expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
        assert same(dequantized(state, "bfloat16"), {"e.up_proj": expected})


def test_parts_in_different_shards() -> None:
    weight, scale = fp8(256, 128), torch.rand(2, 1)
    Path("shards").mkdir()
    state = {"up.weight": weight, "up.weight_scale_inv": scale, "x": torch.ones(2000)}
    save_file(state, "one.safetensors")
    ckpttool.convert("one.safetensors", "shards/", max_shard_size="30KB", force=True)
    assert len(list(Path("shards").glob("*.safetensors"))) > 1
    oracle: Any = Fp8Dequantize(None)
    expected = oracle._dequantize_one(weight, scale, torch.float32)
    rule = '[[rule]]\ndequantize = "*"\ndtype = "float32"'
    ckpttool.remap("shards", "b.safetensors", rules=rule)
    assert same(load_file("b.safetensors"), {"up.weight": expected, "x": state["x"]})


def test_only_the_weights_of_the_pattern() -> None:
    state = {f"{n}.{part}": value for n in "ab" for part, value in (
        ("weight", fp8(4, 4)), ("weight_scale", torch.rand(())))}  # fmt: skip
    save_file(state, "a.safetensors")
    rule = '[[rule]]\ndequantize = "a.{x*}"\ndtype = "float32"'
    ckpttool.remap("a.safetensors", "b.safetensors", rules=rule)
    result = load_file("b.safetensors")
    assert {*result} == {"a.weight", "b.weight", "b.weight_scale"}
    assert result["b.weight"].dtype == torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        ({"w.qweight": torch.ones(2, 2).int(), "w.qzeros": torch.ones(2).int(),
          "w.scales": torch.ones(2)}, "AWQ: only the library that quantized it knows the values"),
        ({"w.weight": fp8(4, 4), "w.weight_scale": torch.ones(3)},
         "a scale of shape [3] for a tensor of shape [4, 4]"),
        ({"a.weight": fp8(4, 4), "w.weight": fp8(4, 4), "w.weight_scale": torch.ones(())},
         "no scale belongs to it"),
        ({"w.weight": fp8(4, 4), "w.weight_scale": torch.ones(()), "w.weight_scale_2": torch.ones(())},
         "only the library that quantized it knows the values"),
    ],
)  # fmt: skip
def test_what_cannot_be_dequantized(state: State, problem: str) -> None:
    with pytest.raises(Refused) as caught:
        dequantized(state)
    assert problem in "; ".join(str(found) for found in caught.value.problems)


def test_nothing_quantized_is_refused() -> None:
    with pytest.raises(Refused) as caught:
        dequantized({"w": torch.ones(2)})
    assert caught.value.problems[0].problem.endswith("applies to no key")


@pytest.mark.parametrize("field", ["", "dtype = 'int8'", "dtype = 'float32'\nblock = [1]"])
def test_fields(field: str) -> None:
    save_file({"w": torch.ones(2)}, "a.safetensors")
    rule = f"[[rule]]\ndequantize = '*'\n{field}"
    with pytest.raises(CkptError, match="1 mistake in the rules"):
        ckpttool.remap("a.safetensors", rules=rule)


def quantized_llama(folder: str) -> State:
    """Save a model as transformers' fine-grained FP8 does; return the values of its weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 32}
    heads: dict[str, Any] = {
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
    }
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads)).bfloat16()
    model.save_pretrained(folder)
    path, config = Path(folder, "model.safetensors"), Path(folder, "config.json")
    oracle: Any = Fp8Dequantize(None)
    state, values = load_file(path), State()
    for key, value in list(state.items()):
        values[key] = value
        if key.endswith("proj.weight"):
            scale = torch.rand(value.shape[0] // 128, value.shape[1] // 128)
            state[key] = value.to(torch.float8_e4m3fn)
            state[f"{key}_scale_inv"] = scale
            values[key] = oracle._dequantize_one(state[key], scale, torch.bfloat16)
    save_file(state, path, {"format": "pt"})
    described = json.loads(config.read_text())
    described["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    config.write_text(json.dumps(described, indent=2) + "\n")
    return values


def test_a_folder_loads_without_quantization() -> None:
    from transformers import AutoModelForCausalLM

    values = quantized_llama("fp8")
    before = json.loads(Path("fp8/config.json").read_text())
    rule = '[[rule]]\ndequantize = "*"\ndtype = "bfloat16"'
    done = ckpttool.remap("fp8", "plain/", rules=rule)
    assert any("config.json is written without" in str(note) for note in done.notes)
    config = json.loads(Path("plain/config.json").read_text())
    del before["quantization_config"]
    assert config == before
    loaded = AutoModelForCausalLM.from_pretrained("plain").state_dict()
    assert all(torch.equal(value, loaded[key]) for key, value in values.items())


def test_a_configuration_stays_while_weights_are_quantized() -> None:
    """Renamed weights, or some that are left, are not what `config.json` describes."""
    quantized_llama("fp8")
    rule = '[[rule]]\ndequantize = "{x*}.down_proj.{p}"\ndtype = "bfloat16"'
    done = ckpttool.remap("fp8", "some/", rules=rule)
    assert not Path("some/config.json").exists()
    rule = '[[rule]]\ndequantize = "*"\ndtype = "bfloat16"\n[[rule]]\nrename = "model.{x*} => {x*}"'
    done = ckpttool.remap("fp8", "renamed/", rules=rule)
    assert not Path("renamed/config.json").exists()
    assert any("not copied: config.json" in str(note) for note in done.notes)
