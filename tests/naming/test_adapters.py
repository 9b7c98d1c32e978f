"""Adapters recognised by keys of PEFT and other tools, and their notes in `inspect` and `diff`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save_file

import ckpttool
import real_models
from command import Run, notes_in
from places import SUPPORT

TARGETS = [f"model.layers.{n}.self_attn.{name}" for n in range(2) for name in ("q_proj", "v_proj")]
LLAMA = f"{SUPPORT / 'real_models.py'}:llama"


def adapter_of(state: Any) -> Any:
    """Return the adapter that `inspect` finds among the keys, or None."""
    return ckpttool.inspect(state).adapters.get("")


def named(*keys: str) -> dict[str, torch.Tensor]:
    return {key: torch.ones(1) for key in keys}


def notes_on(adapter: Any, base: Any) -> str:
    return "\n".join(map(str, ckpttool.diff(adapter, base).notes))


def test_adapters_saved_by_peft_are_recognised() -> None:
    """An adapter file and a complete state_dict; PEFT lists the adapted modules."""
    model = get_peft_model(
        real_models.llama(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], use_dora=True)
    )
    base = real_models.llama().state_dict()
    saved = get_peft_model_state_dict(model)
    alone, in_model = adapter_of(saved), adapter_of(model.state_dict())
    assert [*alone.modules] == [*in_model.modules] == model.targeted_module_names == TARGETS
    assert (alone.title, alone.alone, in_model.alone) == ("a LoRA adapter", True, False)
    assert len(in_model.rest) == len(base)
    for state in (saved, model.state_dict()):
        assert "all of them are in right" in notes_on(state, base)
    missing = notes_on(saved, real_models.bert().state_dict())
    assert f"{len(TARGETS)} adapted modules not in right: {TARGETS[0]}" in missing


def test_an_ia3_adapter_is_recognised() -> None:
    config = IA3Config(target_modules=["k_proj"], feedforward_modules=[])
    adapter = adapter_of(get_peft_model_state_dict(get_peft_model(real_models.llama(), config)))
    assert adapter.kinds == ("IA3",)
    assert [*adapter.modules] == [f"model.layers.{n}.self_attn.k_proj" for n in range(2)]


@pytest.mark.parametrize(
    ("keys", "module", "base"),
    [
        (
            ["unet.down.0.to_q.lora.down.weight", "unet.down.0.to_q.lora.up.weight"],
            "unet.down.0.to_q",
            "unet.down.0.to_q",
        ),
        (
            [
                "lora_unet_down_0_to_q.lora_down.weight",
                "lora_unet_down_0_to_q.lora_up.weight",
                "lora_unet_down_0_to_q.alpha",
            ],
            "lora_unet_down_0_to_q",
            "down.0.to_q",
        ),
        (["a.b.lora_embedding_A", "a.b.lora_embedding_B"], "a.b", "a.b"),
        (["a.17.ia3_l.weight"], "a.17", "a.17"),
        (["a\nb.ia3_l.weight"], "a\nb", "a\nb"),
    ],
)
def test_adapters_of_other_tools_are_recognised(keys: list[str], module: str, base: str) -> None:
    adapter = adapter_of(named(*keys))
    assert (dict(adapter.modules), adapter.alone) == ({module: tuple(keys)}, True)
    assert "all of them are in right" in notes_on(named(*keys), named(f"{base}.weight"))
    assert "1 adapted module not in right" in notes_on(named(*keys), named("other.weight"))


@pytest.mark.parametrize("build", [name for name in real_models.ALL if name != "lora"])
def test_a_model_is_not_an_adapter(build: str) -> None:
    assert adapter_of(getattr(real_models, build)().state_dict()) is None


@pytest.mark.parametrize(
    "keys", [["lora_weights.weight", "colora.weight", "alpha"], ["a.0.ia7_l.weight"]]
)
def test_keys_like_those_of_an_adapter_are_no_adapter(keys: list[str]) -> None:
    assert adapter_of(named(*keys)) is None


NOTES = [
    (
        "adapter.safetensors llama.pt",
        "left is a LoRA adapter for 4 modules, all of them are in right; it does not have",
    ),
    (
        "llama.pt adapter.safetensors",
        "right is a LoRA adapter for 4 modules, all of them are in left",
    ),
    ("adapter.safetensors bert.pt", "left is a LoRA adapter for 4 modules, 0 of them are in right"),
    (
        "adapter.safetensors bert.pt",
        "4 adapted modules not in right: model.layers.0.self_attn.q_proj, ",
    ),
    (
        f"--model {LLAMA} adapter.safetensors",
        "the checkpoint is a LoRA adapter for 4 modules, all of them are in",
    ),
    (f"--model {LLAMA} adapter.safetensors", "0 of 8 tensors matched"),
]


def test_kokoro_368_an_adapter_without_matching_keys_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    """``load_state_dict(strict=False)`` loads nothing and does not report it."""
    monkeypatch.chdir(tmp_path)
    save_file(get_peft_model_state_dict(real_models.lora()), "adapter.safetensors")
    for name in ("llama", "bert"):
        torch.save(getattr(real_models, name)().state_dict(), f"{name}.pt")
    for operands, note in NOTES:
        done = run("diff", *operands.split(), "--format", "json")
        assert done.status == 1
        assert any(text.startswith(note) for text in notes_in(done.data)), note
    (adapter,) = run("inspect", "adapter.safetensors", "--format", "json").data["adapters"]
    assert adapter == {
        "section": "",
        "kinds": ["LoRA"],
        "modules": TARGETS,
        "tensors": 8,
        "alone": True,
    }
    output = run("inspect", "adapter.safetensors").out
    assert "LoRA, without its base model" in output
    assert "model.layers.{0-1}.self_attn.q_proj" in output


def test_an_adapter_in_a_complete_model_is_reported(tmp_path: Path, run: Run) -> None:
    model = real_models.lora().state_dict()
    for state, section in (model, "(root)"), ({"model": model, "epoch": 1}, "model"):
        torch.save(state, tmp_path / "a.pt")
        done = run("inspect", tmp_path / "a.pt")
        (row,) = [line.split() for line in done.out.splitlines() if "with its base model" in line]
        assert (done.status, row[0]) == (0, section)
