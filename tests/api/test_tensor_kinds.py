"""Each kind of tensor, in models and in optimizers: torch's own verdict, and no error but
`CkptError`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpttool
from tensor_kinds import KINDS, optimizer_with_state, with_buffer, with_parameter

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
HOLDERS = {"buffer": with_buffer, "parameter": with_parameter}


def shown(state: Any) -> str:
    """Return the values of the tensors as text; each jagged tensor has a symbol of its own for its
    lengths.
    """
    values = {
        key: value.view(torch.uint8) if value.dtype == torch.bits8 else value
        for key, value in state.items()
    }
    return re.sub(
        r"\bj\d+\b", "j", repr([(key, type(value), value) for key, value in values.items()])
    )


def answer(call: Callable[[], Any]) -> Any:
    """Return what a public call returns, or its `CkptError`; anything else fails the test."""
    try:
        return call()
    except ckpttool.CkptError as error:
        return error


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("kind", KINDS)
def test_model(kind: str, holder: str, tmp_path: Path) -> None:
    try:
        saved = HOLDERS[holder](kind)
        torch.save(saved.state_dict(), tmp_path / "in.pt")
    except Exception:
        pytest.skip("torch has no such model, or cannot save it")
    model, expected = HOLDERS[holder](kind), HOLDERS[holder](kind)
    try:
        expected.load_state_dict(torch.load(tmp_path / "in.pt", weights_only=False))
        loads = True
    except Exception:
        loads = False

    operands: list[Any] = [model, partial(HOLDERS[holder], kind)]
    for operand in operands:
        diff = answer(partial(ckpttool.diff, tmp_path / "in.pt", model=operand))
        if isinstance(diff, ckpttool.CkptError):
            assert operand is not model, diff  # a constructor may fail on the meta device
        else:
            assert diff.identical == loads
    with torch.no_grad():
        model.weight.zero_()
    loaded = answer(lambda: ckpttool.load(tmp_path / "in.pt", model))
    if isinstance(loaded, ckpttool.CkptError):
        assert not loads or kind == "meta"  # which has no values to load
        assert not model.weight.any()
    else:
        assert loads
        assert shown(model.state_dict()) == shown(expected.state_dict())
    for call in (
        lambda: ckpttool.trace(model),
        lambda: ckpttool.check(str(tmp_path / "in.pt")),
        lambda: ckpttool.inspect(tmp_path / "in.pt", stats=True),
        lambda: ckpttool.diff(tmp_path / "in.pt", saved.state_dict(), values=True),
        lambda: ckpttool.remap(tmp_path / "in.pt", str(tmp_path / "a.pt"), rule="weight => w"),
        lambda: ckpttool.remap(
            tmp_path / "in.pt", str(tmp_path / "b.pt"), model=model, to="runtime"
        ),
        lambda: ckpttool.convert(tmp_path / "in.pt", str(tmp_path / "a.safetensors")),
        lambda: ckpttool.convert(tmp_path / "in.pt", str(tmp_path / "a.dcp")),
        lambda: ckpttool.swap_weights(model, saved.state_dict()),
    ):
        answer(call)


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("kind", KINDS)
def test_optimizer(kind: str, tmp_path: Path) -> None:
    make = optimizer_with_state(kind)
    saved = linear()
    optimizer = make(saved)
    step(saved, optimizer)
    torch.save({"model": saved.state_dict(), "optim": optimizer.state_dict()}, tmp_path / "in.pt")
    expected = make(linear())
    try:
        expected.load_state_dict(torch.load(tmp_path / "in.pt", weights_only=False)["optim"])
        loads = True
    except Exception:
        loads = False

    diff = answer(lambda: ckpttool.diff(tmp_path / "in.pt", model=linear, optimizer=make))
    assert diff.identical == loads
    model = linear()
    fresh = make(model)
    loaded = answer(lambda: ckpttool.load(tmp_path / "in.pt", model, fresh, cast=True))
    if isinstance(loaded, ckpttool.CkptError):
        assert not loads, loaded
        assert not fresh.state
    else:
        assert loads
        for one, other in zip(
            fresh.state_dict()["state"].values(), expected.state_dict()["state"].values()
        ):
            assert shown(one) == shown(other)
        step(model, fresh)
    for call in (
        lambda: ckpttool.load(tmp_path / "in.pt", saved, optimizer),
        lambda: ckpttool.diff(tmp_path / "in.pt", tmp_path / "in.pt", values=True, whole=True),
        lambda: ckpttool.remap(
            tmp_path / "in.pt", str(tmp_path / "a.pt"), model=linear, optimizer_keys="fqn"
        ),
        lambda: ckpttool.convert(tmp_path / "in.pt", str(tmp_path / "a.dcp")),
        lambda: ckpttool.inspect(tmp_path / "in.pt", stats=True),
    ):
        answer(call)
