"""A run resumes with renamed modules, another registration order and new layers.

Oracle: the state that a script puts together by name, and the next steps of the optimizer.
"""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpttool
from command import Run

MODELS = """
import torch
from torch import nn

def layers(names):
    sizes = {"embed": (4, 6), "blocks": (6, 6), "stages": (6, 6), "adapter": (6, 6), "head": (6, 2)}
    return nn.ModuleDict({name: nn.Linear(*sizes[name]) for name in names})

def old():
    return layers(["embed", "blocks", "head"])

def new():
    return layers(["head", "embed", "adapter", "stages"])

def one_group(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)

def two_groups(model):
    weights = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.01)
"""
RULE = "blocks.{x*} => stages.{x*}"
TO_NEW = ("--model", "model.py:old", "--to-model", "model.py:new", "--rule", RULE)


@pytest.fixture(params=["one_group", "two_groups"])
def make(request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(MODELS)
    code = namespace()
    torch.manual_seed(0)
    model = code["old"]()
    optimizer = code[request.param](model)
    step(model, optimizer, 3)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "train.pt")
    torch.save(code["new"]().state_dict(), "init.pt")
    return str(request.param)


def namespace() -> dict[str, Any]:
    code: dict[str, Any] = {}
    exec(MODELS, code)
    return code


def step(model: nn.Module, optimizer: torch.optim.Optimizer, times: int) -> None:
    for _ in range(times):
        optimizer.zero_grad()
        total = sum(p.pow(2).sum() * (at + 1) for at, p in enumerate(model.parameters()))
        assert isinstance(total, torch.Tensor)
        total.backward()
        optimizer.step()


def names_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    return [names[id(parameter)] for parameter in params]


def resumed_by_hand(make: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the new model and its optimizer with the saved state, put together by name."""
    code, saved = namespace(), torch.load("train.pt")
    state = torch.load("init.pt")
    for key, value in saved["model"].items():
        state[key.replace("blocks", "stages")] = value
    model = code["new"]()
    model.load_state_dict(state)
    optimizer = code[make](model)
    old = code["old"]()
    old_names = [name.replace("blocks", "stages") for name in names_of(old, code[make](old))]
    state_of = dict(zip(old_names, saved["optimizer"]["state"].values()))
    by_id = {}
    for at, name in enumerate(names_of(model, optimizer)):
        if name in state_of:
            by_id[at] = state_of[name]
    optimizer.load_state_dict({**optimizer.state_dict(), "state": by_id})
    return model, optimizer


def resumed_from(path: str, make: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    code, saved = namespace(), torch.load(path)
    model = code["new"]()
    model.load_state_dict(saved["model"])
    optimizer = code[make](model)
    optimizer.load_state_dict(saved["optimizer"])
    return model, optimizer


def assert_resumes_as_by_hand(path: str, make: str) -> None:
    expected, actual = resumed_by_hand(make), resumed_from(path, make)
    for model, optimizer in (expected, actual):
        step(model, optimizer, 3)
    torch.testing.assert_close(actual[0].state_dict(), expected[0].state_dict(), rtol=0, atol=0)
    left, right = actual[1].state_dict(), expected[1].state_dict()
    torch.testing.assert_close(left["state"], right["state"], rtol=0, atol=0)


def assert_fits(run: Run, path: str, make: str) -> None:
    words = ("--model", "model.py:new", "--optimizer", f"model.py:{make}")
    done = run("diff", path, *words)
    assert done.status == 0
    without_state = "2 parameters without state in the checkpoint: adapter.weight, adapter.bias"
    assert without_state in done.out
    model = namespace()["new"]()
    ckpttool.load(path, model, namespace()[make](model))


@pytest.mark.parametrize("filler", ["init.pt", "model.py:new"])
def test_one_command_renames_fills_and_orders(run: Run, make: str, filler: str) -> None:
    optimizers = ("--optimizer", f"model.py:{make}", "--to-optimizer", f"model.py:{make}")
    done = run("remap", "train.pt", *TO_NEW, *optimizers, "--fill-from", filler, "-o", "out.pt")
    assert done.status == 0
    assert_fits(run, "out.pt", make)
    if filler == "init.pt":
        assert_resumes_as_by_hand("out.pt", make)


def test_two_commands_do_the_same(run: Run, make: str) -> None:
    optimizers = ("--optimizer", f"model.py:{make}", "--to-optimizer", f"model.py:{make}")
    renamed = run("remap", "train.pt", *TO_NEW, *optimizers, "--partial", "-o", "part.pt")
    assert renamed.status == 0
    words = ("--model", "model.py:new", "--optimizer", f"model.py:{make}")
    filled = run("remap", "part.pt", *words, "--fill-from", "init.pt", "-o", "out.pt")
    assert filled.status == 0
    assert_fits(run, "out.pt", make)
    assert_resumes_as_by_hand("out.pt", make)


def test_filled_keys_are_where_the_model_has_them(run: Run, make: str) -> None:
    optimizers = ("--optimizer", f"model.py:{make}", "--to-optimizer", f"model.py:{make}")
    run("remap", "train.pt", *TO_NEW, *optimizers, "--fill-from", "init.pt", "-o", "out.pt")
    assert list(torch.load("out.pt")["model"]) == list(torch.load("init.pt"))


def test_hyperparameters_keep_the_types_of_torch(run: Run, make: str) -> None:
    optimizers = ("--optimizer", f"model.py:{make}", "--to-optimizer", f"model.py:{make}")
    run("remap", "train.pt", *TO_NEW, *optimizers, "--fill-from", "init.pt", "-o", "out.pt")
    written = torch.load("out.pt")["optimizer"]["param_groups"]
    _, optimizer = resumed_by_hand(make)
    for group, expected in zip(written, optimizer.state_dict()["param_groups"]):
        assert {name: type(value) for name, value in group.items()} == {
            name: type(value) for name, value in expected.items()
        }
        assert group["betas"] == (0.9, 0.999)


def test_an_optimizer_of_all_parameters_gets_the_new_ones(run: Run, make: str) -> None:
    done = run("remap", "train.pt", *TO_NEW, "--fill-from", "init.pt", "-o", "out.pt")
    if make == "two_groups":
        assert done.status == 1
        assert "pass --to-optimizer" in done.err
        return
    assert done.status == 0
    assert_resumes_as_by_hand("out.pt", make)


def test_a_tensor_that_rules_renamed_is_not_filled_again(run: Run, make: str) -> None:
    words = ("--model", "model.py:old", "--rule", RULE, "--fill-from", "train.pt", "-o", "out.pt")
    refused = run("remap", "train.pt::model", *words)
    assert refused.status == 1
    assert "is stages.weight in the output @ blocks.weight" in refused.err
    assert "--to-model" in refused.err
    assert not Path("out.pt").exists()


def test_keys_that_stay_and_are_incomplete_are_noted(run: Run, make: str) -> None:
    """Options about optimizers leave the keys alone, also if the model lacks some."""
    saved = torch.load("train.pt")
    words = ("--model", "model.py:old", "--optimizer", f"model.py:{make}", "--to-optimizer")
    other = "model.py:two_groups" if make == "one_group" else "model.py:one_group"
    complete = run("remap", "train.pt", *words, other, "-o", "complete.pt")
    assert complete.status == 0
    assert "the keys stay as they are" not in complete.err
    saved["model"].pop("head.bias")
    torch.save(saved, "part.pt")
    part = run("remap", "part.pt", *words, other, "-o", "out.pt")
    assert part.status == 0
    lacks = "the keys stay as they are: the file lacks 1 key of model.py:old: model.head.bias"
    assert lacks in part.err
