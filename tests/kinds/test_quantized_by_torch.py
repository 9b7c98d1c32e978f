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


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.EmbeddingBag(20, 16)
        self.fc = nn.Linear(16, 2)


BAG = """
from torch import nn
class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.EmbeddingBag(20, 16)
        self.fc = nn.Linear(16, 2)
def build():
    return Bag()
"""
OF_EMBEDDINGS = torch.ao.quantization.float_qparams_weight_only_qconfig


def bag_dynamic() -> nn.Module:
    kinds = {
        nn.EmbeddingBag: OF_EMBEDDINGS,
        nn.Linear: torch.ao.quantization.default_dynamic_qconfig,
    }
    return torch.ao.quantization.quantize_dynamic(Bag().eval(), kinds)


def bag_static() -> nn.Module:
    model: Any = Bag().eval()
    model.emb.qconfig = OF_EMBEDDINGS
    return torch.ao.quantization.convert(torch.ao.quantization.prepare(model))


def recurrent() -> nn.Module:
    return torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.LSTM(4, 4)), {nn.LSTM})


def convolution() -> nn.Module:
    model: Any = nn.Sequential(nn.Conv2d(2, 2, 1)).eval()
    model.qconfig = torch.ao.quantization.get_default_qconfig("x86")
    return torch.ao.quantization.convert(torch.ao.quantization.prepare(model))


LSTM = "from torch import nn\ndef build():\n    return nn.Sequential(nn.LSTM(4, 4))\n"
CONVOLUTION = "from torch import nn\ndef build():\n    return nn.Sequential(nn.Conv2d(2, 2, 1))\n"
MODELS = {
    "linear, dynamic": (quantized, MODEL),
    "embedding bag, dynamic": (bag_dynamic, BAG),
    "embedding bag, static": (bag_static, BAG),
    "LSTM, dynamic": (recurrent, LSTM),
    "convolution, static": (convolution, CONVOLUTION),
}


@pytest.mark.parametrize("case", MODELS)
@pytest.mark.parametrize("right", ["--model m.py:build", "float.pt", "of the float model"])
def test_no_hint_loses_the_weights(
    case: str, right: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    monkeypatch.chdir(tmp_path)
    build, code = MODELS[case]
    Path("m.py").write_text(code)
    space: dict[str, Any] = {}
    exec(code, space)
    torch.save(build().state_dict(), "q.pt")
    torch.save(space["build"]().state_dict(), "float.pt")
    words = ["float.pt", "q.pt"] if right == "of the float model" else ["q.pt", *right.split()]
    done = run("diff", *words)
    assert done.status == 1
    lines = done.out.splitlines()
    assert any("is quantized: by torch.ao.quantization" in line for line in lines), done.out
    hints = [line for line in lines if line.startswith(("no fix", "not fixed", "rename", "fix"))]
    assert len(hints) == 1, done.out
    assert "of quantized weights" in hints[0]
    assert "no rename or cast converts it" in hints[0]
    for wrong in ("--fill-from", "strict=False and", "FROM => TO"):
        assert wrong not in done.out
    differing = run("diff", *words, "--format", "json").data["entries"]
    assert {entry["code"] for entry in differing if entry["status"] != "same"} == {"quantized"}


@pytest.mark.parametrize("case", ["linear, dynamic", "convolution, static"])
def test_a_program_is_not_said_to_lack_a_hook(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    monkeypatch.chdir(tmp_path)
    build, code = MODELS[case]
    space: dict[str, Any] = {}
    exec(code, space)
    torch.save(build().state_dict(), "q.pt")
    sample = torch.ones(1, 3) if case == "linear, dynamic" else torch.ones(1, 2, 3, 3)
    torch.export.save(torch.export.export(space["build"]().eval(), (sample,)), "program.pt2")
    done = run("swap-weights", "program.pt2", "q.pt", "-o", "new.pt2")
    assert done.status == 1
    assert "load them with the library that quantized them" in done.err
    assert "hooks" not in done.err


def test_a_quantized_embedding_is_loaded_with_its_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    """torch clones no tensor of this scheme, and loads it."""
    monkeypatch.chdir(tmp_path)
    Path("m.py").write_text(
        "import torch\ndef build():\n    return torch.ao.nn.quantized.EmbeddingBag(6, 4)\n"
    )
    model = torch.ao.nn.quantized.EmbeddingBag(6, 4)
    torch.save(model.state_dict(), "q.pt")
    model.load_state_dict(torch.load("q.pt", weights_only=True))
    assert run("diff", "q.pt", "--model", "m.py:build", "--materialize").status == 0
