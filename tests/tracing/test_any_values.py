"""What a trace says of code that computes outside of torch holds for any values: checked with others than it saw."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import nn

from ckpttool.evaluate.interpret import evaluate
from ckpttool.expression import Expression, is_opaque, refs
from ckpttool.tracing.load_model import of_object
from ckpttool.tracing.saving import filled
from ckpttool.tracing.trace import trace
from opaque_zoo import ZOO, blended, noisy
from zoo import runtime_values

torch.set_num_threads(1)


def wrong(sources: Mapping[str, Expression | None], have: Mapping[str, torch.Tensor], want: Mapping) -> list[str]:
    """The names whose expression is no opaque one, and gives another value than `want`."""
    told = {name: source for name, source in sources.items() if source is not None and not is_opaque(source)}
    return [name for name, source in told.items() if not torch.equal(evaluate(source, have.__getitem__), want[name])]


@pytest.mark.parametrize("name", ZOO)
def test_expressions_hold_for_other_values(name: str) -> None:
    model = of_object(ZOO[name])
    names = trace(model)
    source, target = filled(model, 99), model.build(True)
    have = {fqn: tensor.detach().clone() for fqn, tensor in runtime_values(source).items()}
    state = source.state_dict()
    assert not wrong({s.key: s.source for s in names.serialized}, have, state)
    target.load_state_dict(state, strict=True)
    assert not wrong({r.fqn: r.source for r in names.load}, state, runtime_values(target))


@pytest.mark.parametrize(("name", "fqn", "keys"), [
    ("quantized", "layers.0.weight", {"layers.0.weight_q", "layers.0.scale"}),
    ("half_outside", "layers.0.weight", {"layers.0.weight_q", "layers.0.scale"}),
    ("packed_bits", "layers.0.mask", {"layers.0.packed"}),
    ("by_number", "layers.0.weight", {"layers.0.weight", "layers.0.scale"}),
    ("transposed", "fc.weight", {"fc.weight"}),
    ("cached", "cache", {"q", "scale"}),
])  # fmt: skip
def test_what_feeds_a_tensor_is_known(name: str, fqn: str, keys: set[str]) -> None:
    names = trace(of_object(ZOO[name]))
    source = next(loaded.source for loaded in names.load if loaded.fqn == fqn)
    assert is_opaque(source)
    assert set(refs(source)) == keys


@pytest.mark.parametrize("build", [noisy, blended])
def test_a_load_that_differs_each_time_is_opaque(build: Callable[[], nn.Module]) -> None:
    names = trace(of_object(build))
    source = next(loaded.source for loaded in names.load if loaded.fqn == "layers.0.weight")
    assert is_opaque(source)
