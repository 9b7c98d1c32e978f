"""Hints with a command are pasted into a shell: names in them are quoted if they need it."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import torch
from torch import nn

from command import Run, notes_in

CODE = """
import torch
from torch import nn

def build(n=4):
    return nn.Sequential(nn.Linear(3, n), nn.Linear(n, 2))
def swapped(n=4):
    model = build(n)
    model._modules = {"1": model._modules["1"], "0": model._modules["0"]}
    return model
def adam(model):
    return torch.optim.Adam(model.parameters())
"""
MODEL = "model.py:build(n=4)"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(CODE)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    file = {"model": model.state_dict(), "my optimizer": optimizer.state_dict()}
    torch.save(file, "train.pt")
    torch.save({"my model": model.state_dict(), "ema": model.state_dict()}, "two.pt")


def test_a_missing_folder(run: Run) -> None:
    words = ("convert", "train.pt::model", "-o")
    for out in ("my folder/x.safetensors", "my folder/part/"):
        done = run(*words, out)
        assert done.status == 2
        assert "hint: mkdir -p 'my folder'" in done.err
    Path("my folder").mkdir()
    assert run(*words, "my folder/x.safetensors").status == 0
    for out in ("train.pt/x.safetensors", "train.pt/more/x.safetensors", "train.pt/more/x/"):
        done = run(*words, out)
        assert done.status == 2
        assert "train.pt is not a folder" in done.err
        assert "mkdir" not in done.err


def test_a_model_with_arguments(run: Run) -> None:
    done = run("explain", "zebra", "--model", MODEL)
    assert done.status == 2
    line = shlex.split(done.err.partition("list them: ")[2].splitlines()[0])
    assert line[2] == MODEL
    assert run(*line[1:]).status == 0
    done = run("inspect", MODEL)
    assert done.status == 2
    assert f"--model {shlex.quote(MODEL)}" in done.err
    done = run("explain", "my name")
    assert "ckpttool explain 'my name' --model MODEL" in done.err


def test_a_model_that_did_not_save_the_file(run: Run) -> None:
    other = "model.py:swapped(n=4)"
    words = ("--optimizer-keys", "fqn", "--optimizer", "model.py:adam", "--dry-run")
    done = run("remap", "train.pt::my optimizer", "--model", other, *words)
    assert done.status == 1
    assert f"--to-model {shlex.quote(other)}" in done.err


def test_a_section_with_a_blank(run: Run) -> None:
    words = ("remap", "two.pt", "--sections", "ema", "--to", "ddp", "--format", "json")
    done = run(*words, "-o", "out.pt")
    assert done.status == 0
    (note,) = [text for text in notes_in(done.data) if "takes it too" in text]
    line = shlex.split(note.partition("`")[2].partition("`")[0])
    assert run("remap", "two.pt", *line[1:], "--to", "ddp", "-o", "both.pt").status == 0
    done = run("remap", "train.pt", "--drop", "*.weight", "--drop", "*.bias", "-o", "none.pt")
    assert done.status == 1
    assert "--drop 'my optimizer'" in done.err
