"""Exit status 0 of `diff --model --optimizer` against torch itself, over random models and damaged
optimizer states.

The suite draws a few; ``CKPTTOOL_PAIRS=2000 pytest tests/tracing/test_strict_resume.py`` draws
more.
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
from command import main
from drawn_models import MODELS, build, is_safe

PAIRS = int(os.environ.get("CKPTTOOL_PAIRS", "40"))
FIRST = int(os.environ.get("CKPTTOOL_FIRST_PAIR", "0"))
OPTIMIZERS = (
    *("adamw", "in_order", "decayed", "decayed_named", "amsgrad"),
    *("sgd", "plain_sgd", "adagrad", "rmsprop", "adamax"),
)
ON_CPU = ("loading_zoo:quantized_linear",)  # cannot be built on meta
Saved = dict[str, Any]


# Damages: each changes a saved optimizer state, and returns a description.


def _random_tensor(saved: Saved, random: random.Random) -> tuple[Any, str]:
    """Choose a parameter and the name of a tensor in its state."""
    param = random.choice(
        [p for p, state in saved["state"].items() if any(map(torch.is_tensor, state.values()))]
    )
    return param, random.choice(
        [name for name, value in saved["state"][param].items() if torch.is_tensor(value)]
    )


def _drop_state(saved: Saved, random: random.Random) -> str:
    param, _ = _random_tensor(saved, random)
    del saved["state"][param]
    return f"no state for {param}"


def _drop_tensor(saved: Saved, random: random.Random) -> str:
    param, name = _random_tensor(saved, random)
    del saved["state"][param][name]
    return f"no {name} for {param}"


def _change_value(saved: Saved, random: random.Random) -> str:
    param, name = _random_tensor(saved, random)
    value = saved["state"][param][name]
    # a step of two elements works too
    larger = [] if name == "step" else ["a tensor with an extra element"]
    kind = random.choice(
        ["another dtype", "a tensor with an extra dimension", "another number", *larger]
    )
    if kind == "another dtype":
        value = value.to(random.choice([torch.float64, torch.bfloat16, torch.int64]))
    elif kind == "a tensor with an extra element":
        value = torch.cat([value.reshape(-1), value.reshape(-1)[:1]])
    elif kind == "a tensor with an extra dimension":
        value = value.unsqueeze(0)
    else:
        value = 3
    saved["state"][param][name] = value
    return f"{name} of {param} is {kind}"


def _swap(saved: Saved, random: random.Random) -> str:
    """Swap two parameters with their names, as if the model registered them in another order."""
    group = random.choice([group for group in saved["param_groups"] if len(group["params"]) > 1])
    first, second = random.sample(range(len(group["params"])), 2)
    for params in (group["params"], group.get("param_names", [])):
        if params:
            params[first], params[second] = params[second], params[first]
    return f"positions {first} and {second} are swapped"


def _drop_parameter(saved: Saved, random: random.Random) -> str:
    group = random.choice(saved["param_groups"])
    saved["state"].pop(group["params"].pop(), None)
    if group.get("param_names"):
        group["param_names"].pop()
    return "a parameter is dropped"


def _split_group(saved: Saved, random: random.Random) -> str:
    group = random.choice([group for group in saved["param_groups"] if len(group["params"]) > 1])
    rest = copy.deepcopy(group)
    for name in ("params", "param_names"):
        if name in group:
            group[name], rest[name] = group[name][:1], group[name][1:]
    saved["param_groups"].insert(saved["param_groups"].index(group) + 1, rest)
    return "a group is split"


def _drop_option(saved: Saved, random: random.Random) -> str:
    group = random.choice(saved["param_groups"])
    name = random.choice([name for name in group if name not in ("params", "param_names")])
    del group[name]
    return f"no {name}"


DAMAGES: list[Callable[[Saved, random.Random], str]] = [
    *(_drop_state, _drop_tensor, _change_value, _change_value),
    *(_swap, _swap, _drop_parameter, _split_group, _drop_option),
]


# The pair and the answer of torch


def build_both(operand: str, kind: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = build(operand, seed)
    return model, getattr(optimizer_models, kind)(model)


def step(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    optimizer.step()


def draw(random: random.Random, path: Path) -> tuple[str, str, str]:
    """Write a checkpoint; return the model, the optimizer that loads it, and the damages."""
    operand, kind = (
        random.choice([name for name in MODELS if name not in ON_CPU]),
        random.choice(OPTIMIZERS),
    )
    model, optimizer = build_both(operand, kind, 1)
    if not list(model.parameters()):
        raise ValueError("nothing to train")
    step(optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    for param, (_, state) in zip(saved["state"], enumerate(saved["state"].values())):
        state["owner"] = param  # the saved id shows where torch loads the state
    damages = [random.choice(DAMAGES)(saved, random) for _ in range(random.choice([0, 1, 1, 1, 2]))]
    torch.save({"model": model.state_dict(), "optimizer": saved}, path)
    loading_kind = kind if random.random() < 0.85 else random.choice(OPTIMIZERS)
    build_both(operand, loading_kind, 1)
    return operand, loading_kind, "; ".join([kind, *damages])


def names_by_id(saved: Saved) -> dict[int, str] | None:
    """Return id -> parameter name if the file has names."""
    if not all("param_names" in group for group in saved["param_groups"]):
        return None
    return {
        p: name for g in saved["param_groups"] for p, name in zip(g["params"], g["param_names"])
    }


def torch_error(operand: str, kind: str, path: Path) -> str:
    """Return the error of torch, or an empty string if it loads all state correctly and takes a
    step.
    """
    saved = torch.load(path, weights_only=False)
    model, optimizer = build_both(operand, kind, 7)
    fresh_model, fresh = build_both(operand, kind, 7)
    step(fresh)
    names, fresh_params = names_by_id(saved["optimizer"]), dict(fresh_model.named_parameters())
    try:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        for name, parameter in model.named_parameters():
            state = optimizer.state.get(parameter, {})
            owner = state.pop("owner", None)
            if names is not None and owner is not None and names[owner] != name:
                return f"{name} has the state of {names[owner]}"
            for state_name, value in state.items():
                expected = fresh.state.get(fresh_params[name], {}).get(state_name, parameter)
                if (
                    torch.is_tensor(value)
                    and value.numel() > 1
                    and value.shape != getattr(expected, "shape", None)
                ):
                    return f"{state_name} of {name} has another shape than in a fresh optimizer"
        step(optimizer)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("seed", range(FIRST, FIRST + PAIRS))
def test_status_is_0_if_and_only_if_torch_resumes(
    seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "train.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        while True:
            try:
                operand, kind, damages = draw(random.Random(seed), path)
                break
            except Exception:  # the optimizer does not support the model, or its state is empty
                seed += 1_000_000
        error = torch_error(operand, kind, path)
        options = ["--model", operand, "--optimizer", f"optimizer_models:{kind}", "--ignore-dtype"]
        status = main(["diff", *options, str(path)])
    report = f"{operand}, {kind}: {damages}\ntorch: {error or 'loads'}\n{capsys.readouterr()}"
    assert status in (0, 1), report
    assert (status == 0) == (not error) or not is_safe(path), report


@pytest.mark.parametrize(
    "kinds", [("frozen", "frozen"), ("trained", "frozen"), ("trained", "trained")]
)
def test_positions_matter_if_there_is_state(
    kinds: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only adapters are trained, so the frozen parameters may have any position in their group."""
    operand, kind, path = "real_models:lora", "decayed_named", tmp_path / "train.pt"
    model, optimizer = build_both(operand, kind, 1)
    step(optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    for param, state in saved["state"].items():
        state["owner"] = param
    group = saved["param_groups"][0]
    with_state = {"trained": True, "frozen": False}
    at = [
        [i for i, p in enumerate(group["params"]) if (p in saved["state"]) is with_state[one]]
        for one in kinds
    ]
    first, second = at[0][0], at[1][-1]
    for params in (group["params"], group["param_names"]):
        params[first], params[second] = params[second], params[first]
    torch.save({"model": model.state_dict(), "optimizer": saved}, path)
    error = torch_error(operand, kind, path)
    assert bool(error) == ("trained" in kinds)
    assert main(
        ["diff", "--model", operand, "--optimizer", f"optimizer_models:{kind}", str(path)]
    ) == bool(error)
    assert (", 2 parameters at another position\n" in capsys.readouterr().out) == bool(error)
