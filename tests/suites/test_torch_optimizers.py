"""Every optimizer and configuration of torch's own test suite (`optim_db`): its state is reordered
and restored.

The oracle is the optimizer itself: after loading, two steps give the same parameters as an
uninterrupted run. `CKPTTOOL_SUITES=all` tests every configuration, otherwise the first of each
optimizer.
"""

from __future__ import annotations

import os
import warnings
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import ckpttool

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    common_optimizers = pytest.importorskip("torch.testing._internal.common_optimizers")

pytestmark = pytest.mark.filterwarnings("ignore")
ALL = os.environ.get("CKPTTOOL_SUITES") == "all"
CONFIGURATIONS = [
    pytest.param(info, one, id=f"{info.optim_cls.__name__}-{number}-{one.desc}".replace(" ", "_"))
    for info in common_optimizers.optim_db
    for number, one in enumerate(info.optim_inputs_func(device="cpu")[: None if ALL else 1])
]
ORDERS: tuple[Sequence[str], ...] = ("abc", "cab")
SHAPES = {"a": (3, 2), "b": (4, 3), "c": (2, 5)}  # two dimensions, as Muon requires


class Net(nn.Module):
    def __init__(self, order: Sequence[str]) -> None:
        super().__init__()
        for name in order:
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            self.register_parameter(
                name, nn.Parameter(torch.randn(SHAPES[name], generator=generator))
            )


def first() -> Net:
    return Net(ORDERS[0])


def second() -> Net:
    return Net(ORDERS[1])


def steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, first: int, count: int, sparse: bool
) -> None:
    for number in range(first, first + count):

        def closure(number: int = number) -> float:
            for name, parameter in model.named_parameters():
                generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {number}".encode()))
                grad = torch.randn(parameter.shape, generator=generator)
                parameter.grad = grad.to_sparse() if sparse else grad
            return 1.0

        closure()
        optimizer.step(closure)


def state_of(form: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    if form == "id":
        return optimizer.state_dict()
    options = StateDictOptions(flatten_optimizer_state_dict=form == "flat")
    return get_optimizer_state_dict(model, optimizer, options=options)


def resume(form: str, model: nn.Module, optimizer: torch.optim.Optimizer, path: str) -> None:
    run = torch.load(path, weights_only=False)
    model.load_state_dict(run["model"])
    if form == "id":
        optimizer.load_state_dict(run["optimizer"])
    else:
        options = StateDictOptions(flatten_optimizer_state_dict=form == "flat")
        set_optimizer_state_dict(model, optimizer, run["optimizer"], options=options)


@pytest.mark.parametrize("form", ["id", "fqn", "flat"])
@pytest.mark.parametrize(("info", "configuration"), CONFIGURATIONS)
def test_state_is_reordered_with_its_parameters(
    info: Any, configuration: Any, form: str, tmp_path: Path
) -> None:
    sparse = info.only_supports_sparse_grads

    def make(model: nn.Module) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = info.optim_cls(
            model.parameters(), **configuration.kwargs
        )
        return optimizer

    model = first()
    optimizer = make(model)
    steps(model, optimizer, 0, 2, sparse)
    try:
        saved = state_of(form, model, optimizer)
    except Exception as error:
        pytest.skip(f"torch cannot name or flatten the state: {error}")
    paths = [str(tmp_path / f"{word}.pt") for word in ("saved", "moved", "back")]
    torch.save({"model": model.state_dict(), "optimizer": saved}, paths[0])
    try:  # can torch resume from its own file?
        again = first()
        resumed = make(again)
        resume(form, again, resumed, paths[0])
        steps(again, resumed, 2, 2, sparse)
        steps(model, optimizer, 2, 2, sparse)
    except Exception as error:
        pytest.skip(f"torch does not resume from its own file: {error}")
    if not all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters())):
        pytest.skip("torch itself does not resume exactly")

    orders = (first, second), (second, first)
    for (old, new), source, out in zip(orders, paths, paths[1:]):
        models: dict[str, Any] = {
            "model": old,
            "optimizer": make,
            "to_model": new,
            "to_optimizer": make,
        }
        if info.optim_cls is torch.optim.LBFGS:  # its state belongs to all parameters together
            with pytest.raises(ckpttool.Refused):
                ckpttool.remap(source, out, **models, optimizer_keys=form)
            return
        ckpttool.remap(source, out, **models, optimizer_keys=form)
        loaded = new()
        moved = make(loaded)
        resume(form, loaded, moved, out)
        steps(loaded, moved, 2, 2, sparse)
        expected = dict(model.named_parameters())
        assert all(
            torch.equal(parameter, expected[name]) for name, parameter in loaded.named_parameters()
        )
    live = second()
    into = make(live)
    ckpttool.load(paths[1], live, into)
    steps(live, into, 2, 2, sparse)
    assert all(
        torch.equal(parameter, expected[name]) for name, parameter in live.named_parameters()
    )
