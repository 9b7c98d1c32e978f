"""The table of classes, checked against the classes: the names and shapes of their state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import transformers

from ckpttool.core.optimizer_state import ID, OptimizerState, Param, ParamGroup
from ckpttool.optimizers.forms import class_of, fits, lacking
from torch_version import needs_torch

Shape = tuple[int, ...]
Make = Callable[[Sequence[torch.Tensor]], torch.optim.Optimizer]
SHAPES: tuple[Shape, ...] = ((), (1,), (3,), (4,), (4, 3), (3, 4), (1, 3), (2, 4, 3))
MAKERS: dict[str, Make] = {
    "Adam": lambda params: torch.optim.Adam(params, 0.1, amsgrad=True),
    "SGD": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9),
    "RMSprop": lambda params: torch.optim.RMSprop(params, 0.1, momentum=0.5, centered=True),
    "Adafactor of transformers": lambda params: transformers.Adafactor(params),
    **{name: getattr(torch.optim, name) for name in ("AdamW", "Adafactor", "Adagrad", "NAdam", "RAdam", "Adamax")},
    **{name: getattr(torch.optim, name) for name in ("Adadelta", "ASGD", "Rprop")},
}


def stepped(make: Make, shapes: Sequence[Shape], count: int = 1) -> torch.optim.Optimizer:
    """An optimizer of parameters of these shapes, after so many steps."""
    optimizer = make([torch.ones(shape, requires_grad=True) for shape in shapes])
    for _ in range(count):
        step(optimizer)
    return optimizer


def step(optimizer: torch.optim.Optimizer) -> None:
    def closure() -> Any:
        loss = sum(parameter.square().sum() for parameter in params)
        optimizer.zero_grad()
        loss.backward()
        for parameter in params:
            if isinstance(optimizer, torch.optim.SparseAdam):
                parameter.grad = parameter.grad.to_sparse()
        return loss

    params = optimizer.param_groups[0]["params"]
    closure()
    optimizer.step(closure if isinstance(optimizer, torch.optim.LBFGS) else None)


@pytest.mark.parametrize("name", MAKERS)
def test_a_state_fits_the_parameters_to_which_the_class_gives_such_a_one(name: str) -> None:
    optimizer = stepped(MAKERS[name], SHAPES)
    own = dict(zip(SHAPES, optimizer.state.values()))
    for entries in own.values():
        for entry, value in entries.items():
            if isinstance(value, torch.Tensor):
                alike = [p for p in SHAPES if entry in own[p] and own[p][entry].shape == value.shape]
                assert [p for p in SHAPES if fits(entry, tuple(value.shape), p)] == alike, entry


def saved(groups: Sequence[Mapping[str, Any]], state: Mapping[Param, Mapping[str, Any]]) -> OptimizerState:
    return OptimizerState(ID, tuple(ParamGroup((0,), group) for group in groups), state)


BY_STATE = {
    "Adam or AdamW": ("Adam", "AdamW", "RAdam", "SparseAdam"),
    "SGD": ("SGD", "Muon"),
    **{name: (name,) for name in ("NAdam", "Adamax", "Adadelta", "RMSprop", "Adagrad", "Adafactor", "ASGD", "Rprop")},
    "LBFGS": ("LBFGS",),
    "Adafactor of transformers": ("Adafactor of transformers",),
}


@pytest.mark.parametrize(("title", "name"), [(title, name) for title, names in BY_STATE.items() for name in names])
def test_a_class_is_known_by_its_state_where_the_groups_say_nothing(title: str, name: str) -> None:
    """As far as no other class has a state of the same names."""
    if name == "Muon":
        needs_torch("2.9", "Muon")
    make = MAKERS.get(name) or getattr(torch.optim, name)
    (own,) = stepped(make, [(4, 3)], 2).state.values()
    assert class_of(saved([{}], {0: own})) == title


def test_what_has_taken_no_step_lacks_no_state() -> None:
    groups = [{"lr": 1.0, "betas": (0.9, 0.99), "amsgrad": False}]
    steps: dict[Param, Sequence[str]] = {0: ("step", "exp_avg")}
    assert lacking(saved(groups, {0: {}}), groups, steps) == []
    assert lacking(saved(groups, {0: {"step": 1}}), groups, steps) == ["state.0.exp_avg"]


def test_what_no_row_has_is_no_class() -> None:
    assert class_of(saved([{"lr": 1.0}], {})) is None
    assert class_of(saved([{"lr": 1.0}], {0: {"step": 1, "trace": 2.0}})) is None


@pytest.mark.parametrize("wanted", MAKERS)
@pytest.mark.parametrize("name", MAKERS)
def test_what_a_class_lacks_is_what_its_step_fails_of(name: str, wanted: str) -> None:
    """By the names of the state that its own first step gives, and without them."""
    optimizer, other = stepped(MAKERS[name], [(4, 3)]), stepped(MAKERS[wanted], [(4, 3)])
    state = optimizer.state_dict()
    fresh = other.state_dict()
    groups = [{key: value for key, value in group.items() if key != "params"} for group in fresh["param_groups"]]
    mine = saved([{k: v for k, v in g.items() if k != "params"} for g in state["param_groups"]], state["state"])
    try:
        other.load_state_dict(state)
        step(other)
        fails = False
    except (KeyError, RuntimeError, TypeError, AttributeError):
        fails = True
    known: list[Mapping[Param, Sequence[str]]] = [{0: tuple(fresh["state"][0])}, {}]
    for steps in known:
        assert bool(lacking(mine, groups, steps)) == fails, lacking(mine, groups, steps)
