"""The verdict on a saved optimizer state, against a real load and a real step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpttool
from ckpttool.tracing import instances
from ckpttool.tracing.build_model import of_object
from ckpttool.tracing.build_optimizer import (
    OptimizerVerdict,
    load_optimizer,
    optimizer_verdict,
    with_optimizer,
)
from ckpttool.tracing.trace import trace


class RaisesWithoutMessage(torch.optim.SGD):
    def load_state_dict(self, state_dict: Any) -> None:
        raise AssertionError


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def raises_without_message(model: nn.Module) -> torch.optim.Optimizer:
    return RaisesWithoutMessage(model.parameters(), 0.1, momentum=0.9)


def build() -> nn.Module:
    return nn.Linear(2, 3)


def saved() -> dict[str, Any]:
    model = build()
    optimizer = sgd(model)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    return copy.deepcopy(optimizer.state_dict())


def with_state(**extra: Any) -> dict[str, Any]:
    """Return a saved state with extra entries for the first parameter; `loose` is next to the
    states.
    """
    state = saved()
    state["state"][0].update({name: value for name, value in extra.items() if name != "loose"})
    state["state"].update({name: value for name, value in extra.items() if name == "loose"})
    return state


def verdict(
    state: dict[str, Any], make: Callable[..., Any], path: Path, real: bool = False
) -> OptimizerVerdict | None:
    torch.save({"model": build().state_dict(), "optimizer": state}, path)
    section = ckpttool.open_checkpoint(str(path)).section("optimizer")
    return optimizer_verdict(
        replace(of_object(build), materialize=real), load_optimizer(make), section
    )


STATES: dict[str, dict[str, Any]] = {
    "unchanged": saved(),
    "a number next to the states": with_state(loose=3),
    "a dict next to the states": with_state(loose={"a": torch.ones(2)}),
    "an object": with_state(kind=torch.float16),
    "another shape": with_state(momentum_buffer=torch.ones(4, 4)),
    "no momentum": with_state(momentum_buffer=None),
}


@pytest.mark.parametrize("name", STATES)
def test_the_verdict_matches_torch(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the same for a model that is too large for real tensors, unless they are requested."""
    state, path = STATES[name], tmp_path / "a.pt"
    model = build()
    optimizer = sgd(model)
    try:
        optimizer.load_state_dict(copy.deepcopy(state))
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        torch_works = True
    except RuntimeError:
        torch_works = False
    results = [verdict(state, sgd, path)]
    monkeypatch.setattr(instances, "_CHEAP", 0)
    results.append(verdict(state, sgd, path))
    assert verdict(state, sgd, path, real=True) is None
    for result in results:
        assert result is not None
        assert (result.error is None, result.stepped) == (torch_works, True)
        assert result.landed == {"weight": 0, "bias": 1}


def test_an_error_without_a_message_is_reported_by_class(tmp_path: Path) -> None:
    result = verdict(saved(), raises_without_message, tmp_path / "a.pt")
    assert result == OptimizerVerdict({}, "AssertionError", False)


@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW", "Adagrad"])
def test_no_fused_kernel_gets_state_of_another_shape(kind: str, tmp_path: Path) -> None:
    """It would read or write past the end of the tensors. Larger state is harmless in the test."""

    def fused(model: nn.Module) -> torch.optim.Optimizer:
        options = {"momentum": 0.9} if kind == "SGD" else {}
        made: torch.optim.Optimizer = getattr(torch.optim, kind)(
            model.parameters(), lr=0.1, fused=True, **options
        )
        return made

    def state_of(model: nn.Module) -> dict[str, Any]:
        optimizer = fused(model)
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        return optimizer.state_dict()

    result = verdict(state_of(nn.Linear(2, 30)), fused, tmp_path / "a.pt")
    assert result is not None
    assert result.error is not None
    assert result.error.startswith("The size of tensor a")
    result = verdict(state_of(build()), fused, tmp_path / "b.pt")
    assert result is not None
    assert (result.error, result.stepped) == (None, True)
    names = with_optimizer(trace(of_object(build)), of_object(build), load_optimizer(fused))
    assert names.optimizer_groups[0]["fused"] is True
