"""For every class of torch.optim, `diff --optimizer` exits 0 if and only if torch loads the state
and takes steps.

CKPTTOOL_SEEDS=0 tries every combination instead of one for each class and kind of state.
"""

from __future__ import annotations

import copy
import itertools
import os
import sys
import types
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from command import Run

CLASSES = {
    name: value
    for name, value in vars(torch.optim).items()
    if isinstance(value, type)
    and issubclass(value, torch.optim.Optimizer)
    and value is not torch.optim.Optimizer
}
STATES = ("none", "empty dicts", "half", "first empty", "second empty", "full")
VARIANTS = list(itertools.product(("id", "param_names", "fqn"), (1, 2), ("abc", "cba")))


class Net(nn.Module):
    """Layers of the same shape without biases, as Muon requires; they differ only in name."""

    def __init__(self, layers: str) -> None:
        super().__init__()
        for name in layers:
            self.add_module(name, nn.Linear(3, 3, bias=False))


def optimizer(
    model: nn.Module, kind: str, groups: int, named: bool = False
) -> torch.optim.Optimizer:
    """Return an optimizer; with two groups, layer ``a`` is in the second one."""
    slow = [groups == 2 and name.startswith("a") for name, _ in model.named_parameters()]
    params = list(zip(slow, model.named_parameters()))
    parts = [
        [pair if named else pair[1] for is_slow, pair in params if is_slow == which]
        for which in (False, True)
    ]
    options: dict[str, Any] = {"momentum": 0.9} if kind == "SGD" else {}
    return CLASSES[kind]([{"params": part} for part in parts if part], **options)


def step(model: nn.Module, opt: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        grad = torch.rand_like(parameter)
        parameter.grad = grad.to_sparse() if isinstance(opt, torch.optim.SparseAdam) else grad
    opt.step((lambda: torch.tensor(1.0)) if isinstance(opt, torch.optim.LBFGS) else None)  # type: ignore[arg-type]


def saved(kind: str, which: str, form: str, groups: int, layers: str) -> dict[str, Any]:
    """Return the state of a model with this layer order, with a unique value in the tensors of each
    parameter.
    """
    torch.manual_seed(0)
    model = Net(layers)
    opt = optimizer(model, kind, groups, form == "param_names")
    step(model, opt)
    for name, parameter in model.named_parameters():
        for value in opt.state[parameter].values():
            # the state of LBFGS belongs to all parameters
            if isinstance(value, torch.Tensor) and value.dim() and kind != "LBFGS":
                value.fill_(1.0 + "abc".index(name[0]))
    state: dict[str, Any] = (
        get_optimizer_state_dict(model, opt) if form == "fqn" else copy.deepcopy(opt.state_dict())
    )
    params = [param for group in state["param_groups"] for param in group["params"]]
    entries: dict[Any, Any] = dict(state["state"])
    if which in ("none", "empty dicts"):
        entries = {} if which == "none" else {param: {} for param in params}
    elif which == "half":
        entries = {param: entries[param] for param in params[:2] if param in entries}
    elif which != "full":
        entries[params[which == "second empty"]] = {}
    return {**state, "state": entries}


def resumes(
    state: dict[str, Any], make: Callable[[nn.Module], torch.optim.Optimizer], by_name: bool
) -> bool:
    model = Net("abc")
    opt, given = make(model), copy.deepcopy(state)
    try:
        if by_name:
            set_optimizer_state_dict(model, opt, given)
        else:
            opt.load_state_dict(given)
        for name, parameter in model.named_parameters():
            for value in opt.state.get(parameter, {}).values():
                expected = 1.0 + "abc".index(name[0])
                moment = (
                    isinstance(value, torch.Tensor)
                    and value.dim()
                    and not isinstance(opt, torch.optim.LBFGS)
                )
                if moment and not torch.equal(value, torch.full_like(value, expected)):
                    return False
        step(model, opt)
        step(model, opt)
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return True


def variants(kind: str) -> Iterator[tuple[str, str, int, str]]:
    """Yield kinds of state with the form, the number of groups, and the layer order of the file."""
    every = os.environ.get("CKPTTOOL_SEEDS") == "0"
    for at, which in enumerate(STATES):
        chosen = [
            variant
            for variant in VARIANTS
            # one group, no state per parameter
            if not (kind == "LBFGS" and variant != ("id", 1, "abc"))
            and not (kind == "SparseAdam" and variant[0] == "fqn")  # torch does not support it
            # without names, the order is an assumption
            and not (variant[0] == "id" and variant[2] != "abc")
        ]
        start = at + 7 * sorted(CLASSES).index(kind)
        for variant in chosen if every else chosen[start % len(chosen) :][:1]:
            yield (which, *variant)


@pytest.mark.parametrize("kind", sorted(CLASSES))
def test_diff_agrees_with_torch(
    kind: str, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for which, form, groups, layers in variants(kind):
        code = types.ModuleType("net_of_states")
        code.net = lambda: Net("abc")  # type: ignore[attr-defined]
        code.make = partial(optimizer, kind=kind, groups=groups)  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "net_of_states", code)
        state, path = saved(kind, which, form, groups, layers), tmp_path / "saved.pt"
        torch.save(state, path)
        right = resumes(state, partial(optimizer, kind=kind, groups=groups), form == "fqn")
        done = run(
            "diff", "--model", "net_of_states:net", "--optimizer", "net_of_states:make", path
        )
        assert done.status == (0 if right else 1), (which, form, groups, layers, done.out, done.err)
