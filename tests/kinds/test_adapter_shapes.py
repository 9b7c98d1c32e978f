"""An adapter next to a base whose weights have other shapes. Oracle: PEFT writes the adapter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from command import Run

peft = pytest.importorskip("peft")
pytorch_utils = pytest.importorskip("transformers.pytorch_utils")
NOTE = "of another shape in"


def linear(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.Linear(width, 2))


def conv1d(width: int) -> nn.Module:
    """A weight is stored transposed, [inputs, outputs]."""
    return nn.Sequential(pytorch_utils.Conv1D(6, width), nn.Linear(6, 2))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("build", [linear, conv1d])
def test_a_base_of_another_width_is_named(
    build: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    assert callable(build)
    monkeypatch.chdir(tmp_path)
    config = peft.LoraConfig(r=2, target_modules=["0"])
    peft.get_peft_model(build(4), config).save_pretrained("adapter")
    torch.save(build(4).state_dict(), "base.pt")
    torch.save(build(8).state_dict(), "wide.pt")
    assert NOTE not in run("diff", "adapter", "base.pt").out
    for pair in (("adapter", "wide.pt"), ("wide.pt", "adapter")):
        out = run("diff", *pair).out
        assert f"1 adapted module {NOTE} wide.pt: 0 [" in out


@pytest.mark.filterwarnings("ignore")
def test_packed_weights_of_the_base_have_no_shape_to_compare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    """As bitsandbytes packs a weight into 4 bits."""
    monkeypatch.chdir(tmp_path)
    config = peft.LoraConfig(r=2, target_modules=["0"])
    peft.get_peft_model(linear(4), config).save_pretrained("adapter")
    base = linear(4).state_dict()
    base["0.weight"] = torch.zeros(8, 1, dtype=torch.uint8)
    base["0.weight.absmax"] = torch.ones(1)
    base["0.weight.quant_map"] = torch.ones(16)
    base["0.weight.quant_state.bitsandbytes__nf4"] = torch.zeros(9, dtype=torch.uint8)
    torch.save(base, "packed.pt")
    out = run("diff", "adapter", "packed.pt").out
    assert "all of them are in packed.pt" in out
    assert NOTE not in out
