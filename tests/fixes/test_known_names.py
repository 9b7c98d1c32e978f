"""Names that a preset knows: the printed fix is the preset, which also brings rows into order."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch

from command import Run

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

HEADS, KV_HEADS = 4, 2
TOKENS = torch.tensor([[1, 5, 2, 7]])
NAMES = {
    "model.embed_tokens": "tok_embeddings",
    "model.norm": "norm",
    "lm_head": "output",
    "model.layers": "layers",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "post_attention_layernorm": "ffn_norm",
    "input_layernorm": "attention_norm",
}


def as_meta(key: str, value: torch.Tensor) -> tuple[str, torch.Tensor]:
    """Return a tensor of transformers' Llama as Meta's code names and orders it: the pairs that are
    rotated stand beside each other.
    """
    for name, other in NAMES.items():
        key = key.replace(name, other)
    heads = {"wq": HEADS, "wk": KV_HEADS}.get(key.split(".")[-2])
    if heads is not None:
        rows, columns = value.shape
        halves = value.view(heads, 2, rows // heads // 2, columns)
        value = halves.transpose(1, 2).reshape(rows, columns)
    return key, value


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> torch.nn.Module:
    """Return a Llama that is in ``hf/``, and in ``meta.pth`` with Meta's names."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
    )
    model: torch.nn.Module = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained("hf")
    torch.save(dict(as_meta(*item) for item in model.state_dict().items()), "meta.pth")
    return model


@pytest.mark.parametrize("right", [("hf",), ("--model", "hf:hf")])
def test_the_fix_is_the_preset_with_the_sizes_of_the_configuration(
    model: torch.nn.Module, run: Run, right: tuple[str, ...]
) -> None:
    done = run("diff", "meta.pth", *right)
    (line,) = re.findall(r"^fix: ckpttool (.*)$", done.out, re.MULTILINE)
    assert f"llama-original-to-hf(heads={HEADS}, kv_heads={KV_HEADS})" in line
    words = shlex.split(line)
    assert run(*words).status == 0
    fresh = transformers.LlamaForCausalLM(model.config).eval()
    fresh.load_state_dict(torch.load(words[-1]))
    assert torch.equal(fresh(TOKENS).logits, model(TOKENS).logits)
    assert run("diff", words[-1], *right).status == 0


def test_fix_does_not_apply_a_preset_by_itself(model: torch.nn.Module, run: Run) -> None:
    done = run("fix", "meta.pth", "--model", "hf:hf", "-o", "out.pth")
    assert done.status == 1
    assert "llama-original-to-hf" in done.err
    assert not Path("out.pth").exists()


def test_the_preset_is_named_without_sizes_if_nothing_tells_them(
    model: torch.nn.Module, run: Run
) -> None:
    torch.save(model.state_dict(), "alone.pth")
    done = run("diff", "meta.pth", "alone.pth")
    assert "renames alone may leave values in the order of the other code" in done.out
    assert "--rules 'llama-original-to-hf(heads=N, kv_heads=N)'" in done.out
    back = run("diff", "alone.pth", "meta.pth").out
    assert "--rules 'llama-original-to-hf(heads=N, kv_heads=N)' --reverse" in back


def test_two_configurations_that_disagree_tell_no_sizes(model: torch.nn.Module, run: Run) -> None:
    Path("config.json").write_text('{"num_attention_heads": 8, "num_key_value_heads": 8}')
    out = run("diff", "meta.pth", "hf").out
    assert "--rules 'llama-original-to-hf(heads=N, kv_heads=N)'" in out
