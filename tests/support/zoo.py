"""The models of the hook zoo: loaded, traced, with random weights, and their state dicts."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import nn

import ckpttool
from ckpttool import Names
from hook_zoo import ZOO

State = dict[str, Any]


def zoo_model(name: str) -> nn.Module:
    torch.manual_seed(0)
    return ZOO[name]()


@cache
def traced(name: str, materialize: bool = False) -> Names:
    return ckpttool.trace(ZOO[name], materialize=materialize)


def randomized(model: nn.Module, seed: int) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            if (
                not nn.parameter.is_lazy(tensor)
                and tensor.is_floating_point()
                and 0 not in tensor.stride()
            ):
                tensor.copy_(torch.randn(tensor.shape, generator=generator).to(tensor.dtype))
    return model


def runtime_values(model: nn.Module) -> dict[str, torch.Tensor]:
    named = [
        *nn.Module.named_parameters(model, remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    return {n: t if nn.parameter.is_lazy(t) else t.detach().clone() for n, t in named}


def assert_same(found: torch.Tensor, expected: torch.Tensor, where: str) -> None:
    assert found.dtype == expected.dtype, where
    assert found.shape == expected.shape, where
    if expected.layout != torch.strided:
        found, expected = found.to_dense(), expected.to_dense()
    assert torch.equal(found.resolve_conj(), expected.resolve_conj()), where


@cache
def state_of(name: str) -> Any:
    """Return the state dict of a model with random weights, or None if torch.save cannot write
    it.
    """
    state = randomized(zoo_model(name), 1).state_dict()
    flat = all(isinstance(v, torch.Tensor) and not nn.parameter.is_lazy(v) for v in state.values())
    return (
        state
        if flat and name not in ("complex_numbers", "sparse_buffer", "two_tensors_in_one")
        else None
    )


FLAT = sorted(name for name in ZOO if state_of(name) is not None)
