"""Adapters of each method that PEFT has. Oracle: `PeftModel.from_pretrained`, and its warnings."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from command import Run

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

pytestmark = pytest.mark.filterwarnings("ignore")
MODELS = """
from transformers import LlamaConfig, LlamaForCausalLM
def llama(width=16):
    return LlamaForCausalLM(LlamaConfig(
        hidden_size=width, intermediate_size=2 * width, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=40))
"""
LAYERS: dict[str, Any] = {"target_modules": ["q_proj", "v_proj"]}
PROMPT: dict[str, Any] = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 4}
# the options without which PEFT does not make the adapter
OPTIONS: dict[str, dict[str, Any]] = {
    "ADALORA": {**LAYERS, "total_step": 5, "init_r": 4, "target_r": 2},
    "ADAPTION_PROMPT": {"task_type": "CAUSAL_LM", "adapter_len": 3, "adapter_layers": 2},
    "BOFT": {**LAYERS, "boft_block_size": 4},
    "C3A": {**LAYERS, "block_size": 4},
    "CARTRIDGE": PROMPT,
    "CPT": {"task_type": "CAUSAL_LM", "cpt_token_ids": [1, 2], "cpt_mask": [1, 1],
            "cpt_tokens_type_mask": [1, 2]},
    "FOURIERFT": {**LAYERS, "n_frequency": 5},
    "IA3": {"target_modules": ["q_proj"], "feedforward_modules": []},
    "LN_TUNING": {"target_modules": ["input_layernorm"]},
    "MISS": {**LAYERS, "r": 2},
    "MULTITASK_PROMPT_TUNING": {**PROMPT, "num_ranks": 1, "num_tasks": 2},
    "OFT": {**LAYERS, "oft_block_size": 4, "r": 0},
    "PREFIX_TUNING": PROMPT,
    "PROMPT_TUNING": PROMPT,
    "PSOFT": {**LAYERS, "r": 4},
    "P_TUNING": {**PROMPT, "encoder_hidden_size": 8},
    "ROAD": {**LAYERS, "group_size": 4},
    "SHIRA": {**LAYERS, "r": 2},
    "TRAINABLE_TOKENS": {"target_modules": ["embed_tokens"], "token_indices": [1, 2]},
    "VBLORA": {**LAYERS, "num_vectors": 4, "vector_length": 4, "topk": 2},
}  # fmt: skip
METHODS = [method.value for method in PEFT_TYPE_TO_CONFIG_MAPPING]


def llama(width: int = 16) -> nn.Module:
    names: dict[str, Any] = {}
    exec(MODELS, names)
    torch.manual_seed(0)
    model: nn.Module = names["llama"](width)
    return model


def peft_loads(folder: Path, model: nn.Module) -> bool:
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        try:
            peft.PeftModel.from_pretrained(model, str(folder))
        except (KeyError, RuntimeError, ValueError):
            return False
    return not any("missing adapter keys" in str(warning.message) for warning in raised)


@pytest.mark.parametrize("method", METHODS)
def test_the_verdict_is_that_of_peft(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "method_nets.py").write_text(MODELS)
    config = PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType(method)]
    try:
        adapted = peft.get_peft_model(llama(), config(**OPTIONS.get(method, LAYERS)))
        adapted.save_pretrained(tmp_path / "adapter")
    except Exception as error:
        pytest.skip(f"PEFT does not make it here: {error}")
    file = tmp_path / "adapter/adapter_model.safetensors"
    state = load_file(file)
    models = {"method_nets.py:llama": llama(), "method_nets.py:llama(width=32)": llama(32)}
    for model, net in models.items():
        done = run("diff", "adapter", "--model", model)
        assert done.status == (0 if peft_loads(tmp_path / "adapter", net) else 1), done.said
        first_lines = "\n".join(done.out.splitlines()[:4])
        assert "adapter" in first_lines
        assert "whether PEFT loads it" in first_lines
    del state[next(iter(state))]
    save_file(state, file)
    done = run("diff", "adapter", "--model", "method_nets.py:llama")
    assert done.status == (0 if peft_loads(tmp_path / "adapter", llama()) else 1), done.said


# a key that PEFT saves, does not need, and does not call missing
SILENT = {
    "ADAPTION_PROMPT": "base_model.model.model.layers.0.self_attn.adaption_gate",
    "SHIRA": "base_model.model.model.layers.0.self_attn.q_proj.shira_indices",
    "VERA": "base_model.vera_B",
    "MULTITASK_PROMPT_TUNING": "prefix_task_cols",
}


@pytest.mark.parametrize("method", SILENT)
def test_values_that_peft_does_not_miss_are_named(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "method_nets.py").write_text(MODELS)
    config = PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType(method)](**OPTIONS.get(method, LAYERS))
    peft.get_peft_model(llama(), config).save_pretrained(tmp_path / "adapter")
    file = tmp_path / "adapter/adapter_model.safetensors"
    state = load_file(file)
    words = ("diff", "adapter", "--model", "method_nets.py:llama", "--format", "json")
    assert not any("more for such an adapter" in note["text"] for note in run(*words).data["notes"])
    del state[SILENT[method]]
    save_file(state, file)
    assert peft_loads(tmp_path / "adapter", llama())
    done = run(*words)
    assert done.status == 0
    texts = [note["text"] for note in done.data["notes"]]
    expected = f"PEFT saves 1 key more for such an adapter: {SILENT[method]};"
    assert any(text.startswith(expected) for text in texts)
