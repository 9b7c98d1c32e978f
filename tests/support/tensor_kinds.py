"""One tensor of each kind that torch can save, and models and optimizers that hold it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor


class Subclass(torch.Tensor):
    """A subclass of a user that changes nothing."""


def dense() -> torch.Tensor:
    return torch.arange(6.0).reshape(2, 3)


def parts() -> list[torch.Tensor]:
    return [torch.ones(2, 3), torch.full((4, 3), 2.0)]


def quantized(dtype: torch.dtype) -> torch.Tensor:
    return torch.quantize_per_tensor(dense(), 0.1, 0, dtype)


KINDS: dict[str, Callable[[], torch.Tensor]] = {
    "dense": dense,
    "scalar": lambda: torch.tensor(3.0),
    "empty": lambda: torch.empty(0, 3),
    "bool": lambda: dense() > 2,
    "uint16": lambda: torch.ones(2, 3, dtype=torch.uint16),
    "float8": lambda: dense().to(torch.float8_e4m3fn),
    "bits": lambda: torch.ones(2, 3, dtype=torch.uint8).view(torch.bits8),
    "expanded": lambda: torch.ones(1, 3).expand(2, 3),
    "conj": lambda: (dense() * 1j).conj(),
    "neg": lambda: torch._neg_view(dense()),
    "meta": lambda: torch.empty(2, 3, device="meta"),
    "coo": lambda: dense().to_sparse(),
    "csr": lambda: dense().to_sparse_csr(),
    "csc": lambda: dense().to_sparse_csc(),
    "bsr": lambda: torch.arange(16.0).reshape(4, 4).to_sparse_bsr((2, 2)),
    "jagged": lambda: torch.nested.nested_tensor(parts(), layout=torch.jagged),
    "nested": lambda: torch.nested.nested_tensor(parts()),
    "qint8": lambda: quantized(torch.qint8),
    "quint8": lambda: quantized(torch.quint8),
    "channels": lambda: torch.quantize_per_channel(
        dense(), torch.ones(2), torch.zeros(2, dtype=torch.int64), 0, torch.qint8
    ),
    "subclass": lambda: dense().as_subclass(Subclass),
    "wrapper": lambda: TwoTensor(dense(), dense() + 1),
}


def with_buffer(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    model.register_buffer("extra", KINDS[kind]())
    return model


def with_parameter(kind: str) -> nn.Module:
    """Raise what torch raises if a parameter cannot be of this kind."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    model.extra = nn.Parameter(KINDS[kind](), requires_grad=False)
    return model


class WithState(torch.optim.SGD):
    """An optimizer with a tensor of this kind in the state of each parameter."""

    def __init__(self, params: Any, kind: str) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)
        self.kind = kind

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].setdefault("extra", KINDS[self.kind]())
        return result


def optimizer_with_state(kind: str) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return partial(_optimizer, kind=kind)


def _optimizer(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    return WithState(model.parameters(), kind)
