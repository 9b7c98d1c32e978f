"""Pickled modules, and files of several state dicts. Oracle: torch loads what `fix` writes."""

from __future__ import annotations

import importlib
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from command import Run, fixes_in

MODELS = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width))
        self.head = nn.Linear(width, 2)
        self.register_buffer("table", torch.ones(4), persistent=False)
        self.seen = torch.zeros(2)
class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.score = nn.Linear(6, 1)
"""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "kind_models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("kind_models", None)
    yield importlib.import_module("kind_models")
    sys.modules.pop("kind_models", None)


WRAPPED = {
    "bare": lambda net: net,
    "DataParallel": nn.DataParallel,
    "AveragedModel": torch.optim.swa_utils.AveragedModel,
}
FILES = {
    "root": lambda net: net,
    "ultralytics": lambda net: {"epoch": 3, "model": net, "ema": deepcopy(net), "updates": 7},
    "ema": lambda net: {"model": None, "ema": net, "optimizer": None},
}


@pytest.mark.parametrize("wrapper", WRAPPED)
@pytest.mark.parametrize("file", FILES)
def test_fix_writes_the_state_dict_of_a_pickled_module(
    models: Any, run: Run, tmp_path: Path, file: str, wrapper: str
) -> None:
    torch.manual_seed(1)
    net = models.Net()
    if (file, wrapper) == ("ultralytics", "AveragedModel"):
        pytest.skip("the counter of the second model is not a part of the model, and is kept")
    torch.save(FILES[file](WRAPPED[wrapper](net)), tmp_path / "run.pt")

    done = run("diff", "run.pt", "--model", "kind_models.py:Net")
    assert done.status == (0 if wrapper == "bare" else 1)
    first_lines = "\n".join(done.out.splitlines()[:4])
    assert "is a pickled module" in first_lines
    assert "is a pickled module" in run("inspect", "run.pt").out

    done = run("fix", "run.pt", "--model", "kind_models.py:Net", "-o", "fixed.pt", "--verify")
    assert done.status == 0, done.err
    written = torch.load(tmp_path / "fixed.pt", weights_only=True)
    state = written if file == "root" else written["ema"]
    other = models.Net()
    other.load_state_dict(state, strict=True)
    assert all(map(torch.equal, other.state_dict().values(), net.state_dict().values()))
    assert run("diff", "fixed.pt", "--model", "kind_models.py:Net").status == 0
    assert "pickled module" not in run("inspect", "fixed.pt").out


def test_the_suggested_command_works(models: Any, run: Run, tmp_path: Path) -> None:
    torch.save(models.Net(), tmp_path / "run.pt")
    done = run("diff", "run.pt", "--model", "kind_models.py:Net", "--format", "json")
    assert done.data["identical"]
    assert [kind["name"] for kind in done.data["kinds"]] == ["pickled-module"]
    (line,) = fixes_in(done.data)
    words = line.split()
    assert run(*words[1:]).status == 0
    models.Net().load_state_dict(torch.load(words[-1], weights_only=True), strict=True)


def test_another_class_in_the_file_stays_pickled(models: Any, run: Run, tmp_path: Path) -> None:
    """Only the section of the model is written as a state dict."""
    file = {"model": nn.DataParallel(models.Net()), "critic": models.Critic()}
    torch.save(file, tmp_path / "run.pt")
    assert run("fix", "run.pt", "--model", "kind_models.py:Net", "-o", "fixed.pt").status == 0
    written = torch.load(tmp_path / "fixed.pt", weights_only=False)
    models.Net().load_state_dict(written["model"], strict=True)
    assert type(written["critic"]) is models.Critic


@pytest.mark.parametrize("model", ["Net", "Critic"])
def test_the_hint_names_the_section_of_the_model(
    models: Any, run: Run, tmp_path: Path, model: str
) -> None:
    file = {"G": models.Net().state_dict(), "D": models.Critic().state_dict()}
    torch.save(file, tmp_path / "gan.pt")
    section = {"Net": "G", "Critic": "D"}[model]
    commands = (["diff", "gan.pt"], ["fix", "gan.pt", "-o", "o.pt"])
    for words in (*commands, ["remap", "gan.pt", "--to", "runtime", "-o", "o.pt"]):
        done = run(*words, "--model", f"kind_models.py:{model}")
        assert done.status == 2
        assert f"gan.pt::{section}" in done.err
        assert f"gan.pt::{'D' if section == 'G' else 'G'}" not in done.err
    assert run("diff", f"gan.pt::{section}", "--model", f"kind_models.py:{model}").status == 0


def test_the_hint_names_both_sections_and_what_differs(
    models: Any, run: Run, tmp_path: Path
) -> None:
    states = {"params": models.Net().state_dict(), "params_ema": models.Net().state_dict()}
    torch.save(states, tmp_path / "sr.pth")
    done = run("diff", "sr.pth", "--model", "kind_models.py:Net")
    assert done.status == 2
    assert "sr.pth::params or sr.pth::params_ema" in done.err
    assert "equal keys, shapes and dtypes" in done.err

    halved = {key: value.half() for key, value in states["params"].items()}
    torch.save({"teacher": halved, "student": states["params"]}, tmp_path / "both.pt")
    done = run("diff", "both.pt", "--model", "kind_models.py:Net")
    assert done.status == 2
    assert "other dtypes" in done.err


@pytest.mark.parametrize("section", ["params_ema", "model", "state_dict"])
def test_the_verdict_names_the_section(models: Any, run: Run, tmp_path: Path, section: str) -> None:
    torch.save({section: models.Net().state_dict(), "epoch": 1}, tmp_path / "a.pt")
    words = ("diff", "a.pt", "--model", "kind_models.py:Net")
    assert section in run(*words).out.splitlines()[0]
    assert run(*words, "--format", "json").data["section"] == section


PACKED = {"alone": "packed.pt::", "of several": "packed.pt::model"}


@pytest.mark.parametrize("place", PACKED)
def test_the_hint_names_the_state_dict_that_can_be_renamed_and_converted(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.chdir(tmp_path)
    module = nn.Sequential(nn.Linear(2, 2))
    torch.save(module if place == "alone" else {"model": module, "ema": module}, "packed.pt")
    commands: list[tuple[str, ...]] = [("remap", "--rule", "0.{x*} => 1.{x*}", "-o", "out.pt")]
    if place == "alone":
        commands.append(("convert", "-o", "out.dcp"))
    for command, *words in commands:
        refused = run(command, "packed.pt", *words)
        assert refused.status == 1
        assert refused.err.splitlines()[-1].endswith(f" {PACKED[place]}")
        assert run(command, PACKED[place], *words).status == 0


HOOKED = """
from torch import nn
def rename(module, state, prefix, metadata):
    for key in list(state):
        if key.startswith(f"{prefix}head."):
            state[key.replace("head.", "top.")] = state.pop(key)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(2, 2), nn.Linear(2, 1)
        self.register_state_dict_post_hook(rename)
"""


def test_fix_of_a_module_that_does_not_read_what_it_writes(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its keys as saved are renamed, and no load hook renames them back."""
    (tmp_path / "hooked_net.py").write_text(HOOKED)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    net = importlib.import_module("hooked_net").Net()
    torch.save(net, "net.pt")
    done = run("diff", "net.pt", "--model", "hooked_net.py:Net", "--format", "json")
    assert done.status == 0
    (line,) = fixes_in(done.data)
    out = line.split()[line.split().index("-o") + 1]
    commands = [(line.split()[1:], out)]
    commands.append(
        (["fix", "net.pt", "--model", "hooked_net.py:Net", "-o", "fixed.pt"], "fixed.pt")
    )
    state = dict(net.named_parameters())
    torch.save(state, "state.pt")
    words = ["fix", "state.pt", "--model", "hooked_net.py:Net", "-o", "copy.pt"]
    commands.append((words, "copy.pt"))
    for words, written in commands:
        assert run(*words).status == 0
        net.load_state_dict(torch.load(written))
    sys.modules.pop("hooked_net", None)
