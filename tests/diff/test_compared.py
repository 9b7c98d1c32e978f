"""A verdict says what it covers: each difference is reported, or `compared` says that it was not
checked.
"""

from __future__ import annotations

import copy
import json
import re
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


namespace: dict[str, Any] = {}
exec(MODEL, namespace)
NAMES = json.dumps(ckpttool.trace(namespace["Net"]).to_json())


def saved() -> State:
    torch.manual_seed(0)
    net = namespace["Net"]()
    optimizer = namespace["optimizer"](net)
    net.tied(net.head(net.norm(torch.randn(5, 4)))).sum().backward()
    optimizer.step()
    ema = {key: value.clone() for key, value in net.state_dict().items()}
    return {"model": net.state_dict(), "ema": ema, "optimizer": optimizer.state_dict(), "epoch": 1}


def rename_key(state: State, section: str = "model") -> None:
    state[section]["norm.scale"] = state[section].pop("norm.weight")


def reshape(state: State) -> None:
    state["model"]["norm.bias"] = torch.zeros(2, 2)


def cast(state: State) -> None:
    state["model"]["norm.bias"] = state["model"]["norm.bias"].half()


def train(state: State, section: str = "model") -> None:
    state[section]["norm.bias"] = state[section]["norm.bias"] + 1


def untie(state: State) -> None:
    state["model"]["tied.weight"] = state["model"]["tied.weight"].clone()


def change_version(state: State) -> None:
    state["model"]._metadata["norm"]["version"] = 1


def drop_hyperparameter(state: State) -> None:
    del state["optimizer"]["param_groups"][0]["betas"]


CHANGES: dict[str, tuple[str, Callable[[State], object]]] = {
    "a key": ("keys", rename_key),
    "an extra key": ("keys", lambda state: state["model"].update(more=torch.ones(1))),
    "a shape": ("shapes", reshape),
    "a dtype": ("dtypes", cast),
    "values": ("values", train),
    "a tie": ("aliases", untie),
    "a version": ("metadata", change_version),
    "a learning rate": (
        "optimizers",
        lambda state: state["optimizer"]["param_groups"][0].update(lr=0.5),
    ),
    "moments": ("values", lambda state: state["optimizer"]["state"][0]["exp_avg"].add_(1)),
    "a lost state": ("optimizers", lambda state: state["optimizer"]["state"].pop(0)),
    "a hyperparameter": ("optimizers", drop_hyperparameter),
    "a key of the average": ("other_sections", lambda state: rename_key(state, "ema")),
    "values of the average": ("values", lambda state: train(state, "ema")),
    "the average": ("other_sections", lambda state: state.pop("ema")),
    "the epoch": ("objects", lambda state: state.update(epoch=2)),
    "an extra entry": ("objects", lambda state: state.update(args={"seed": 0})),
}
# Tracing a model takes long, so these questions get only some of the changes.
OPTIMIZER_CHANGES = ("a learning rate", "moments", "a lost state", "a hyperparameter")
CHANGES_FOR_CODE = (*OPTIMIZER_CHANGES, "a key", "values", "the epoch")
NET, OPTIMIZER = ("--model", "net.py:Net"), ("--optimizer", "net.py:optimizer")
QUESTIONS = {
    "two checkpoints": ("diff", "same.pt", "old.pt"),
    "through a model": ("diff", "same.pt", "old.pt", "--model", "names.json"),
    "a model": ("diff", "same.pt", "--model", "names.json"),
    "an optimizer": ("diff", "same.pt", *NET, *OPTIMIZER),
    "two optimizers": ("diff", "same.pt::optimizer", "old.pt::optimizer"),
}
QUESTIONS_WITH_VALUES = ("two checkpoints",)
PAIRS: list[tuple[str, tuple[str, ...]]] = [
    *((question, ()) for question in QUESTIONS),
    *((question, ("--values",)) for question in QUESTIONS_WITH_VALUES),
    ("two checkpoints", ("--values", "--ignore-dtype")),
]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder_path = tmp_path_factory.mktemp("compared")
    (folder_path / "net.py").write_text(MODEL)
    state = saved()
    for name in ("old.pt", "nothing.pt"):
        torch.save(state, folder_path / name)
    for name, (_, change) in CHANGES.items():
        other = copy.deepcopy(state)
        change(other)
        torch.save(other, folder_path / f"{name}.pt")
    (folder_path / "names.json").write_text(NAMES)
    return folder_path


@pytest.fixture
def folder(files: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(files)
    use_change("nothing")
    return files


def use_change(change: str) -> None:
    shutil.copyfile(f"{change}.pt", "same.pt")


@pytest.mark.parametrize(
    ("question", "options"),
    PAIRS,
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_a_difference_is_reported_or_marked_as_not_compared(
    run: Run, folder: Path, question: str, options: tuple[str, ...]
) -> None:
    def answer(change: str) -> Any:
        use_change(change)
        done = run(*QUESTIONS[question], *options, "--format", "json")
        assert done.status in (0, 1), done.err
        return done.data

    same = answer("nothing")
    silent = []
    for name in {"two optimizers": OPTIMIZER_CHANGES, "an optimizer": CHANGES_FOR_CODE}.get(
        question, CHANGES
    ):
        aspect, result = CHANGES[name][0], answer(name)
        compared = result.pop("compared")
        if result == {
            key: value for key, value in same.items() if key != "compared"
        } and compared.get(aspect):
            silent.append(name)
    assert silent == []
    assert same["compared"]["keys"]
    assert same["compared"].get("values", False) is ("--values" in options)


@pytest.mark.parametrize(
    ("question", "form"),
    [
        *((question, "text") for question in (*QUESTIONS_WITH_VALUES, "a model")),
        *(("two checkpoints", form) for form in ("markdown", "html", "github")),
    ],
)
def test_text_output_says_if_values_were_compared(
    run: Run, folder: Path, question: str, form: str
) -> None:
    not_compared = re.compile(r"not compared(?:</th><td>|\W+)values \(.*?--values")
    text = run(*QUESTIONS[question], "--format", form).out
    assert len(not_compared.findall(text)) == 1
    assert "and values" not in text
    if question == "a model":
        return
    compared = run(*QUESTIONS[question], "--values", "--format", form).out
    assert "same.pt and old.pt have the same keys, shapes, dtypes and values" in compared
    assert not not_compared.search(compared)


def test_python_results_say_if_values_were_compared(folder: Path) -> None:
    assert ckpttool.diff("same.pt", "old.pt").compared["values"] is False
    assert ckpttool.diff("same.pt", "old.pt", values=True).compared["values"] is True
    assert ckpttool.diff("same.pt", "old.pt", ignore_dtype=True).compared["dtypes"] is False


class Exported(nn.Module):
    """A module whose program depends on the arguments. `constant` is lifted, `table` is a
    non-persistent buffer.
    """

    def __init__(
        self,
        name: str = "head",
        width: int = 4,
        scale: float = 1.0,
        bias: float = 0.0,
        held: float = 1.0,
    ):
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
    folder_path = tmp_path_factory.mktemp("programs")
    for name, arguments in {
        "old": {},
        "same": {},
        **{name: one[1] for name, one in PROGRAMS.items()},
    }.items():
        program = torch.export.export(
            Exported(**arguments).eval(), (torch.ones(2, 4),), strict=False
        )
        torch.export.save(program, folder_path / f"{name}.pt2")
    torch.save(Exported().state_dict(), folder_path / "weights.pt")
    return folder_path


@pytest.mark.parametrize("options", [(), ("--values",)], ids=" ".join)
@pytest.mark.parametrize("left", ["old.pt2", "weights.pt"])
def test_a_program_difference_is_reported_or_marked_as_not_compared(
    run: Run, programs: Path, left: str, options: tuple[str, ...]
) -> None:
    def answer(name: str) -> Any:
        done = run("diff", programs / left, programs / f"{name}.pt2", *options, "--format", "json")
        assert done.status in (0, 1), done.err
        return {key: value for key, value in done.data.items() if key not in ("left", "right")}

    same = answer("same")
    assert same["identical"]
    compared = same.pop("compared")
    assert compared["values"] is bool(options)
    for name, (aspect, _) in PROGRAMS.items():
        if name == "a constant" and left == "weights.pt":  # weights have no constants
            continue
        result = answer(name)
        covered = result.pop("compared")
        assert result != same or not covered.get(aspect), name
        assert aspect not in ("keys", "shapes") or not result["identical"]
    if left == "old.pt2":
        assert compared["code"] is False


def test_torchrun_ranks_give_the_same_answer_as_one_process(run: Run, folder: Path) -> None:
    for change in ("values", "moments"):
        use_change(change)
        arguments = ("diff", "same.pt", "old.pt", "--values", "--format", "json")
        alone = run(*arguments)
        first, second = run_ranks(folder, 2, *arguments)
        assert json.loads(first.out) == alone.data
        assert (first.status, second.status, second.out) == (alone.status, alone.status, "")
        assert alone.data["compared"]["values"] is True
    first, _ = run_ranks(folder, 2, *arguments[:3], "--format", "json")
    assert json.loads(first.out)["compared"]["values"] is False
