"""Helpers for the optimizer tests: train for some steps, save checkpoints, and remap them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ckpttool
from ckpttool import Names

Make = Callable[[nn.Module], torch.optim.Optimizer]


def names_of(model: str, optimizer: str | None = None) -> Names:
    """Trace the names of a model in `optimizer_models`, with its optimizer's ids if one is
    given.
    """
    made = None if optimizer is None else f"optimizer_models:{optimizer}"
    return ckpttool.trace(f"optimizer_models:{model}", optimizer=made)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, count: int) -> None:
    """Take steps `first` to `first + count` of the same training run."""
    width = next(m for m in model.modules() if isinstance(m, nn.Linear)).in_features
    embed: Any = getattr(model, "embed", None)
    width = width if embed is None else embed.in_features
    for number in range(first, first + count):
        x = torch.randn(8, width, generator=torch.Generator().manual_seed(number))

        def closure(x: torch.Tensor = x) -> Any:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)


def train(
    model: type[nn.Module], make: Make, count: int = 3
) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    made = model()
    optimizer = make(made)
    steps(made, optimizer, 0, count)
    return made, optimizer


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}, path)
    return str(path)


def remapped(
    path: str,
    out: Path,
    keys: str | None = None,
    names: Names | None = None,
    to_names: Names | None = None,
    **options: Any,
) -> tuple[dict[str, Any], Any]:
    """Remap the file; return it as loaded by torch, and the report on its optimizer."""
    done = ckpttool.remap(
        path,
        str(out),
        optimizer_keys=keys,
        model=names,
        to_model=to_names,
        force=True,
        no_fsync=True,
        **options,
    )
    return torch.load(out, weights_only=True), done.optimizers[0]


def same(left: Any, right: Any) -> bool:
    """Return whether two parts of a state dict are equal, tensors bit for bit."""
    if isinstance(left, torch.Tensor) or isinstance(right, torch.Tensor):
        return type(left) is type(right) and left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def equal_weights(left: nn.Module, right: nn.Module) -> bool:
    left_parameters, right_parameters = (
        dict(left.named_parameters()),
        dict(right.named_parameters()),
    )
    return left_parameters.keys() == right_parameters.keys() and all(
        torch.equal(left_parameters[name], right_parameters[name]) for name in left_parameters
    )
