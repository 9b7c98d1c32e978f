"""The traced names against torch itself: every pattern of the zoo is built for real, saved and loaded."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ckpttool import expression as ex
from ckpttool.compute import evaluate
from ckpttool.naming.load_model import LoadedModel
from ckpttool.naming.names import Names
from ckpttool.naming.trace import trace
from hook_zoo import ZOO

torch.set_num_threads(1)


def zoo_model(name: str, materialize: bool = False) -> LoadedModel:
    def make(real: bool) -> nn.Module:
        with torch.device("cpu" if real else "meta"):
            return ZOO[name]()

    return LoadedModel(name, make, materialize)


_traced: dict[str, Names] = {}


def traced(name: str) -> Names:
    if name not in _traced:
        _traced[name] = trace(zoo_model(name))
    return _traced[name]


def randomized(model: nn.Module, seed: int) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            if not nn.parameter.is_lazy(tensor) and tensor.is_floating_point() and 0 not in tensor.stride():
                tensor.copy_(torch.randn(tensor.shape, generator=generator).to(tensor.dtype))
    return model


def runtime_values(model: nn.Module) -> dict[str, torch.Tensor]:
    named = [*nn.Module.named_parameters(model, remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {n: t if nn.parameter.is_lazy(t) else t.detach().clone() for n, t in named}


def assert_same(found: torch.Tensor, wanted: torch.Tensor, where: str) -> None:
    assert found.dtype == wanted.dtype, where
    assert found.shape == wanted.shape, where
    if wanted.layout != torch.strided:
        found, wanted = found.to_dense(), wanted.to_dense()
    assert torch.equal(found.resolve_conj(), wanted.resolve_conj()), where


@pytest.mark.parametrize("name", sorted(ZOO))
def test_saved_values(name: str) -> None:
    names, model = traced(name), randomized(zoo_model(name).build(True), 1)
    runtime = runtime_values(model)
    state = model.state_dict()
    tensors = {k: v for k, v in state.items() if isinstance(v, torch.Tensor) and not k.endswith("_extra_state")}
    assert [s.key for s in names.serialized] == list(tensors)
    assert set(names.extra_state) == set(state) - set(tensors)
    for s in names.serialized:
        value = tensors[s.key]
        if nn.parameter.is_lazy(value):
            assert s.source == ex.Ref(s.key)
            continue
        assert s.dtype == str(value.dtype).removeprefix("torch.")
        assert s.shape == tuple(value.shape)
        if s.source is not None and not ex.is_opaque(s.source):
            assert_same(evaluate(s.source, runtime.__getitem__), value, s.key)


@pytest.mark.parametrize("name", sorted(ZOO))
def test_loaded_values(name: str) -> None:
    names, model = traced(name), randomized(zoo_model(name).build(True), 2)
    state = randomized(zoo_model(name).build(True), 3).state_dict()
    if any(isinstance(v, torch.Tensor) and nn.parameter.is_lazy(v) for v in state.values()):
        pytest.skip("nothing to load")
    before = runtime_values(model)
    copies = type(state)((k, v.clone() if isinstance(v, torch.Tensor) else v) for k, v in state.items())
    if hasattr(state, "_metadata"):
        copies._metadata = state._metadata
    try:
        model.load_state_dict(copies, strict=True)
    except (RuntimeError, KeyError):
        assert not names.roundtrips
    after = runtime_values(model)
    assert [r.fqn for r in names.load] == list(after)
    for r in names.load:
        if r.source is None:
            assert_same(after[r.fqn], before[r.fqn], r.fqn)
        elif not ex.is_opaque(r.source):
            assert_same(evaluate(r.source, state.__getitem__), after[r.fqn], r.fqn)


@pytest.mark.parametrize("name", sorted(ZOO))
def test_roundtrips_tells_whether_a_saved_model_comes_back(name: str) -> None:
    names, source = traced(name), randomized(zoo_model(name).build(True), 4)
    wanted = runtime_values(source)
    state, target = source.state_dict(), randomized(zoo_model(name).build(True), 5)
    try:
        target.load_state_dict(state, strict=True)
        loaded = True
    except (RuntimeError, KeyError):
        loaded = False
    skipped = set(names.not_serialized)
    found = runtime_values(target)
    same = loaded and all(
        nn.parameter.is_lazy(found[k]) or torch.equal(found[k], v) for k, v in wanted.items() if k not in skipped
    )
    assert names.roundtrips == same, names.roundtrip_problems
    assert names.roundtrips == (not names.roundtrip_problems)
