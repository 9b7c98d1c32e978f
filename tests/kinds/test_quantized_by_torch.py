"""Weights that torch itself quantized: tensors with their own scales, in tuples of packed
parameters. Oracle: `torch.ao.quantization` writes the files, and loads them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from command import Run

# torch says that it will go; files with it stay
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
MODEL = """
from torch import nn
def build():
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
"""


def quantized() -> Any:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("m.py").write_text(MODEL)
    torch.manual_seed(0)
    torch.save(quantized().state_dict(), "q.pt")
    return tmp_path


def test_the_kind_is_named(folder: Path, run: Run) -> None:
    line = "kind: q.pt is quantized: by torch.ao.quantization, 2 weights of qint8"
    assert line in run("inspect", "q.pt").out.splitlines()
    done = run("diff", "--model", "m.py:build", "q.pt")
    assert (done.status, done.out.splitlines()[1]) == (1, line)
    assert "deprecated" not in done.err  # torch says it of this kind of tensor


def test_the_weights_are_not_dropped_by_a_hint(folder: Path, run: Run) -> None:
    done = run("convert", "q.pt", "-o", "q.safetensors")
    assert done.status == 1
    assert "--drop" not in done.err


def test_weights_that_were_renamed_and_back_load(folder: Path, run: Run) -> None:
    assert run("remap", "q.pt", "-o", "new.pt", "--rule", "1.{x*} => last.{x*}").status == 0
    assert run("remap", "new.pt", "-o", "back.pt", "--rule", "last.{x*} => 1.{x*}").status == 0
    before, after = quantized(), quantized()
    before.load_state_dict(torch.load("q.pt", weights_only=True))
    after.load_state_dict(torch.load("back.pt", weights_only=True))
    assert torch.equal(before(torch.ones(1, 3)), after(torch.ones(1, 3)))
