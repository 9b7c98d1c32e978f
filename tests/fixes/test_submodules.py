"""A model whose keys are all below one submodule of the file: the printed command takes it, and
`fix` applies it.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import ckpttool
from command import Run, fixes_in, notes_in

CODE = """
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.bn, self.b = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)
"""
scope: dict[str, Any] = {}
exec(CODE, scope)
Net = scope["Net"]
State = dict[str, Any]


class Trained(nn.Module):
    """A model with a head and a loss, and an optimizer that numbers all parameters."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.add_module(name, Net())
        self.head, self.loss = nn.Linear(2, 3), nn.Linear(1, 1)


def below(prefix: str, state: State) -> State:
    return {prefix + key: value for key, value in state.items()}


def trained(name: str) -> State:
    torch.manual_seed(1)
    return dict(Trained(name).state_dict())


def optimizer_of(name: str) -> State:
    model = Trained(name)
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer.state_dict()


FILES: dict[str, Callable[[], Any]] = {
    "backbone": lambda: trained("backbone"),
    "in a section": lambda: {"state_dict": trained("backbone"), "epoch": 3},
    "DDP": lambda: {"model": below("module.", trained("backbone"))},
    "compiled": lambda: below("_orig_mod.", trained("encoder")),
    "with an optimizer": lambda: {
        "model": trained("backbone"),
        "optimizer": optimizer_of("backbone"),
    },
    "Lightning": lambda: {
        "state_dict": trained("model"),
        "pytorch-lightning_version": "2.4.0",
        "optimizer_states": [optimizer_of("model")],
        "lr_schedulers": [],
        "epoch": 1,
    },
    "student": lambda: {"model": trained("student"), "args": {"lr": 0.1}},
    "deeper": lambda: {"state_dict": below("net.", trained("trunk"))},
    "average": lambda: {"ema": AveragedModel(Net()).state_dict()},
    "average of a larger model": lambda: AveragedModel(Trained("backbone")).state_dict(),
    "all below": lambda: below("model.", Net().state_dict()),
}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(CODE)


def tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return (
        [tensor for part in value.values() for tensor in tensors(part)]
        if isinstance(value, dict)
        else []
    )


def loaded(path: str) -> State:
    """Return the state of a model that strictly loads what is in the file."""
    content = torch.load(path)
    model = Net()
    state = next(
        (content[name] for name in ("state_dict", "model", "ema") if name in content), content
    )
    model.load_state_dict(state, strict=True)
    return dict(model.state_dict())


@pytest.mark.parametrize("content", FILES.values(), ids=FILES)
def test_submodule_is_taken(content: Callable[[], Any], run: Run) -> None:
    saved = content()
    torch.save(saved, "x.pt")
    done = run("diff", "x.pt", "--model", "net.py:Net", "--format", "json")
    assert done.status == 1
    (command,) = fixes_in(done.data)
    assert [fix["complete"] for fix in done.data["fix"]] == [True]
    line = shlex.split(command)
    assert run(*line[1:]).status == 0
    out = line[line.index("-o") + 1]
    state = loaded(out)
    assert run("diff", out, "--model", "net.py:Net").status == 0
    originals = tensors(saved)
    assert all(
        any(torch.equal(value, original) for original in originals) for value in state.values()
    )
    if "--select" in line:
        assert any("that the model does not have: " in note for note in notes_in(done.data))

    fixed = run("fix", "x.pt", "--model", "net.py:Net", "-o", "fixed.pt")
    assert fixed.status == 0, fixed.said
    assert all(torch.equal(value, state[key]) for key, value in loaded("fixed.pt").items())
    model = Net()
    ckpttool.load("x.pt", model)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


def test_two_submodules_of_the_same_names_are_a_choice(run: Run) -> None:
    torch.save(
        {
            "model": {
                **below("student.", Net().state_dict()),
                **below("teacher.", Net().state_dict()),
            }
        },
        "x.pt",
    )
    done = run("fix", "x.pt", "--model", "net.py:Net", "-o", "fixed.pt")
    assert done.status == 1
    assert not Path("fixed.pt").exists()
    line = shlex.split(done.err.partition("to take one: ")[2])
    assert run(*line[1:]).status == 0
    assert run("diff", line[line.index("-o") + 1], "--model", "net.py:Net").status == 0
    shown = run("diff", "x.pt", "--model", "net.py:Net").out.splitlines()
    assert any(
        text.startswith("fix: x.pt has names of net.py:Net below each of student, teacher")
        for text in shown
    )


def test_an_incomplete_or_misshapen_submodule_is_not_taken(run: Run) -> None:
    state = trained("backbone")
    for damaged in (
        {key: value for key, value in state.items() if key != "backbone.b.bias"},
        {**state, "backbone.b.bias": torch.ones(9)},
        {**state, "backbone.more": torch.ones(9)},
    ):
        torch.save(damaged, "x.pt")
        done = run("diff", "x.pt", "--model", "net.py:Net", "--format", "json")
        assert done.status == 1
        assert not any(
            "--select" in command or fix["complete"]
            for fix in done.data["fix"]
            for command in fixes_in(done.data)
        )
        assert run("fix", "x.pt", "--model", "net.py:Net", "-o", "fixed.pt").status == 1


def test_plural_of_a_name_is_no_hidden_segment(tmp_path: Path) -> None:
    left, right = str(tmp_path / "left.pt"), str(tmp_path / "right.pt")
    torch.save({"scales": torch.ones(3)}, left)
    torch.save({"scale": torch.ones(3)}, right)
    assert ckpttool.diff(left, right).fix == ()
    assert ckpttool.diff(right, left).fix == ()
