"""Swap weights that only the model's loading code can compute; ``load_state_dict`` is the
oracle.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import ckpttool
from ckpttool import Refused, swap_weights
from opaque_zoo import ZOO, noisy
from zoo import randomized, runtime_values


def loaded(build: Any, state: dict[str, Any]) -> dict[str, torch.Tensor]:
    model = build()
    model.load_state_dict(state)
    return runtime_values(model)


def assert_equal(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("name", ZOO)
def test_a_module_gets_the_values_that_its_loading_computes(name: str, in_place: bool) -> None:
    state = randomized(ZOO[name](), 77).state_dict()
    module = ZOO[name]()
    objects = {fqn: id(tensor) for fqn, tensor in module.named_parameters()}
    result = swap_weights(module, state, model=module, in_place=in_place)
    assert_equal(runtime_values(module), loaded(ZOO[name], state))
    assert set(result.by_code) <= set(runtime_values(module))
    same = {fqn: id(tensor) for fqn, tensor in module.named_parameters()} == objects
    assert same or not in_place


class Layer(nn.Module):
    """A module for export, with a layer that loads through numpy."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = ZOO["quantized"]().layers[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.inner.weight.t() + self.inner.bias


def test_a_program_gets_the_values_that_the_models_loading_computes() -> None:
    program = torch.export.export(Layer(), (torch.ones(4, 4),))
    new = Layer()
    result = swap_weights(program, new.state_dict(), model=Layer)
    expected = Layer()
    expected.load_state_dict(new.state_dict())
    assert torch.equal(program.module()(torch.eye(4)), expected(torch.eye(4)))
    assert result.by_code == ("inner.weight",)


def test_random_loading_is_refused_without_changes() -> None:
    module = noisy()
    before = {fqn: value.clone() for fqn, value in runtime_values(module).items()}
    with pytest.raises(Refused, match="same twice"):
        swap_weights(module, noisy().state_dict(), model=noisy)
    assert_equal(runtime_values(module), before)


class DoublesAtLoad(nn.Module):
    """Has a non-persistent buffer that loading computes."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("doubled", (self.w * 2).detach(), persistent=False)
        self.register_load_state_dict_post_hook(self._double)

    @staticmethod
    def _double(module: DoublesAtLoad, _: object) -> None:
        with torch.no_grad():
            module.doubled.copy_(module.w * 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.doubled


def test_a_buffer_that_loading_computes_is_updated() -> None:
    module, new = DoublesAtLoad(), DoublesAtLoad()
    result = swap_weights(module, new.state_dict(), model=module)
    assert_equal(runtime_values(module), runtime_values(new))
    assert result.constants == ()
    program = torch.export.export(DoublesAtLoad(), (torch.ones(4, 4),))
    with pytest.raises(Refused) as refused:
        swap_weights(program, new.state_dict(), model=DoublesAtLoad)
    assert [problem.key for problem in refused.value.problems] == ["doubled"]
    assert "constants=True" in refused.value.hint


def test_names_without_code_are_refused() -> None:

    module = ZOO["quantized"]()
    with pytest.raises(Refused) as refused:
        swap_weights(module, module.state_dict(), model=ckpttool.trace(ZOO["quantized"]))
    assert "model=module" in refused.value.hint
    result = swap_weights(module, module.state_dict(), model=module)
    assert result.by_code
