"""Presets: both real models, small and with random weights, give the same outputs.

transformers is installed with the other test requirements; `make models` installs torchvision, timm
and torchtune. No package has Meta's code of Llama. torchtune's model, whose layout differs only in
names, is run instead, and torchtune's converter writes Meta's names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpttool
from ckpttool import CkptError, rules
from command import Run, call, main

torch.set_num_threads(1)
State = dict[str, torch.Tensor]
SIZES = {"heads": 4, "kv_heads": 2}
NAMES = [preset.name for preset in rules()]
ONE_WAY = ["vit-timm-to-torchvision", "vit-torchvision-to-timm"]  # each is the reverse of the other
FOLDER = Path(__file__).parents[2] / "ckpttool" / "ruleset" / "presets"
TENSOR = re.compile(r'"(\S+) (\[[\d, ]+\])"')


def sizes_of(name: str) -> dict[str, int]:
    return SIZES if name.startswith("llama") else {}


def call_of(name: str) -> str:
    return call(name, **sizes_of(name))


@pytest.mark.parametrize("name", NAMES)
def test_examples_are_correct_and_reversible_presets_roundtrip(tmp_path: Path, name: str) -> None:
    before = (
        (FOLDER / f"{name}.toml").read_text().partition("before = [")[2].partition("]\nafter")[0]
    )
    state = {key: torch.randn(json.loads(shape)) for key, shape in TENSOR.findall(before)}
    source, there, back = (tmp_path / f"{word}.safetensors" for word in ("in", "there", "back"))
    save_file(state, source)
    assert main(["remap", str(source), "--rules", call_of(name), "-o", str(there)]) in (0, 1)
    if name in ONE_WAY:
        with pytest.raises(CkptError, match="cannot be reversed"):
            ckpttool.remap(source, rules=name, reverse=True)
    elif there.exists():
        assert (
            main(["remap", str(there), "--rules", call_of(name), "--reverse", "-o", str(back)]) == 0
        )
        assert back.read_bytes() == source.read_bytes()


LLAMA = {
    "llama-original-to-hf": ("norm.weight", "layers.0.attention.wq.weight"),
    "llama-torchtune-to-hf": ("norm.scale", "layers.0.attn.q_proj.weight"),
}


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("name", LLAMA)
def test_a_part_of_a_tensor_parallel_model_is_refused(
    tmp_path: Path, run: Run, name: str, dim: int
) -> None:
    """Rank 0 of 2 has half of each projection; the norms are complete."""
    norm, query = LLAMA[name]
    before = (FOLDER / f"{name}.toml").read_text().partition("before = [")[2]
    state = {
        key: torch.randn(json.loads(shape))
        for key, shape in TENSOR.findall(before.partition("]\nafter")[0])
    }
    state[query] = state[query].chunk(2, dim)[0].clone()
    save_file(state, tmp_path / "consolidated.00.safetensors")
    out = tmp_path / "out.safetensors"
    done = run(
        "remap", tmp_path / "consolidated.00.safetensors", "--rules", call_of(name), "-o", out
    )
    assert done.status == 1
    assert f"dimension {dim} is 8, and 16 in {norm}" in done.err
    assert query in done.err
    assert not out.exists()


def test_unknown_preset_is_an_error(run: Run, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1)}, tmp_path / "x.pt")
    done = run("remap", tmp_path / "x.pt", "--rules", "none", "-o", tmp_path / "out.pt")
    assert (done.status, "no preset with that name" in done.err) == (2, True)


def test_presets_are_listed(run: Run) -> None:
    done = run("rules")
    assert (done.status, done.err) == (0, "")
    assert [line.split()[0] for line in done.out.splitlines() if "-to-" in line] == NAMES
    data = run("rules", "--format", "json").data
    assert {one["name"]: one["sizes"] for one in data["sets"]} == {
        name: list(sizes_of(name)) for name in NAMES
    }
    assert all(" to " in one["about"] for one in data["sets"])


@pytest.mark.parametrize("name", NAMES)
def test_preset_rules_are_printed_as_a_rules_file(name: str, run: Run) -> None:
    done = run("rules", name)
    assert done.out == (FOLDER / f"{name}.toml").read_text()
    assert [one["toml"] for one in run("rules", name, "--format", "json").data["sets"]] == [
        done.out
    ]
    assert run("rules", f"{name}x").status == 2


def convert_with(folder: Path, state: State, name: str, *more: str) -> State:
    source, out = folder / "in.safetensors", folder / "out.safetensors"
    save_file({key: value.contiguous().clone() for key, value in state.items()}, source)
    assert (
        main(["remap", str(source), "--rules", call_of(name), *more, "-o", str(out), "--force"])
        == 0
    )
    return load_file(out)


def assert_same_outputs(
    left: Callable[[torch.Tensor], Any], right: Callable[[torch.Tensor], Any], x: torch.Tensor
) -> None:
    with torch.no_grad():
        actual, expected = left(x), right(x)
    assert actual.std() > 1e-3
    assert torch.allclose(actual, expected, atol=1e-5), (actual - expected).abs().max()


def randomized(model: Any) -> Any:
    """Randomize all weights, including norms, biases and embeddings, so that every tensor affects
    the output.
    """
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter) / 4 + (parameter.ndim == 1)
    return model.eval()


IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
TOKENS = torch.randint(0, 32, (2, 7), generator=torch.Generator().manual_seed(1))


def torchvision_vit() -> Any:
    torchvision = pytest.importorskip(
        "torchvision", reason="torchvision is not installed (make models)"
    )
    return randomized(torchvision.models.VisionTransformer(32, 8, 2, 4, 32, 64, num_classes=5))


def timm_vit() -> Any:
    timm = pytest.importorskip("timm", reason="timm is not installed (make models)")
    kind = timm.models.vision_transformer.VisionTransformer
    return randomized(
        kind(
            img_size=32,
            patch_size=8,
            embed_dim=32,
            depth=2,
            num_heads=4,
            mlp_ratio=2,
            num_classes=5,
        )
    )


def test_vit_of_torchvision_and_timm(tmp_path: Path) -> None:
    first, second = torchvision_vit(), timm_vit()
    second.load_state_dict(convert_with(tmp_path, first.state_dict(), "vit-torchvision-to-timm"))
    assert_same_outputs(first, second, IMAGES)
    first, second = torchvision_vit(), timm_vit()
    first.load_state_dict(convert_with(tmp_path, second.state_dict(), "vit-timm-to-torchvision"))
    assert_same_outputs(first, second, IMAGES)


def test_vit_of_timm_and_transformers(tmp_path: Path) -> None:
    transformers, first = import_transformers(), timm_vit()
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, image_size=32, patch_size=8,
        num_labels=5, layer_norm_eps=first.norm.eps,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    save_file(
        convert_with(tmp_path, first.state_dict(), "vit-timm-to-hf"), tmp_path / "model.safetensors"
    )
    second, info = transformers.ViTForImageClassification.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert not any(info.values())
    assert_same_outputs(first, lambda x: second.eval()(x).logits, IMAGES)
    second.save_pretrained(tmp_path / "saved")
    back = convert_with(
        tmp_path, load_file(tmp_path / "saved" / "model.safetensors"), "vit-timm-to-hf", "--reverse"
    )
    first.load_state_dict(back)
    assert_same_outputs(first, lambda x: second(x).logits, IMAGES)


def torchtune_llama() -> Any:
    models = pytest.importorskip(
        "torchtune.models.llama3", reason="torchtune is not installed (make models)"
    )
    return randomized(
        models.llama3(
            vocab_size=32,
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            embed_dim=16,
            max_seq_len=16,
            intermediate_dim=24,
        )
    )


def transformers_llama() -> Any:
    transformers = import_transformers()
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=24, max_position_embeddings=16, rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
    )  # fmt: skip
    return randomized(transformers.LlamaForCausalLM(config))


@pytest.mark.parametrize("name", ["llama-torchtune-to-hf", "llama-original-to-hf"])
def test_llama(tmp_path: Path, name: str) -> None:
    first, second = torchtune_llama(), transformers_llama()
    original = name == "llama-original-to-hf"
    convert = pytest.importorskip("torchtune.models.convert_weights")
    state = convert.tune_to_meta(first.state_dict()) if original else first.state_dict()
    second.load_state_dict(convert_with(tmp_path, state, name))
    assert_same_outputs(first, lambda x: second(x).logits, TOKENS)

    second = transformers_llama()
    back = convert_with(tmp_path, second.state_dict(), name, "--reverse")
    first.load_state_dict(convert.meta_to_tune(back) if original else back)
    assert_same_outputs(first, lambda x: second(x).logits, TOKENS)


def import_transformers() -> Any:
    return pytest.importorskip("transformers", "5.0", reason="transformers 5 is not installed")


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("Mixtral", "mixtral-experts-to-stacked"),
        ("Qwen2Moe", "qwen-moe-experts-to-stacked"),
        ("Qwen3Moe", "qwen-moe-experts-to-stacked"),
    ],
)
def test_experts(tmp_path: Path, kind: str, name: str) -> None:
    """Convert the output of `save_pretrained` to the model's state dict and back."""
    transformers = import_transformers()
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, head_dim=4,
        num_key_value_heads=2, num_local_experts=3, num_experts=3, moe_intermediate_size=24,
        shared_expert_intermediate_size=24, num_experts_per_tok=2,
    )  # fmt: skip
    build = getattr(transformers, f"{kind}ForCausalLM")
    first, second = randomized(build(config)), build(config).eval()
    first.save_pretrained(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert any(".experts.2." in key for key in saved)
    second.load_state_dict(convert_with(tmp_path, saved, name))
    assert_same_outputs(lambda x: first(x).logits, lambda x: second(x).logits, TOKENS)
    back = convert_with(tmp_path, first.state_dict(), name, "--reverse")
    assert back.keys() == saved.keys()
    assert all(torch.equal(back[key], saved[key]) for key in saved)


@pytest.mark.parametrize("prefix", ["", "transformer."])
def test_conv1d_and_linear(tmp_path: Path, prefix: str) -> None:
    """GPT-2 unchanged, and with each Conv1D replaced by an equivalent Linear."""
    transformers = import_transformers()
    config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=4, vocab_size=32, n_positions=16, bos_token_id=0,
                                     eos_token_id=0)  # fmt: skip
    build = transformers.GPT2LMHeadModel if prefix else transformers.GPT2Model
    first, second = randomized(build(config)), build(config).eval()
    for name, module in list(second.named_modules()):
        if type(module).__name__ == "Conv1D":
            parent, _, last = name.rpartition(".")
            setattr(second.get_submodule(parent), last, torch.nn.Linear(module.nx, module.nf))
    second.load_state_dict(convert_with(tmp_path, first.state_dict(), "gpt2-conv1d-to-linear"))
    assert_same_outputs(lambda x: first(x)[0], lambda x: second(x)[0], TOKENS)
    back = convert_with(tmp_path, second.state_dict(), "gpt2-conv1d-to-linear", "--reverse")
    assert all(torch.equal(back[key], value) for key, value in first.state_dict().items())
