"""Commands that were refused when pasted: files with code in other entries, optimizers, rules, folders, two files."""

from __future__ import annotations

import collections
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from command import Done, Run, fixes_in, notes_in

CODE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)

class Layer(nn.Module):
    def __init__(self, fused):
        super().__init__()
        if fused:
            self.qkv = nn.Linear(6, 18)
        else:
            self.q, self.k, self.v = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.o = nn.Linear(6, 6)

class Lm(nn.Module):
    def __init__(self, fused=False, more=False):
        super().__init__()
        self.layers, self.emb = nn.ModuleList(Layer(fused) for _ in range(3)), nn.Embedding(7, 6)
        if more:
            self.extra = nn.Linear(6, 5)

def adam(model):
    return torch.optim.Adam(model.parameters())
"""
scope: dict[str, Any] = {}
exec(CODE, scope)
Net, Lm, adam = scope["Net"], scope["Lm"], scope["adam"]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(CODE)


def stepped(model: nn.Module) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = adam(model)
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, number + 1.0)
    optimizer.step()
    return optimizer


class Called:
    """As mmengine's message hub is pickled: an attribute that a call of `getattr` takes."""

    def __reduce__(self) -> Any:
        return getattr, (collections.OrderedDict, "fromkeys")


def paste(run: Run, done: Done) -> str:
    """Run the printed commands; return the output of the last one."""
    assert done.status == 1, done.said
    out = ""
    for command in fixes_in(done.data):
        line = shlex.split(command)
        assert line[0] == "ckpttool"
        result = run(*line[1:])
        assert result.status == (1 if line[1] == "diff" else 0), f"{command}\n{result.said}"
        out = line[line.index("-o") + 1] if "-o" in line else out
    return out


@pytest.mark.parametrize("with_optimizer", [False, True])
@pytest.mark.parametrize("place", ["message_hub", "meta.hooks"])
def test_code_in_another_entry_is_left_out(place: str, with_optimizer: bool, run: Run) -> None:
    model = Net()
    saved: dict[str, Any] = {
        "meta": {"epoch": 1},
        "state_dict": {f"module.{k}": v for k, v in model.state_dict().items()},
    }
    if with_optimizer:
        saved["optimizer"] = stepped(model).state_dict()
    entry: dict[str, Any] = saved
    *outer, last = place.split(".")
    for name in outer:
        entry = entry[name]
    entry[last] = {"log_scalars": {"lr": Called()}}
    torch.save(saved, "epoch_1.pth")
    done = run("diff", "epoch_1.pth", "--model", "net.py:Net", "--format", "json")
    out = paste(run, done)
    content = torch.load(out, weights_only=True)
    Net().load_state_dict(content["state_dict"], strict=True)
    assert ("optimizer" in content) == with_optimizer
    assert any("would run code when it is loaded" in note for note in notes_in(done.data))
    assert run("diff", out, "--model", "net.py:Net").status == 0
    assert run("fix", "epoch_1.pth", "--model", "net.py:Net", "-o", "fixed.pth").status == 0
    Net().load_state_dict(torch.load("fixed.pth", weights_only=True)["state_dict"], strict=True)


@pytest.mark.parametrize("more", [False, True])
@pytest.mark.parametrize("with_optimizer", [False, True])
@pytest.mark.parametrize("suggests", [False, True])
def test_rules_are_applied_with_what_the_optimizer_needs(
    suggests: bool, with_optimizer: bool, more: bool, run: Run
) -> None:
    model = Lm(fused=True)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    saved = {"model": state, "optimizer": stepped(model).state_dict()} if with_optimizer else state
    torch.save(saved, "fused.pt")
    operand = f"net.py:Lm(more={more})"
    question = ("diff", "fused.pt", "--model", operand, "--format", "json")
    done = run(*question, *(("--suggest", "rules.toml") if suggests else ()))
    assert done.data["fix"][-1]["complete"] is not more
    if more:  # what is left is named
        assert any("2 keys missing from left (extra.weight, extra.bias)" in note for note in notes_in(done.data))
        assert {key for one in done.data["unfixed"] for key in one["keys"]} == {"extra.weight", "extra.bias"}
    out = paste(run, done)
    content = torch.load(out)
    loaded = Lm(more=more)
    missing = loaded.load_state_dict(content["model"] if with_optimizer else content, strict=not more).missing_keys
    assert missing == (["extra.weight", "extra.bias"] if more else [])
    assert torch.equal(loaded.layers[1].k.weight, state["layers.1.qkv.weight"][6:12])
