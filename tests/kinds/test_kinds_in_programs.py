"""`swap-weights` with weights that are not plain: nothing that the weights need is left out."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpttool
from command import Run

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")

CONFIGS: dict[str, Any] = {
    "lora": {"r": 2},
    "dora": {"r": 2, "use_dora": True},
    "saved": {"r": 2, "modules_to_save": ["head"]},
    "bias": {"r": 2, "bias": "lora_only"},
}
INPUTS = torch.linspace(-1, 1, 8).reshape(2, 4)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.body(x)))


@pytest.fixture
def net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Net:
    """Return a model whose program is in ``program.pt2``."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    net = Net()
    torch.export.save(torch.export.export(net, (INPUTS,)), "program.pt2")
    return net


def fine_tuned(net: Net, options: dict[str, Any]) -> Any:
    config = peft.LoraConfig(target_modules=["body"], **options)
    adapted = peft.get_peft_model(copy.deepcopy(net), config)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(0.5)
    return adapted


@pytest.mark.parametrize("name", CONFIGS)
def test_an_adapter_is_merged_and_never_left_out(net: Net, run: Run, name: str) -> None:
    adapted = fine_tuned(net, CONFIGS[name])
    expected = adapted(INPUTS)
    torch.save(adapted.state_dict(), "tuned.pt")
    adapted.save_pretrained("adapter")
    for weights in ("tuned.pt", "adapter"):
        done = run("swap-weights", "program.pt2", weights, "-o", "out.pt2")
        assert done.status == 1
        assert "--drop" not in done.err
        assert "merge_and_unload() returns the merged model" in done.err
    torch.save(adapted.merge_and_unload().state_dict(), "merged.pt")
    assert run("swap-weights", "program.pt2", "merged.pt", "-o", "out.pt2").status == 0
    swapped = torch.export.load("out.pt2").module()(INPUTS)
    torch.testing.assert_close(swapped, expected)


def test_an_adapter_is_not_left_out_in_memory(net: Net) -> None:
    state = fine_tuned(net, CONFIGS["lora"]).state_dict()
    with pytest.raises(ckpttool.Refused) as caught:
        ckpttool.swap_weights(net, state)
    assert "merge_and_unload()" in caught.value.hint


def test_scales_are_not_left_out(net: Net, run: Run) -> None:
    state: dict[str, torch.Tensor] = {}
    plain: dict[str, torch.Tensor] = {}
    for key, value in net.state_dict().items():
        plain[key] = state[key] = value
        if value.ndim == 2:
            scale = value.abs().amax() / 448
            state[key] = (value / scale).to(torch.float8_e4m3fn)
            state[f"{key}_scale"] = scale
            plain[key] = state[key].float() * scale
    torch.save(state, "fp8.pt")
    done = run("swap-weights", "program.pt2", "fp8.pt", "--cast", "-o", "out.pt2")
    assert done.status == 1
    assert "--drop" not in done.err
    assert "`dequantize` in a rules file" in done.err
    Path("rules.toml").write_text('[[rule]]\ndequantize = "*"\ndtype = "float32"\n')
    assert run("remap", "fp8.pt", "--rules", "rules.toml", "-o", "plain.pt").status == 0
    assert run("swap-weights", "program.pt2", "plain.pt", "-o", "out.pt2").status == 0
    swapped = torch.export.load("out.pt2")
    for key, value in plain.items():
        assert torch.equal(swapped.state_dict[key], value)


def test_no_rename_is_suggested_between_an_adapter_and_a_model(net: Net, run: Run) -> None:
    adapted = fine_tuned(net, CONFIGS["saved"])
    adapted.save_pretrained("adapter")
    torch.save(adapted.state_dict(), "tuned.pt")
    torch.save(net.state_dict(), "base.pt")
    for adapter in ("adapter", "tuned.pt"):
        for plain in ("base.pt", "program.pt2"):
            for pair in ((adapter, plain), (plain, adapter)):
                done = run("diff", *pair, "--format", "json")
                assert done.data["identical"] is False
                assert done.data["fix"] == []
                assert done.data["unfixed"]
