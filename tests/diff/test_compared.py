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
from torch import nn

import ckpttool
from command import Run
from torchrun_ranks import run_ranks

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
    "two": ("diff", "same.pt", "old.pt"),
    "through a model": ("diff", "same.pt", "old.pt", "--model", "names.json"),
    "a base": ("diff3", "old.pt", "same.pt", "old.pt"),
    "steps": ("history", "run/step-1.pt", "run/step-2.pt", "run/step-3.pt"),
    "a manifest": ("diff", "same.pt", "old.json"),
    "a model": ("diff", "same.pt", "--model", "names.json"),
    "an optimizer": ("diff", "same.pt", *NET, *OPTIMIZER),
    "two optimizers": ("diff", "same.pt::optimizer", "old.pt::optimizer"),
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
        done = run(*WAYS[way], *options, "--format", "json")
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
    said = run(*WAYS[way], "--format", form).out
    assert "values not compared" in said
    assert "--values" in said
    if way == "a model":
        return
    compared = run(*WAYS[way], "--values", "--format", form).out
    assert "values are equal" in compared
    assert "values not compared" not in compared


def test_the_python_answer_says_it_too(folder: Path) -> None:
    assert ckpttool.diff("same.pt", "old.pt").compared["values"] is False
    assert ckpttool.diff("same.pt", "old.pt", values=True).compared["values"] is True
    assert ckpttool.diff("same.pt", "old.pt", ignore_dtype=True).compared["dtypes"] is False
    for way in (
        ckpttool.diff3("old.pt", "same.pt", "old.pt"),
        ckpttool.history(["old.pt", "same.pt", "run/step-1.pt"]),
    ):
        assert way.compared["values"] is False


class Exported(nn.Module):
    """What differs in the program is an argument. `constant` is lifted, `table` is a buffer that is not saved."""

    def __init__(self, name: str = "head", width: int = 4, scale: float = 1.0, bias: float = 0.0, held: float = 1.0):
        super().__init__()
        torch.manual_seed(0)
        self.name, self.scale = name, scale
        self.add_module(name, nn.Linear(4, width))
        self.get_submodule(name).bias.data.add_(bias)
        self.register_buffer("table", torch.full((width,), held), persistent=False)
        self.constant = torch.full((width,), held)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.get_submodule(self.name)(x) * self.scale + self.constant * self.table


PROGRAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "a name": ("keys", {"name": "top"}),
    "a shape": ("shapes", {"width": 5}),
    "values": ("values", {"bias": 1.0}),
    "a constant": ("values", {"held": 2.0}),
    "the code": ("code", {"scale": 2.0}),
}


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("programs")
    for name, arguments in {"old": {}, "same": {}, **{name: one[1] for name, one in PROGRAMS.items()}}.items():
        program = torch.export.export(Exported(**arguments).eval(), (torch.ones(2, 4),), strict=False)
        torch.export.save(program, made / f"{name}.pt2")
    torch.save(Exported().state_dict(), made / "weights.pt")
    return made


@pytest.mark.parametrize("options", [(), ("--values",)], ids=" ".join)
@pytest.mark.parametrize("left", ["old.pt2", "weights.pt"])
def test_of_an_exported_program_too(run: Run, programs: Path, left: str, options: tuple[str, ...]) -> None:
    def answer(name: str) -> Any:
        done = run("diff", programs / left, programs / f"{name}.pt2", *options, "--format", "json")
        assert done.status in (0, 1), done.err
        return {key: value for key, value in done.data.items() if key not in ("left", "right")}

    same = answer("same")
    assert same["identical"]
    compared = same.pop("compared")
    assert compared["values"] is bool(options)
    for name, (aspect, _) in PROGRAMS.items():
        if name == "a constant" and left == "weights.pt":  # which has none to compare
            continue
        found = answer(name)
        covered = found.pop("compared")
        assert found != same or not covered.get(aspect), name
        assert aspect not in ("keys", "shapes") or not found["identical"]
    if left == "old.pt2":
        assert compared["code"] is False


def test_ranks_of_torchrun_give_the_answer_of_one_process(run: Run, folder: Path) -> None:
    for change in ("nothing", "values", "moments"):
        take(change)
        words = ("diff", "same.pt", "old.pt", "--values", "--format", "json")
        alone = run(*words)
        first, second = run_ranks(folder, 2, *words)
        assert json.loads(first.out) == alone.data
        assert (first.status, second.status, second.out) == (alone.status, alone.status, "")
        assert alone.data["compared"]["values"] is True
    first, _ = run_ranks(folder, 2, *words[:3], "--format", "json")
    assert json.loads(first.out)["compared"]["values"] is False
