"""A trace knows the value with which a hook fills part of a tensor, for each function of torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from ckpttool.core.expression import is_opaque
from ckpttool.evaluate.torch_eval import evaluate
from ckpttool.tracing.build_model import of_object
from ckpttool.tracing.trace import trace
from zoo import runtime_values

FILLS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "zeros": lambda x: torch.zeros(x.shape),
    "zeros_like": torch.zeros_like,
    "new_zeros": lambda x: x.new_zeros(4, dtype=torch.int8),
    "zero_": lambda x: x.clone().zero_(),
    "ones": lambda x: torch.ones(3, dtype=torch.float64),
    "ones_like": lambda x: torch.ones_like(x, dtype=torch.int64),
    "new_ones": lambda x: x.new_ones(2, 2),
    "full": lambda x: torch.full((2,), -7),
    "full_like": lambda x: torch.full_like(x, 2.5),
    "new_full": lambda x: x.new_full((3,), fill_value=-0.0),
    "fill_": lambda x: x.clone().fill_(3),
    "fill_ with a tensor": lambda x: x.clone().fill_(torch.tensor(4)),
    "eye": lambda x: torch.eye(3),
    "arange": lambda x: torch.arange(2, 9, 2) + x.numel(),
}


@pytest.mark.parametrize("name", FILLS)
def test_fill_values_are_traced(name: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.tensor([1.5, -2.0]))
            self.register_state_dict_post_hook(save)

    def save(module: nn.Module, state: dict[str, torch.Tensor], prefix: str, metadata: object) -> None:
        weight = state[f"{prefix}weight"].detach()
        state[f"{prefix}filled"] = torch.cat([weight.double(), FILLS[name](weight).reshape(-1)])

    names, model = trace(of_object(Model)), Model()
    source = next(key.source for key in names.serialized if key.key == "filled")
    assert source is not None
    assert not is_opaque(source)
    actual, expected = evaluate(source, runtime_values(model).__getitem__), model.state_dict()["filled"]
    assert actual.dtype == expected.dtype
    assert torch.equal(actual, expected)
    assert torch.equal(actual.signbit(), expected.signbit())
