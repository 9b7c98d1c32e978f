"""Programs unflattened by torch, whose submodules have specialized calls: ``foo``, ``foo@1``."""

from __future__ import annotations

from functools import cache

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.export.unflatten import UnflattenedModule

from torch_version import needs_torch


class Gate(nn.Module):
    """It has a graph for each value of `double`, and every kind of state: parameters, persistent
    and other buffers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)
        self.register_buffer("shift", torch.arange(4.0))
        self.register_buffer("scale", torch.full((4,), 0.5), persistent=False)

    def forward(self, x: torch.Tensor, double: bool = False) -> torch.Tensor:
        y = self.proj(x) * self.scale + self.shift
        return y * 2 if double else y


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate()

    def forward(self, x: torch.Tensor, double: bool = False) -> torch.Tensor:
        y = self.gate(x, double=double) + 1
        return torch.relu(y) if double else self.gate(y, double=True)


class Twice(nn.Module):
    """A submodule with two kinds of calls."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate()
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.gate(x) + self.gate(x, double=True))


class Nested(nn.Module):
    """Both levels of a path have variants."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x) - self.block(x, double=True)


class Shared(nn.Module):
    """One submodule at two paths, with two kinds of calls at each."""

    def __init__(self) -> None:
        super().__init__()
        self.one = Gate()
        self.two = self.one

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(x) + self.one(x, double=True) - self.two(x * 3) * self.two(x, double=True)


def example() -> torch.Tensor:
    return torch.linspace(-1, 1, 12).reshape(3, 4)


def made(kind: type[nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return kind().eval()


@cache
def exported(kind: type[nn.Module]) -> ExportedProgram:
    """Export `made(kind)`, which takes seconds. Sharing is safe: `unflatten` copies the tensors."""
    needs_torch("2.7", "unflattened programs with a module for each call")
    preserve = ("gate",) if kind is Called else ()
    return torch.export.export(made(kind), (example(),), preserve_module_call_signature=preserve)


def program(kind: type[nn.Module]) -> UnflattenedModule:
    """Return a new unflattened program of `made(kind)`."""
    module = torch.export.unflatten(exported(kind))  # type: ignore[arg-type]
    # torch's result, before any change
    assert torch.equal(module(example()), made(kind)(example()))
    return module


def unflattened(model: nn.Module) -> UnflattenedModule:
    needs_torch("2.7", "unflattened programs with a module for each call")
    module = torch.export.unflatten(torch.export.export(model, (example(),)))
    assert torch.equal(module(example()), model(example()))  # torch's result, before any change
    return module


class Called(nn.Module):
    """A submodule with two kinds of calls but one signature, which torch can preserve with a
    dispatcher.
    """

    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gate(x, double=False) + 1 - self.gate(x + 1, double=True)
