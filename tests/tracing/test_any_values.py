"""What a trace says of code that computes outside of torch holds for any values: checked with others than it saw."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn

from ckpttool.evaluate.interpret import evaluate
from ckpttool.expression import Expression, Ref, is_opaque, refs
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


@pytest.mark.parametrize("flag", [False, True])
def test_a_truth_is_tried_both_ways(flag: bool) -> None:
    class Flagged(nn.Linear):
        """Saved twice as large where its flag says so."""

        def __init__(self) -> None:
            super().__init__(2, 2)
            self.register_buffer("flag", torch.tensor(flag))

        def _save_to_state_dict(self, state: dict[str, torch.Tensor], prefix: str, keep_vars: bool) -> None:
            super()._save_to_state_dict(state, prefix, keep_vars)
            if self.flag.item():
                state[f"{prefix}weight"] = state[f"{prefix}weight"].detach() * 2

    sources = {key.key: key.source for key in trace(of_object(Flagged)).serialized}
    assert sources["weight"] is not None
    assert is_opaque(sources["weight"])
    assert "weight" in refs(sources["weight"])
    assert sources["bias"] == Ref("bias")


def test_versions_are_loaded_as_they_were_saved() -> None:
    class Versioned(nn.Linear):
        """What older versions saved is transposed when it is loaded."""

        _version = 2

        def __init__(self) -> None:
            super().__init__(2, 2)

        def _load_from_state_dict(self, state: dict, prefix: str, metadata: dict, *more: Any) -> None:
            if metadata.get("version", 1) < 2:
                state[f"{prefix}weight"] = state[f"{prefix}weight"].t()
            super()._load_from_state_dict(state, prefix, metadata, *more)

    names = trace(of_object(Versioned))
    assert names.roundtrips
    assert {one.fqn: one.source for one in names.load} == {"weight": Ref("weight"), "bias": Ref("bias")}
