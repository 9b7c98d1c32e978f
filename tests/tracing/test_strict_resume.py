"""Exit status 0 of `diff --model --optimizer` against torch itself, over random models and damaged optimizers' states.

The suite draws a few; ``CKPTTOOL_PAIRS=2000 pytest tests/tracing/test_strict_resume.py`` draws more.
"""

from __future__ import annotations

import copy
import os
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import optimizer_models
from ckpttool.cli.app import main
from drawn_models import MODELS, build, is_safe

PAIRS = int(os.environ.get("CKPTTOOL_PAIRS", "40"))
FIRST = int(os.environ.get("CKPTTOOL_FIRST_PAIR", "0"))
OPTIMIZERS = (
    "adamw",
    "in_order",
    "decayed",
    "decayed_named",
    "amsgrad",
    "sgd",
    "plain_sgd",
    "adagrad",
    "rmsprop",
    "adamax",
)
ON_CPU = ("loading_zoo:quantized_linear",)  # cannot be built on meta
Saved = dict[str, Any]


# Damages: each changes a saved optimizer's state; it says what was done.


def _some(saved: Saved, random: random.Random) -> tuple[Any, str]:
    """The state of a parameter, and the name of a tensor in it."""
    param = random.choice([p for p, own in saved["state"].items() if any(map(torch.is_tensor, own.values()))])
    return param, random.choice([name for name, value in saved["state"][param].items() if torch.is_tensor(value)])


def _stateless(saved: Saved, random: random.Random) -> str:
    param, _ = _some(saved, random)
    del saved["state"][param]
    return f"no state for {param}"


def _lacking(saved: Saved, random: random.Random) -> str:
    param, name = _some(saved, random)
    del saved["state"][param][name]
    return f"no {name} for {param}"


def _value(saved: Saved, random: random.Random) -> str:
    param, name = _some(saved, random)
    value = saved["state"][param][name]
    larger = [] if name == "step" else ["an element more"]  # torch counts two steps as well as one
    kind = random.choice(["another dtype", "a dimension more", "another number", *larger])
    if kind == "another dtype":
        value = value.to(random.choice([torch.float64, torch.bfloat16, torch.int64]))
    elif kind == "an element more":
        value = torch.cat([value.reshape(-1), value.reshape(-1)[:1]])
    elif kind == "a dimension more":
        value = value.unsqueeze(0)
    else:
        value = 3
    saved["state"][param][name] = value
    return f"{name} of {param} is {kind}"


def _exchanged(saved: Saved, random: random.Random) -> str:
    """Two parameters in each other's places, with their names, as if the model registered them otherwise."""
    group = random.choice([group for group in saved["param_groups"] if len(group["params"]) > 1])
    first, second = random.sample(range(len(group["params"])), 2)
    for listed in (group["params"], group.get("param_names", [])):
        if listed:
            listed[first], listed[second] = listed[second], listed[first]
    return f"places {first} and {second} are exchanged"


def _shorter(saved: Saved, random: random.Random) -> str:
    group = random.choice(saved["param_groups"])
    saved["state"].pop(group["params"].pop(), None)
    if group.get("param_names"):
        group["param_names"].pop()
    return "a parameter less"


def _split(saved: Saved, random: random.Random) -> str:
    group = random.choice([group for group in saved["param_groups"] if len(group["params"]) > 1])
    other = copy.deepcopy(group)
    for name in ("params", "param_names"):
        if name in group:
            group[name], other[name] = group[name][:1], group[name][1:]
    saved["param_groups"].insert(saved["param_groups"].index(group) + 1, other)
    return "a group is two"


def _option(saved: Saved, random: random.Random) -> str:
    group = random.choice(saved["param_groups"])
    name = random.choice([name for name in group if name not in ("params", "param_names")])
    del group[name]
    return f"no {name}"


DAMAGES: list[Callable[[Saved, random.Random], str]] = [
    *(_stateless, _lacking, _value, _value, _exchanged, _exchanged, _shorter, _split, _option)
]


# The pair, and both answers


def made(operand: str, kind: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = build(operand, seed)
    return model, getattr(optimizer_models, kind)(model)


def step(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    optimizer.step()


def draw(random: random.Random, path: Path) -> tuple[str, str, str]:
    """Writes a checkpoint; the model and the optimizer that are to load it, and what was done to the state."""
    operand, kind = random.choice([name for name in MODELS if name not in ON_CPU]), random.choice(OPTIMIZERS)
    model, optimizer = made(operand, kind, 1)
    if not list(model.parameters()):
        raise ValueError("nothing to train")
    step(optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    for param, (_, own) in zip(saved["state"], enumerate(saved["state"].values())):
        own["owner"] = param  # the id under which it was saved, by which torch's own loading is followed
    told = [random.choice(DAMAGES)(saved, random) for _ in range(random.choice([0, 1, 1, 1, 2]))]
    torch.save({"model": model.state_dict(), "optimizer": saved}, path)
    wanted = kind if random.random() < 0.85 else random.choice(OPTIMIZERS)
    made(operand, wanted, 1)
    return operand, wanted, "; ".join([kind, *told])


def names_by_id(saved: Saved) -> dict[int, str] | None:
    """Whose state each id is, where the file says it."""
    if not all("param_names" in group for group in saved["param_groups"]):
        return None
    return {p: name for g in saved["param_groups"] for p, name in zip(g["params"], g["param_names"])}


def torchs_answer(operand: str, kind: str, path: Path) -> str:
    """Empty where torch loads model and optimizer, every state reaches its parameter, and a step works."""
    saved = torch.load(path, weights_only=False)
    model, optimizer = made(operand, kind, 7)
    other, fresh = made(operand, kind, 7)
    step(fresh)
    names, twin = names_by_id(saved["optimizer"]), dict(other.named_parameters())
    try:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        for name, parameter in model.named_parameters():
            own = optimizer.state.get(parameter, {})
            owner = own.pop("owner", None)
            if names is not None and owner is not None and names[owner] != name:
                return f"{name} has the state of {names[owner]}"
            for moment, value in own.items():
                wanted = fresh.state.get(twin[name], {}).get(moment, parameter)
                if torch.is_tensor(value) and value.numel() > 1 and value.shape != getattr(wanted, "shape", None):
                    return f"{moment} of {name} has another shape than that of a fresh optimizer"
        step(optimizer)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("seed", range(FIRST, FIRST + PAIRS))
def test_status_0_exactly_where_torch_resumes(seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "train.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        while True:
            try:
                operand, kind, told = draw(random.Random(seed), path)
                break
            except Exception:  # such a model has no such optimizer, or its state nothing to damage
                seed += 1_000_000
        refused = torchs_answer(operand, kind, path)
        words = ["--model", operand, "--optimizer", f"optimizer_models:{kind}", "--ignore-dtype"]
        status = main(["diff", *words, str(path)])
    said = f"{operand}, {kind}: {told}\ntorch: {refused or 'loads'}\n{capsys.readouterr()}"
    assert status in (0, 1), said
    assert (status == 0) == (not refused) or not is_safe(path), said


@pytest.mark.parametrize("kinds", [("frozen", "frozen"), ("trained", "frozen"), ("trained", "trained")])
def test_positions_matter_if_there_is_state(
    kinds: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Adapters are trained, and their base is not: what has no state can stand anywhere in its group."""
    operand, kind, path = "real_models:lora", "decayed_named", tmp_path / "train.pt"
    model, optimizer = made(operand, kind, 1)
    step(optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    for param, own in saved["state"].items():
        own["owner"] = param
    group = saved["param_groups"][0]
    with_state = {"trained": True, "frozen": False}
    at = [[i for i, p in enumerate(group["params"]) if (p in saved["state"]) is with_state[one]] for one in kinds]
    first, second = at[0][0], at[1][-1]
    for listed in (group["params"], group["param_names"]):
        listed[first], listed[second] = listed[second], listed[first]
    torch.save({"model": model.state_dict(), "optimizer": saved}, path)
    refused = torchs_answer(operand, kind, path)
    assert bool(refused) == ("trained" in kinds)
    assert main(["diff", "--model", operand, "--optimizer", f"optimizer_models:{kind}", str(path)]) == bool(refused)
    assert (", 2 order\n" in capsys.readouterr().out) == bool(refused)
