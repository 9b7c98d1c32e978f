"""One command for several optimizers, each of some of the parameters. Oracle: torch loads each
state, and the next step gives what it gives without the remap.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpttool
from command import Run

CODE = """
import torch
from torch import nn
class Old(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.up = nn.Linear(4, 6)
        self.down = nn.Linear(6, 4)
        self.head = nn.Linear(4, 7, bias=False)
    def forward(self, x):
        return self.head(self.down(self.up(self.embed(x))))
class New(nn.Module):  # other names, in another order
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 7, bias=False)
        self.mlp = nn.ModuleDict({"down": nn.Linear(6, 4), "up": nn.Linear(4, 6)})
        self.embed = nn.Embedding(7, 4)
    def forward(self, x):
        return self.head(self.mlp["down"](self.mlp["up"](self.embed(x))))
def is_matrix(name):
    return name.endswith("weight") and ("up" in name or "down" in name)
def muon(model):
    return torch.optim.SGD([p for n, p in model.named_parameters() if is_matrix(n)], 0.1, 0.9)
def adamw(model):
    others = [(n, p) for n, p in model.named_parameters() if not is_matrix(n)]
    decay = [p for n, p in others if p.ndim > 1]
    rest = [p for n, p in others if p.ndim < 2]
    return torch.optim.AdamW([{"params": decay}, {"params": rest, "weight_decay": 0.0}], lr=0.1)
"""


def step(model: Any, optimizers: list[torch.optim.Optimizer]) -> None:
    model(torch.tensor([1, 2, 3])).square().sum().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.chdir(tmp_path)
    Path("m.py").write_text(CODE)
    names: dict[str, Any] = {"__name__": "m"}
    exec(CODE, names)
    torch.manual_seed(0)
    return names


def save(code: dict[str, Any]) -> nn.Module:
    """Train, save, and train one step more."""
    model: nn.Module = code["Old"]()
    optimizers = [code["muon"](model), code["adamw"](model)]
    step(model, optimizers)
    muon, adamw = (optimizer.state_dict() for optimizer in optimizers)
    torch.save({"model": model.state_dict(), "optim": {"muon": muon, "adamw": adamw}}, "old.pt")
    step(model, optimizers)
    return model


def resumed(code: dict[str, Any], path: str) -> nn.Module:
    model: nn.Module = code["New"]()
    saved = torch.load(path)
    model.load_state_dict(saved["model"])
    optimizers = [code["muon"](model), code["adamw"](model)]
    for name, optimizer in zip(("muon", "adamw"), optimizers):
        optimizer.load_state_dict(saved["optim"][name])
    step(model, optimizers)
    return model


SECTIONS = ("optim.muon", "optim.adamw")


def words(flag: str) -> list[str]:
    values = [f"{path}=m.py:{path.rpartition('.')[2]}" for path in SECTIONS]
    return [word for value in values for word in (flag, value)]


def test_two_optimizers_follow_a_model_in_one_command(code: dict[str, Any], run: Run) -> None:
    expected = save(code).state_dict()
    line = [*words("--optimizer"), *words("--to-optimizer")]
    line += ["--model", "m.py:Old", "--to-model", "m.py:New"]
    line += ["--rule", "up.{p} => mlp.up.{p}", "--rule", "down.{p} => mlp.down.{p}"]
    done = run("remap", "old.pt", "-o", "new.pt", *line, "--verify")
    assert done.status == 0, done.said
    result = resumed(code, "new.pt").state_dict()
    for key, value in expected.items():
        new_key = f"mlp.{key}" if key.startswith(("up.", "down.")) else key
        assert torch.equal(result[new_key], value), key


def test_functions_by_section_in_python(code: dict[str, Any]) -> None:
    save(code)
    by_section = {"optim.muon": code["muon"], "optim.adamw": code["adamw"]}
    done = ckpttool.remap("old.pt", model=code["Old"], optimizer=by_section, optimizer_keys="fqn")
    names = {optimizer.section: optimizer.params for optimizer in done.optimizers}
    assert names == {"optim.muon": 2, "optim.adamw": 4}


def test_sections_that_are_no_optimizers_are_named(code: dict[str, Any], run: Run) -> None:
    save(code)
    line = ("remap", "old.pt", "--model", "m.py:Old", "-o", "new.pt", "--optimizer")
    done = run(*line, "muon=m.py:muon", "--optimizer", "optim.adamw=m.py:adamw")
    assert done.status == 2
    assert "not an optimizer @ muon" in done.err
    assert "its optimizers are optim.muon, optim.adamw" in done.err
    done = run(*line, "m.py:muon", "--optimizer", "m.py:adamw")
    assert done.status == 2
    assert "--optimizer SECTION=OPTIMIZER for each" in done.err
    assert not Path("new.pt").exists()


def test_an_optimizer_with_arguments_is_not_a_section(code: dict[str, Any], run: Run) -> None:
    Path("m.py").write_text(CODE.replace("def muon(model):", "def muon(model, lr=1):"))
    save(code)
    line = ("remap", "old.pt::optim.muon", "--model", "m.py:Old", "--optimizer-keys", "fqn")
    assert run(*line, "--optimizer", "m.py:muon(lr=2)", "-o", "new.pt").status == 0
