"""The table of optimizer classes, with names and shapes of state, against the real classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import optimizer_models as models
from ckpttool import open_checkpoint
from ckpttool.core.optimizer_state import ID, OptimizerState, Param, ParamGroup
from ckpttool.optimizers.classes import class_of, fits, missing_for_step
from ckpttool.optimizers.forms import read
from torch_version import needs_torch

Shape = tuple[int, ...]
Make = Callable[[Sequence[torch.Tensor]], torch.optim.Optimizer]
SHAPES: tuple[Shape, ...] = ((), (1,), (3,), (4,), (4, 3), (3, 4), (1, 3), (2, 4, 3))
MAKERS: dict[str, Make] = {
    "Adam": lambda params: torch.optim.Adam(params, 0.1, amsgrad=True),
    "SGD": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9),
    "RMSprop": lambda params: torch.optim.RMSprop(params, 0.1, momentum=0.5, centered=True),
    "Adafactor of transformers": lambda params: transformers.Adafactor(params),
    **{
        name: getattr(torch.optim, name)
        for name in ("AdamW", "Adafactor", "Adagrad", "NAdam", "RAdam", "Adamax")
    },
    **{name: getattr(torch.optim, name) for name in ("Adadelta", "ASGD", "Rprop")},
}


def after_steps(make: Make, shapes: Sequence[Shape], count: int = 1) -> torch.optim.Optimizer:
    """Return an optimizer of parameters with these shapes, after `count` steps."""
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
def test_fits_accepts_exactly_the_parameter_shapes_that_produce_the_state(name: str) -> None:
    optimizer = after_steps(MAKERS[name], SHAPES)
    states = dict(zip(SHAPES, optimizer.state.values()))
    for entries in states.values():
        for entry, value in entries.items():
            if isinstance(value, torch.Tensor):
                expected = [
                    p
                    for p in SHAPES
                    if entry in states[p] and states[p][entry].shape == value.shape
                ]
                assert [p for p in SHAPES if fits(entry, tuple(value.shape), p)] == expected, entry


def saved(
    groups: Sequence[Mapping[str, Any]], state: Mapping[Param, Mapping[str, Any]]
) -> OptimizerState:
    return OptimizerState(ID, tuple(ParamGroup((0,), group) for group in groups), state)


OWN = (
    "SGD",
    "NAdam",
    "Adamax",
    "Adadelta",
    "RMSprop",
    "Adagrad",
    "Adafactor",
    "ASGD",
    "Rprop",
    "LBFGS",
)
# by the options of the groups, and by the names in the state, which several classes share
TITLES = {
    **dict.fromkeys(("Adam", "AdamW"), ("Adam or AdamW", "Adam or AdamW")),
    **{name: (name, "Adam or AdamW") for name in ("RAdam", "SparseAdam")},
    "Muon": ("Muon", "SGD"),
    **{name: (name, name) for name in OWN},
    "Adafactor of transformers": (None, "Adafactor of transformers"),
}


@pytest.mark.parametrize("name", TITLES)
def test_a_class_is_recognised_by_its_groups_or_by_its_state(name: str, tmp_path: Path) -> None:
    if name == "Muon":
        needs_torch("2.9", "Muon")
    by_groups, by_state = TITLES[name]
    (state,) = after_steps(
        MAKERS.get(name) or getattr(torch.optim, name), [(4, 3)], 2
    ).state.values()
    assert class_of(saved([{}], {0: state})) == by_state
    if by_groups is not None:
        optimizer = getattr(torch.optim, name)(models.Matrices().parameters(), lr=0.1)
        torch.save(
            {"optimizer": optimizer.state_dict(), "model": {"weight": torch.ones(1)}},
            tmp_path / "o.pt",
        )
        assert (
            class_of(read(open_checkpoint(str(tmp_path / "o.pt")).section("optimizer")))
            == by_groups
        )


def test_a_parameter_without_steps_does_not_lack_state() -> None:
    groups = [{"lr": 1.0, "betas": (0.9, 0.99), "amsgrad": False}]
    steps: dict[Param, Sequence[str]] = {0: ("step", "exp_avg")}
    assert missing_for_step(saved(groups, {0: {}}), groups, steps) == []
    assert missing_for_step(saved(groups, {0: {"step": 1}}), groups, steps) == ["state.0.exp_avg"]


def test_unknown_options_and_state_have_no_class() -> None:
    assert class_of(saved([{"lr": 1.0}], {})) is None
    assert class_of(saved([{"lr": 1.0}], {0: {"step": 1, "trace": 2.0}})) is None


@pytest.mark.parametrize("name", MAKERS)
def test_state_is_lacking_exactly_if_the_step_fails(name: str) -> None:
    """This holds with and without the state names of the first step of the target."""
    state = after_steps(MAKERS[name], [(4, 3)]).state_dict()
    saved_state = saved(
        [{k: v for k, v in g.items() if k != "params"} for g in state["param_groups"]],
        state["state"],
    )
    for target, make in MAKERS.items():
        other = after_steps(make, [(4, 3)])
        fresh = other.state_dict()
        groups = [
            {key: value for key, value in group.items() if key != "params"}
            for group in fresh["param_groups"]
        ]
        try:
            other.load_state_dict(deepcopy(state))
            step(other)
            fails = False
        except (KeyError, RuntimeError, TypeError, AttributeError):
            fails = True
        known_state_names: list[Mapping[Param, Sequence[str]]] = [{0: tuple(fresh["state"][0])}, {}]
        for steps in known_state_names:
            assert bool(missing_for_step(saved_state, groups, steps)) == fails, (
                target,
                missing_for_step(saved_state, groups, steps),
            )
