"""Two models save the same keys, and one computes what the other has. Oracle: torch loads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from command import Run

MODELS = """
import torch
from torch import nn

def fuse(module, state, prefix, metadata):
    parts = [state.pop(f"{prefix}{name}.weight") for name in "qkv"]
    state[f"{prefix}qkv.weight"] = torch.cat(parts)

def split(module, state, prefix, *rest):
    whole = state.pop(f"{prefix}qkv.weight")
    for name, part in zip("qkv", whole.chunk(3)):
        state[f"{prefix}{name}.weight"] = part

class Split(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        for name in "qkv":
            self.add_module(name, nn.Linear(4, width, bias=False))
        self.scale = nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_state_dict_post_hook(fuse)
        self.register_load_state_dict_pre_hook(split)

class Fused(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.qkv = nn.Linear(4, 3 * width, bias=False)
        self.scale = nn.Parameter(torch.ones(2), requires_grad=False)

def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
"""
WAYS = [("Split", "Fused"), ("Fused", "Split")]


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(MODELS)
    for name in ("Split", "Fused"):
        model = built(name)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, f"{name}.pt")


def built(name: str) -> nn.Module:
    code: dict[str, Any] = {}
    exec(MODELS, code)
    model: nn.Module = code[name]()
    return model


def between(old: str, new: str) -> tuple[str, ...]:
    return (f"{old}.pt::model", "--model", f"model.py:{old}", "--to-model", f"model.py:{new}")


@pytest.mark.parametrize(("old", "new"), WAYS)
def test_keys_and_values_stay(run: Run, old: str, new: str) -> None:
    assert run("remap", *between(old, new), "-o", "out.pt").status == 0
    written, saved = torch.load("out.pt"), torch.load(f"{old}.pt")["model"]
    torch.testing.assert_close(written, dict(saved), rtol=0, atol=0)
    built(new).load_state_dict(written)


@pytest.mark.parametrize(("old", "new"), WAYS)
def test_a_call_variant_of_a_common_key_is_left_out(run: Run, old: str, new: str) -> None:
    saved = torch.load(f"{old}.pt")["model"]
    torch.save({**saved, "qkv@1.weight": saved["qkv.weight"].clone()}, "variant.pt")
    words = ("remap", "variant.pt", "--model", f"model.py:{old}", "--to-model", f"model.py:{new}")
    done = run(*words, "-o", "out.pt")
    assert done.status == 0, done.err
    assert "qkv@1.weight  a call variant of qkv.weight" in done.out
    written = torch.load("out.pt")
    torch.testing.assert_close(written, dict(saved), rtol=0, atol=0)
    built(new).load_state_dict(written)

    torch.save({**saved, "qkv@1.weight": saved["qkv.weight"] + 1}, "variant.pt")
    refused = run(*words, "-o", "differs.pt")
    assert refused.status == 1
    assert "a call variant of qkv.weight with another value @ qkv@1.weight" in refused.err
    torch.save({**saved, "module.qkv.weight": saved["qkv.weight"].clone()}, "variant.pt")
    refused = run(*words, "-o", "twice.pt")
    assert refused.status == 1
    assert "qkv.weight, module.qkv.weight" in refused.err
    assert not Path("differs.pt").exists()
    assert not Path("twice.pt").exists()


@pytest.mark.parametrize(("old", "new"), WAYS)
def test_frozen_parameters_are_not_kept_if_they_are_left_out(run: Run, old: str, new: str) -> None:
    done = run("remap", *between(old, new), "--trainable-only", "-o", "out.pt")
    assert done.status == 1 or "scale" not in torch.load("out.pt")


def test_other_shapes_are_refused(run: Run) -> None:
    words = ("--model", "model.py:Split", "--to-model", "model.py:Fused(width=8)")
    assert run("remap", "Split.pt::model", *words, "-o", "out.pt").status == 1


@pytest.mark.parametrize("form", ["serialized", "runtime"])
def test_keys_of_any_form_are_complete(run: Run, form: str) -> None:
    """A note on missing keys is not about the other form's names."""
    if form == "runtime":
        words = ("--model", "model.py:Split", "--to", "runtime", "-o", "runtime.pt")
        assert run("remap", "Split.pt", *words).status == 0
    source = {"serialized": "Split.pt", "runtime": "runtime.pt"}[form]
    words = ("--model", "model.py:Split", "--optimizer", "model.py:sgd", "--optimizer-keys", "fqn")
    done = run("remap", source, *words, "-o", "named.pt")
    assert done.status == 0
    assert "the keys stay as they are" not in done.err


def test_an_adapter_does_not_lack_the_keys_of_its_base(run: Run) -> None:
    saved = torch.load("Fused.pt")
    adapter = {f"base_model.model.qkv.lora_{side}.weight": torch.ones(2, 2) for side in "AB"}
    torch.save({**saved, "model": adapter}, "adapter.pt")
    words = ("--model", "model.py:Fused", "--optimizer", "model.py:sgd", "--optimizer-keys", "fqn")
    done = run("remap", "adapter.pt", *words, "-o", "named.pt")
    assert "the keys stay as they are" not in done.err
