"""An output that lacks model keys is refused, and the keys are named, unless --partial is given."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import ckpttool
from command import Run, notes_in

CODE = """
import torch
from torch import nn


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(2, 2)
        self.b = nn.Linear(2, 2)
        self.b.weight = self.a.weight
        self.register_buffer("cache", torch.ones(1), persistent=False)


class Head(nn.Module):
    def __init__(self, name="head"):
        super().__init__()
        self.body = nn.Linear(2, 2)
        self.add_module(name, nn.Linear(2, 2))


def renamed():
    return Head("top")


class OptionalMask(nn.Linear):
    \"\"\"Save the mask only if some of it is false; load without it.\"\"\"

    def __init__(self):
        super().__init__(2, 2)
        self.register_buffer("mask", torch.ones(2, dtype=torch.bool))
        self._register_state_dict_hook(OptionalMask.drop_mask)
        self._register_load_state_dict_pre_hook(self.add_mask)

    @staticmethod
    def drop_mask(module, state, prefix, metadata):
        if bool(state[prefix + "mask"].all()):
            del state[prefix + "mask"]

    def add_mask(self, state, prefix, *others):
        state.setdefault(prefix + "mask", torch.ones(2, dtype=torch.bool))
"""


@pytest.fixture(autouse=True)
def _code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("m.py").write_text(CODE)


def head(name: str = "head") -> nn.ModuleDict:
    return nn.ModuleDict({"body": nn.Linear(2, 2), name: nn.Linear(2, 2)})


WRAPPED = {
    f"module.{key}": value
    for key, value in head().state_dict().items()
    if not key.startswith("head")
}


@pytest.mark.parametrize(
    "options",
    [
        ["--model", "m.py:Head"],
        ["--model", "m.py:Head", "--to", "serialized"],
        ["--model", "m.py:Head", "--to", "runtime"],
        ["--model", "m.py:Head", "--to", "compile"],
        ["--model", "m.py:Head", "--to-model", "m.py:Head"],
        ["--model", "names.json"],
    ],
)
def test_missing_keys_are_refused_without_partial(options: list[str], run: Run) -> None:
    torch.save(WRAPPED, "part.pt")
    run("trace", "m.py:Head", "-o", "names.json")
    done = run("remap", "part.pt", *options, "-o", "out.pt")
    assert done.status == 1, done.said
    assert "--partial" in done.err
    assert "missing @ head.weight" in done.err
    assert "missing @ head.bias" in done.err
    assert not Path("out.pt").exists()
    with pytest.raises(ckpttool.Refused) as refused:
        ckpttool.remap("part.pt", model="m.py:Head")
    assert [problem.key for problem in refused.value.problems] == ["head.weight", "head.bias"]
    done = run("remap", "part.pt", *options, "-o", "out.pt", "--partial", "--format", "json")
    assert (done.status, done.data["missing"]) == (0, ["head.weight", "head.bias"])
    assert "head.weight, head.bias" in done.err + str(notes_in(done.data))
    assert len(torch.load("out.pt")) == 2


def test_rules_must_produce_every_key_of_the_new_model(run: Run) -> None:
    torch.save(head().state_dict(), "old.pt")
    models = ("--model", "m.py:Head", "--to-model", "m.py:renamed", "-o", "out.pt")
    done = run("remap", "old.pt", *models, "--rule", "head.weight => top.weight")
    assert (done.status, "missing @ top.bias" in done.err) == (1, True), done.err
    assert run("remap", "old.pt", *models, "--rule", "head.{x} => top.{x}").status == 0
    head("top").load_state_dict(torch.load("out.pt"))


@pytest.mark.parametrize("options", [["--drop", "head.*"], ["--select", "body"]])
def test_dropped_keys_are_not_missing(options: list[str], run: Run) -> None:
    torch.save({f"module.{key}": value for key, value in head().state_dict().items()}, "whole.pt")
    options = [word.replace("head", "module.head") for word in options]
    done = run(
        "remap", "whole.pt", "--model", "m.py:Head", *options, "-o", "out.pt", "--format", "json"
    )
    assert (done.status, done.data["missing"]) == (0, []), done.err


def test_keys_not_needed_by_a_strict_load_are_not_missing(run: Run) -> None:
    state = {
        "module.a.weight": torch.ones(2, 2),
        "module.a.bias": torch.ones(2),
        "module.b.bias": torch.ones(2),
    }
    torch.save(state, "tied.pt")
    done = run("remap", "tied.pt", "--model", "m.py:Tied", "-o", "out.pt", "--format", "json")
    assert (done.status, done.data["missing"]) == (0, [])
    assert run("diff", "--model", "m.py:Tied", "out.pt").status == 0
    torch.save({"module.weight": torch.ones(2, 2), "module.bias": torch.ones(2)}, "unmasked.pt")
    done = run(
        "remap", "unmasked.pt", "--model", "m.py:OptionalMask", "-o", "mask.pt", "--format", "json"
    )
    assert (done.status, done.data["missing"]) == (0, []), done.err
    assert run("diff", "--model", "m.py:OptionalMask", "mask.pt").status == 0
