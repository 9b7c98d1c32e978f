"""A verdict says what it covers: whatever differs is reported, or `compared` says that it was not looked at."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpttool
from command import Run

MODEL = """import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.head, self.tied = nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.tied.weight = self.head.weight


def optimizer(net):
    return torch.optim.AdamW(net.parameters(), lr=0.1)
"""
State = dict[str, Any]


space: dict[str, Any] = {}
exec(MODEL, space)
NAMES = json.dumps(ckpttool.trace(space["Net"]).to_json())


def saved() -> State:
    torch.manual_seed(0)
    net = space["Net"]()
    optimizer = space["optimizer"](net)
    net.tied(net.head(net.norm(torch.randn(5, 4)))).sum().backward()
    optimizer.step()
    ema = {key: value.clone() for key, value in net.state_dict().items()}
    return {"model": net.state_dict(), "ema": ema, "optimizer": optimizer.state_dict(), "epoch": 1}


def rename(state: State, section: str = "model") -> None:
    state[section]["norm.scale"] = state[section].pop("norm.weight")


def reshape(state: State) -> None:
    state["model"]["norm.bias"] = torch.zeros(2, 2)


def cast(state: State) -> None:
    state["model"]["norm.bias"] = state["model"]["norm.bias"].half()


def train(state: State, section: str = "model") -> None:
    state[section]["norm.bias"] = state[section]["norm.bias"] + 1


def untie(state: State) -> None:
    state["model"]["tied.weight"] = state["model"]["tied.weight"].clone()


def of_another_version(state: State) -> None:
    state["model"]._metadata["norm"]["version"] = 1


def of_another_class(state: State) -> None:
    del state["optimizer"]["param_groups"][0]["betas"]


CHANGES: dict[str, tuple[str, Callable[[State], object]]] = {
    "a key": ("keys", rename),
    "a key more": ("keys", lambda state: state["model"].update(more=torch.ones(1))),
    "a shape": ("shapes", reshape),
    "a dtype": ("dtypes", cast),
    "values": ("values", train),
    "a tie": ("aliases", untie),
    "a version": ("metadata", of_another_version),
    "a learning rate": ("optimizers", lambda state: state["optimizer"]["param_groups"][0].update(lr=0.5)),
    "moments": ("values", lambda state: state["optimizer"]["state"][0]["exp_avg"].add_(1)),
    "a state that is lost": ("optimizers", lambda state: state["optimizer"]["state"].pop(0)),
    "a hyperparameter": ("optimizers", of_another_class),
    "a key of the average": ("other_sections", lambda state: rename(state, "ema")),
    "values of the average": ("values", lambda state: train(state, "ema")),
    "the average": ("other_sections", lambda state: state.pop("ema")),
    "the epoch": ("objects", lambda state: state.update(epoch=2)),
    "an entry more": ("objects", lambda state: state.update(args={"seed": 0})),
}
# An optimizer's own entries, and those changes that are enough for a question that traces a model each time.
OF_OPTIMIZERS = ("a learning rate", "moments", "a state that is lost", "a hyperparameter")
OF_CODE = (*OF_OPTIMIZERS, "a key", "values", "the epoch")
NET, OPTIMIZER = ("--model", "net.py:Net"), ("--optimizer", "net.py:optimizer")
WAYS = {
    "two": ("same.pt", "old.pt"),
    "through a model": ("same.pt", "old.pt", "--model", "names.json"),
    "a base": ("same.pt", "old.pt", "--base", "old.pt"),
    "steps": ("run/step-1.pt", "run/step-2.pt", "run/step-3.pt"),
    "a manifest": ("same.pt", "old.json"),
    "a model": ("same.pt", "--model", "names.json"),
    "an optimizer": ("same.pt", *NET, *OPTIMIZER),
    "two optimizers": ("same.pt::optimizer", "old.pt::optimizer"),
}
OF_VALUES = ("two", "a base", "steps", "a manifest")
PAIRS: list[tuple[str, tuple[str, ...]]] = [
    *((way, ()) for way in WAYS),
    *((way, ("--values",)) for way in OF_VALUES),
    ("two", ("--values", "--ignore-dtype")),
]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that are compared, and one for each change."""
    made = tmp_path_factory.mktemp("compared")
    (made / "net.py").write_text(MODEL)
    (made / "run").mkdir()
    state = saved()
    for name in ("old.pt", "run/step-1.pt", "run/step-2.pt", "nothing.pt"):
        torch.save(state, made / name)
    for name, (_, change) in CHANGES.items():
        other = copy.deepcopy(state)
        change(other)
        torch.save(other, made / f"{name}.pt")
    (made / "names.json").write_text(NAMES)
    (made / "old.json").write_text(json.dumps(ckpttool.manifest(str(made / "old.pt"))))
    return made


@pytest.fixture
def folder(files: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(files)
    take("nothing")
    return files


def take(change: str) -> None:
    """Put the file with that change where the questions look for it."""
    for name in ("same.pt", "run/step-3.pt"):
        shutil.copyfile(f"{change}.pt", name)


@pytest.mark.parametrize(
    ("way", "options"), PAIRS, ids=lambda value: value if isinstance(value, str) else " ".join(value)
)
def test_what_differs_is_reported_or_not_compared(run: Run, folder: Path, way: str, options: tuple[str, ...]) -> None:
    def answer(change: str) -> Any:
        take(change)
        done = run("diff", *WAYS[way], *options, "--format", "json")
        assert done.status in (0, 1), done.err
        return done.data

    same = answer("nothing")
    silent = []
    for name in {"two optimizers": OF_OPTIMIZERS, "an optimizer": OF_CODE}.get(way, CHANGES):
        aspect, found = CHANGES[name][0], answer(name)
        compared = found.pop("compared")
        if found == {key: value for key, value in same.items() if key != "compared"} and compared.get(aspect):
            silent.append(name)
    assert silent == []
    assert same["compared"]["keys"]
    assert same["compared"].get("values", False) is ("--values" in options)


@pytest.mark.parametrize(
    ("way", "form"),
    [*((way, "text") for way in (*OF_VALUES, "a model")), *(("two", form) for form in ("markdown", "html", "github"))],
)
def test_the_text_says_whether_values_were_compared(run: Run, folder: Path, way: str, form: str) -> None:
    said = run("diff", *WAYS[way], "--format", form).out
    assert "values not compared" in said
    assert "--values" in said
    if way == "a model":
        return
    compared = run("diff", *WAYS[way], "--values", "--format", form).out
    assert "values are equal" in compared
    assert "values not compared" not in compared


def test_the_python_answer_says_it_too(folder: Path) -> None:
    assert ckpttool.diff("same.pt", "old.pt").compared["values"] is False
    assert ckpttool.diff("same.pt", "old.pt", values=True).compared["values"] is True
    assert ckpttool.diff("same.pt", "old.pt", ignore_dtype=True).compared["dtypes"] is False
    for way in (ckpttool.since("old.pt", "same.pt", "old.pt"), ckpttool.steps(["old.pt", "same.pt", "run/step-1.pt"])):
        assert way.compared["values"] is False
