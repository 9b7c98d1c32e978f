"""The first line of every command is its answer, in words with the user's own names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpttool
from command import Run

MODEL = """
import torch
from torch import nn

class Renamed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_state_dict_post_hook(self._hide)
        self.register_load_state_dict_pre_hook(self._show)

    @staticmethod
    def _hide(module, state, prefix, metadata):
        for key in [key for key in state if key.startswith(prefix + "layer.")]:
            state[prefix + key[len(prefix) + 6 :]] = state.pop(key)

    @staticmethod
    def _show(module, state, prefix, *rest):
        for key in [key for key in state if key.startswith(prefix)]:
            state[prefix + "layer." + key[len(prefix) :]] = state.pop(key)

    def forward(self, x):
        return self.layer(x)

def build():
    return nn.Sequential(nn.Linear(2, 3), Renamed())

def wide():
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3), nn.Linear(3, 4))

def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
"""
M = "--model model.py:build"

# Each begins where the one before it ends: `undo` undoes the edit in place.
ANSWERS = {
    "inspect train.pt": (
        "train.pt holds a state dict of 4 tensors, an optimizer and 1 non-tensor entry: torch.save"
    ),
    "inspect fsdp.safetensors": "fsdp.safetensors holds a state dict of 4 tensors: safetensors",
    f"diff train.pt {M}": "train.pt loads into model.py:build",
    f"diff train.pt {M} --optimizer model.py:sgd": (
        "the optimizer state of train.pt loads into model.py:sgd"
    ),
    f"diff wrapped.pt {M}": "wrapped.pt has all 4 keys of model.py:build under other names",
    "diff train.pt --model model.py:wide": "train.pt lacks 2 keys of model.py:wide",
    f"diff odd.pt {M}": (
        "odd.pt lacks 1 key of model.py:build and has 2 that it does not know and 1 tensor of another"
        " shape"
    ),
    f"diff {M}": "model.py:build saves 2 of its 4 keys under other names than at runtime",
    "diff train.pt odd.pt": (
        "train.pt and odd.pt differ: 1 key only in train.pt, 2 keys only in odd.pt, 1 tensor of"
        " another shape"
    ),
    "diff train.pt::model fsdp.safetensors": (
        "train.pt::model and fsdp.safetensors have the same keys, shapes and dtypes"
    ),
    "diff train.pt::model fsdp.safetensors --values": (
        "train.pt::model and fsdp.safetensors have the same keys, shapes, dtypes and values"
    ),
    "trace model.py:build -o names.json --force": (
        "wrote names.json: model.py:build saves 2 of its 4 keys under other names than at runtime"
    ),
    f"diff names.json {M}": "model.py:build has the names in names.json",
    "diff names.json --model model.py:wide": (
        "model.py:wide has changed since names.json: 2 changed names, 2 new keys"
    ),
    f"explain 1.weight {M}": "1.weight is 1.layer.weight in the model, which is saved as 1.weight",
    f"explain 0.bias {M}": "0.bias is saved under this name",
    "explain wrapper-prefix": "wrapper-prefix: the names differ by segments of wrappers",
    f"check names.json train.pt {M}": "no problems found in names.json, train.pt",
    f"fix wrapped.pt {M} -o fixed.pt": (
        "wrote fixed.pt, which loads into model.py:build: 4 keys renamed"
    ),
    f"fix fixed.pt {M} -o again.pt": (
        "again.pt has the same tensors as fixed.pt, in torch.save; fixed.pt already loads into"
        " model.py:build"
    ),
    "convert train.pt::model -o train.safetensors": (
        "train.safetensors has the same tensors as train.pt::model, in safetensors"
    ),
    "convert train.pt::model -o other.safetensors --dry-run": (
        "other.safetensors would have the same tensors as train.pt::model, in safetensors"
    ),
    "remap fsdp.safetensors -o new.safetensors --rule 0.{x}=>in.{x} --drop 1.bias": (
        "wrote new.safetensors: 2 keys renamed, 1 left out"
    ),
    "remap fsdp.safetensors -o never.safetensors --rule 0.{x}=>in.{x} --dry-run": (
        "would write never.safetensors: 2 keys renamed"
    ),
    "remap fsdp.safetensors --in-place --rule 0.{x}=>i.{x}": (
        "changed fsdp.safetensors in place: 2 keys renamed"
    ),
    "undo fsdp.safetensors": "fsdp.safetensors is as it was before the last edit in place",
    f"swap-weights program.pt2 train.pt -o new.pt2 {M}": (
        "wrote new.pt2: program.pt2 with 4 weights of train.pt"
    ),
    f"swap-weights program.pt2 train.pt -o never.pt2 {M} --dry-run": (
        "would write never.pt2: program.pt2 with 4 weights of train.pt"
    ),
    "rules": "8 presets: --rules NAME applies one",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(MODEL)
    space: dict[str, Any] = {}
    exec(MODEL, space)
    model = space["build"]()
    optimizer = space["sgd"](model)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state = model.state_dict()
    torch.save({"model": state, "optimizer": optimizer.state_dict(), "step": 1}, "train.pt")
    torch.save({f"module._orig_mod.{key}": value for key, value in state.items()}, "wrapped.pt")
    odd = {key: value for key, value in state.items() if key != "0.bias"}
    odd |= {"1.bias": torch.ones(7), "ema.decay": torch.ones(()), "loss.scale": torch.ones(())}
    torch.save(odd, "odd.pt")
    torch.export.save(
        torch.export.export(space["build"]().eval(), (torch.randn(2, 2),)), "program.pt2"
    )
    ckpttool.convert("train.pt::model", "fsdp.safetensors")


@pytest.mark.usefixtures("folder")
def test_the_first_line_is_the_answer(run: Run) -> None:
    for line, answer in ANSWERS.items():
        done = run(*line.split(" "))
        assert done.status in ((0, 1) if line.startswith("diff") else (0,)), done.said
        shown = done.out.splitlines()[0]
        assert shown == answer or re.match(rf"{re.escape(answer)}[,: ]", shown), done.said


@pytest.mark.usefixtures("folder")
def test_reports_on_one_file_have_no_left_and_right(run: Run) -> None:
    for line in (f"diff wrapped.pt {M}", f"diff odd.pt {M}", f"diff {M}", f"diff train.pt {M}"):
        done = run(*line.split())
        assert not re.search(r"\b(left|right)\b", done.out + done.err), done.said


KEYWORDS = {
    "--fill-from CKPT": "fill_from=CKPT",
    " --all ": " to_json() ",
    "(--values)": "(values=True)",
    "(--model)": "(model=)",
    "`diff LEFT RIGHT --values`": "`diff(LEFT, RIGHT, values=True)`",
}


@pytest.mark.usefixtures("folder")
def test_print_shows_what_the_command_line_prints(run: Run) -> None:
    """Keywords take the place of flags."""
    build, names = "model.py:build", run("trace", "model.py:build", "-o", "names.json")
    assert names.status == 0
    for line, result in (
        (f"diff odd.pt {M}", ckpttool.diff("odd.pt", model=build)),
        ("diff train.pt odd.pt", ckpttool.diff("train.pt", "odd.pt")),
        ("diff train.pt odd.pt --values", ckpttool.diff("train.pt", "odd.pt", values=True)),
        ("inspect train.pt", ckpttool.inspect("train.pt")),
        ("trace model.py:build", ckpttool.trace(build)),
        (f"explain 1.weight {M}", ckpttool.explain("1.weight", build)),
        ("check names.json", ckpttool.check("names.json")),
        ("convert odd.pt -o a.safetensors", ckpttool.convert("odd.pt", "b.safetensors")),
        (f"fix wrapped.pt {M} -o a.pt", ckpttool.fix("wrapped.pt", "b.pt", model=build)),
    ):
        done = run(*line.split())
        printed = str(result).replace("b.safetensors", "a.safetensors").replace("b.pt", "a.pt")
        expected = done.out + done.err
        for flag, keyword in KEYWORDS.items():
            expected = expected.replace(flag, keyword)
        assert f"{printed}\n" == expected, line


@pytest.mark.usefixtures("folder")
def test_a_pair_is_listed_once(run: Run) -> None:
    state = torch.load("odd.pt")
    names = {"0": "first", "1": "second"}
    old = [key for key in state if key[0] in names]
    renamed = {f"{names[key[0]]}{key[1:]}": state[key] for key in old}
    torch.save({**renamed, "loss.scale": torch.ones(())}, "trunk.pt")
    done = run("diff", "odd.pt", "trunk.pt")
    pairs = len(renamed)
    assert done.out.splitlines()[0] == (
        f"odd.pt and trunk.pt differ: {pairs} likely renames, 1 key only in odd.pt"
    )
    assert re.search("^likely renames: [0-9]+ pairs?, inferred: ", done.out, re.M)
    details = done.out.partition("\n\n")[2]
    for key in (*old, *renamed, "ema.decay"):
        assert len(re.findall(rf"^ .*(?<!\S){re.escape(key)}(?!\S)", details, re.M)) == 1, details
    # every key is still an entry of the JSON document
    data = run("diff", "odd.pt", "trunk.pt", "--format", "json").data
    assert data["summary"] == {"same": 1, "missing": pairs, "unexpected": pairs + 1}


@pytest.mark.usefixtures("folder")
def test_values_that_were_not_compared_are_said_once(run: Run) -> None:
    for line in (f"diff odd.pt {M}", "diff train.pt odd.pt", f"diff train.pt {M}", f"diff {M}"):
        done = run(*line.split())
        first, *rest = done.out.splitlines()
        assert "value" not in first
        assert sum("not compared" in text and "values" in text for text in rest) == 1, done.out
