"""State under another optimizer, order or wrapper: `fix` and `load` give each parameter its own, or
refuse.

The suite draws a few; ``CKPTTOOL_SEEDS=300 pytest tests/api/test_resumes.py`` draws more.
"""

from __future__ import annotations

import os
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpttool
import optimizer_models
from command import main
from drawn_models import MODELS, build

SEEDS = int(os.environ.get("CKPTTOOL_SEEDS", "12"))
OPTIMIZERS = ("adamw", "in_order", "decayed", "decayed_named", "backwards", "named", "halves")
PREFIXES = ("", "module.", "_orig_mod.", "model.", "module._orig_mod.")
# One cannot be built on meta; the other saves one dict, which is a state dict itself.
EXCEPT = ("loading_zoo:quantized_linear", "loading_zoo:dict_of_all_tensors")


def with_optimizer(operand: str, kind: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = build(operand, seed)
    return model, getattr(optimizer_models, kind)(model)


def saved_run(draw: random.Random, path: Path) -> tuple[str, str, dict[str, float]]:
    """Write a run whose state says whose it is; return the model, the optimizer that resumes, and
    the marks by name.

    Raises whatever a model raises that cannot be trained or saved.
    """
    operand = draw.choice([name for name in MODELS if name not in EXCEPT])
    kind, resuming, prefix = draw.choice(OPTIMIZERS), draw.choice(OPTIMIZERS), draw.choice(PREFIXES)
    model, optimizer = with_optimizer(operand, kind, 1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    for mark, parameter in enumerate(model.parameters()):
        if optimizer.state.get(parameter):
            optimizer.state[parameter]["exp_avg"].fill_(mark)
    marks = marks_in(model, optimizer)
    if not marks:
        raise ValueError("nothing to train")
    weights = model.state_dict()
    build(operand, 2).load_state_dict(dict(weights))
    with_optimizer(operand, resuming, 2)
    file = {
        "model": {prefix + key: value for key, value in weights.items()},
        "optimizer": optimizer.state_dict(),
    }
    torch.save(file, path)
    return operand, resuming, marks


def marks_in(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Return the mark in the state of each parameter."""
    states: dict[str, Any] = {
        name: optimizer.state.get(parameter) for name, parameter in model.named_parameters()
    }
    return {name: state["exp_avg"].flatten()[0].item() for name, state in states.items() if state}


@pytest.mark.parametrize("seed", range(SEEDS))
def test_every_parameter_gets_its_own_state(
    seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, fixed = tmp_path / "run.pt", tmp_path / "fixed.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        while True:
            try:
                operand, kind, marks = saved_run(random.Random(seed), path)
                break
            # the optimizer does not support the model, or it does not load its own keys
            except Exception:
                seed += 1_000_000
        model = ("--model", operand, "--optimizer", f"optimizer_models:{kind}")
        resumes = main(["diff", str(path), *model]) == 0
        if resumes or main(["fix", str(path), *model, "-o", str(fixed)]) == 0:
            file = torch.load(path if resumes else fixed, weights_only=False)
            live, optimizer = with_optimizer(operand, kind, 3)
            live.load_state_dict(file["model"])
            optimizer.load_state_dict(file["optimizer"])
            assert marks_in(live, optimizer) == marks, (operand, kind, capsys.readouterr().out)
        live, optimizer = with_optimizer(operand, kind, 4)
        try:
            ckpttool.load(path, live, optimizer)
        except ckpttool.CkptError:
            assert not marks_in(live, optimizer)
        else:
            assert marks_in(live, optimizer) == marks, (operand, kind)
