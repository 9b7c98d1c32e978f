"""`diff --optimizer` exits 0 exactly if torch loads the state and takes steps: every class of torch.optim is asked.

CKPTTOOL_SEEDS=0 tries every combination, and not only one for each class and kind of state.
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
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from command import Run

CLASSES = {
    name: made
    for name, made in vars(torch.optim).items()
    if isinstance(made, type) and issubclass(made, torch.optim.Optimizer) and made is not torch.optim.Optimizer
}
STATES = ("none", "empty dicts", "half", "first empty", "second empty", "full")
WAYS = list(itertools.product(("id", "param_names", "fqn"), (1, 2), ("abc", "cba")))


class Net(nn.Module):
    """Layers of one shape, without biases, as Muon wants them: only names tell the parameters apart."""

    def __init__(self, layers: str) -> None:
        super().__init__()
        for name in layers:
            self.add_module(name, nn.Linear(3, 3, bias=False))


def optimizer(model: nn.Module, kind: str, groups: int, named: bool = False) -> torch.optim.Optimizer:
    """In two groups the layer ``a`` stands alone."""
    slow = [groups == 2 and name.startswith("a") for name, _ in model.named_parameters()]
    params = list(zip(slow, model.named_parameters()))
    parts = [[pair if named else pair[1] for own, pair in params if own == which] for which in (False, True)]
    options: dict[str, Any] = {"momentum": 0.9} if kind == "SGD" else {}
    return CLASSES[kind]([{"params": part} for part in parts if part], **options)


def step(model: nn.Module, made: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        grad = torch.rand_like(parameter)
        parameter.grad = grad.to_sparse() if isinstance(made, torch.optim.SparseAdam) else grad
    made.step((lambda: torch.tensor(1.0)) if isinstance(made, torch.optim.LBFGS) else None)  # type: ignore[arg-type]


def saved(kind: str, which: str, form: str, groups: int, layers: str) -> dict[str, Any]:
    """The state of a model whose layers are in this order, with a value of its own in each tensor of a parameter."""
    torch.manual_seed(0)
    model = Net(layers)
    made = optimizer(model, kind, groups, form == "param_names")
    step(model, made)
    for name, parameter in model.named_parameters():
        for value in made.state[parameter].values():
            if isinstance(value, torch.Tensor) and value.dim() and kind != "LBFGS":  # its state is that of all
                value.fill_(1.0 + "abc".index(name[0]))
    state: dict[str, Any] = get_optimizer_state_dict(model, made) if form == "fqn" else copy.deepcopy(made.state_dict())
    params = [param for group in state["param_groups"] for param in group["params"]]
    own: dict[Any, Any] = dict(state["state"])
    if which in ("none", "empty dicts"):
        own = {} if which == "none" else {param: {} for param in params}
    elif which == "half":
        own = {param: own[param] for param in params[:2] if param in own}
    elif which != "full":
        own[params[which == "second empty"]] = {}
    return {**state, "state": own}


def resumes(state: dict[str, Any], make: Callable[[nn.Module], torch.optim.Optimizer], by_name: bool) -> bool:
    """Whether torch loads it, gives every parameter its own moments, and takes two steps."""
    model = Net("abc")
    made, given = make(model), copy.deepcopy(state)
    try:
        if by_name:
            set_optimizer_state_dict(model, made, given)
        else:
            made.load_state_dict(given)
        for name, parameter in model.named_parameters():
            for value in made.state.get(parameter, {}).values():
                own = 1.0 + "abc".index(name[0])
                moment = isinstance(value, torch.Tensor) and value.dim() and not isinstance(made, torch.optim.LBFGS)
                if moment and not torch.equal(value, torch.full_like(value, own)):
                    return False
        step(model, made)
        step(model, made)
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return True


def ways(kind: str) -> Iterator[tuple[str, str, int, str]]:
    """A kind of state, the form, the number of groups, and the order of the layers in the file."""
    every = os.environ.get("CKPTTOOL_SEEDS") == "0"
    for at, which in enumerate(STATES):
        chosen = [
            way
            for way in WAYS
            if not (kind == "LBFGS" and way != ("id", 1, "abc"))  # it knows one group, and no parameter by itself
            and not (kind == "SparseAdam" and way[0] == "fqn")  # torch makes none
            and not (way[0] == "id" and way[2] != "abc")  # of ids alone the answer says on what it rests
        ]
        start = at + 7 * sorted(CLASSES).index(kind)
        for way in chosen if every else chosen[start % len(chosen) :][:1]:
            yield (which, *way)


@pytest.mark.parametrize("kind", sorted(CLASSES))
def test_the_verdict_on_a_state_is_torchs(kind: str, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for which, form, groups, layers in ways(kind):
        code = types.ModuleType("net_of_states")
        code.net = lambda: Net("abc")  # type: ignore[attr-defined]
        code.make = partial(optimizer, kind=kind, groups=groups)  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "net_of_states", code)
        state, path = saved(kind, which, form, groups, layers), tmp_path / "saved.pt"
        torch.save(state, path)
        right = resumes(state, partial(optimizer, kind=kind, groups=groups), form == "fqn")
        done = run("diff", "--model", "net_of_states:net", "--optimizer", "net_of_states:make", path)
        assert done.status == (0 if right else 1), (which, form, groups, layers, done.out, done.err)
