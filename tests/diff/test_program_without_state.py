"""A program has the weights of a checkpoint without the state of the model's code. Oracle: the
outputs of the program.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from command import Run, fixes_in

MODEL = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("steps", torch.arange(4.0), persistent=False)
    def forward(self, x):
        return self.fc(x) + self.steps
class Stateful(Net):
    calls = 3
    def get_extra_state(self):
        return {"calls": self.calls}
    def set_extra_state(self, state):
        self.calls = state["calls"]
class Versioned(Net):
    def __init__(self):
        super().__init__()
        self.register_state_dict_post_hook(self.add)
        self.register_load_state_dict_pre_hook(self.drop)
    @staticmethod
    def add(module, state, prefix, metadata):
        state[prefix + "version"] = 2
    @staticmethod
    def drop(module, state, prefix, *args):
        state.pop(prefix + "version", None)
"""
X = torch.linspace(-1, 1, 8).reshape(2, 4)
MODELS = ["Net", "Stateful", "Versioned"]
FORMATS = ["old.pt2", "old.pt"]


def write(module: nn.Module, path: str) -> None:
    if path.endswith(".pt2"):
        torch.export.save(torch.export.export(module, (X,)), path)
    else:
        torch.jit.trace(module, (X,)).save(path)


def output(path: str) -> Any:
    program = torch.export.load(path).module() if path.endswith(".pt2") else torch.jit.load(path)
    return program(X)


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("m.py").write_text(MODEL)
    return str(request.param)


def instance(name: str, seed: int) -> nn.Module:
    names: dict[str, Any] = {"__name__": "m"}
    exec(MODEL, names)
    torch.manual_seed(seed)
    module: nn.Module = names[name]().eval()
    return module


@pytest.mark.parametrize("program", FORMATS)
def test_the_swap_is_complete(model: str, program: str, run: Run) -> None:
    write(instance(model, 0), program)
    new = instance(model, 1)
    torch.save(new.state_dict(), "new.pt")
    options = ("--model", f"m.py:{model}", "--values")
    before = run("diff", program, "new.pt", *options, "--format", "json")
    assert before.status == 1
    assert before.data["fix"][0]["complete"]
    (command,) = fixes_in(before.data)
    words = shlex.split(command)
    assert run(*words[1:]).status == 0
    out = words[-1]
    assert torch.equal(output(out), new(X))
    for pair in ((out, "new.pt"), ("new.pt", out)):
        assert run("diff", *pair, *options).status == 0
        assert run("diff", *pair, "--model", f"m.py:{model}").status == int(
            program == "old.pt" or model != "Net"
        )


@pytest.mark.parametrize("program", FORMATS)
def test_other_keys_count(model: str, program: str, run: Run) -> None:
    module = instance(model, 0)
    write(module, program)
    torch.save({**module.state_dict(), "other": torch.ones(1)}, "more.pt")
    done = run("diff", "more.pt", program, "--model", f"m.py:{model}", "--values")
    assert done.status == 1
    assert "other" in done.out
