"""The output of `trace` and `explain` for a model with every kind of tensor."""

from __future__ import annotations

from pathlib import Path

import pytest

from command import Run

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(2, 3), nn.Linear(3, 3)
        self.b.weight.requires_grad_(False)
        self.tied = self.a
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("cache", torch.ones(4), persistent=False)

    def get_extra_state(self):
        return {"version": 1}

    def set_extra_state(self, state):
        pass

def build(): return Net()
def sgd(model): return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], momentum=0.9)
"""


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(MODEL)


def facts(text: str, *names: str) -> dict[str, str]:
    """Return name -> value for these lines of the text."""
    lines = [line for line in text.splitlines() if line.startswith(names)]
    return {
        name: line.removeprefix(name).strip()
        for line in lines
        for name in names
        if line.startswith(f"{name} ")
    }


def test_trace_counts_every_kind_of_tensor(run: Run) -> None:
    done = run("trace", "net.py:build")
    assert done.status == 0
    assert facts(
        done.out, "parameters", "buffers", "aliases", "serialized keys", "extra state"
    ) == {
        "parameters": "6 (1 frozen)",
        "buffers": "2",
        "aliases": "2",
        "serialized keys": "7",
        "extra state": "1",
    }
    assert done.out.startswith("net.py:build saves its tensors under their runtime names\n")


@pytest.mark.parametrize(
    ("name", "tensor", "more"),
    [
        (
            "a.weight",
            "float32 [3, 2], trainable parameter",
            {"aliases": "tied.weight", "optimizer id": "0 (param group 0)"},
        ),
        (
            "b.weight",
            "float32 [3, 3], frozen parameter",
            {"aliases": "none", "serialized": "b.weight"},
        ),
        (
            "b.bias",
            "float32 [3], trainable parameter",
            {"aliases": "none", "optimizer id": "2 (param group 0)"},
        ),
        ("scale", "float32 [2], buffer", {"serialized": "scale"}),
        ("cache", "float32 [4], buffer", {"serialized": "not serialized", "persistent": "no"}),
    ],
)
def test_one_tensor_is_explained(run: Run, name: str, tensor: str, more: dict[str, str]) -> None:
    done = run("explain", name, "--model", "net.py:build", "--optimizer", "net.py:sgd")
    assert done.status == 0
    found = facts(done.out, "tensor", "aliases", "serialized", "optimizer id", "persistent")
    assert found["tensor"] == tensor
    assert {key: found.get(key) for key in more} == more
    assert ("persistent" in found) == (name == "cache")
    assert ("optimizer id" in found) == ("trainable" in tensor)
