"""The truth of a round trip, where symbols do not tell: real instances are saved, and loaded into others."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ckpttool.evaluate.with_torch import same_bits
from ckpttool.tracing.load_model import LoadedModel, describe
from ckpttool.tracing.recorder.identity import inside
from ckpttool.tracing.runtime import attempted, failure_of_loading, listed
from ckpttool.tracing.saving import CONSTANT, Filling, filled
from ckpttool.values import dataclass

# Of the instance that is saved and of the one that loads; what depends on signs shows in one element too.
_SEEDS: tuple[tuple[Filling, Filling], ...] = ((11, 12), (-11, 14))
# Where the keys depend on values: one value everywhere, and the constructor's, into and out of random ones.
_EVERY = (*_SEEDS, *((one, 12) for one in (*CONSTANT, "own")), *((11, one) for one in CONSTANT))


@dataclass(frozen=True, slots=True)
class Tried:
    """`failed`: what saving or strict loading raises, if it does. `differing`: the FQNs that did not come back."""

    failed: str | None = None
    differing: frozenset[str] = frozenset()


def tried(model: LoadedModel, *, varying: bool = False) -> Tried:
    """Save an instance with random values and load it into one with others. Raises `CannotBuild`.

    `varying`: which keys are saved depends on the values, so more of them are tried.
    """
    differing: set[str] = set()
    for seed, other in _EVERY if varying else _SEEDS:
        source, target = filled(model, seed), filled(model, other)
        _count_on(target)
        wanted = values_of(source)
        failed = _given(source, target)
        if failed is not None:
            return Tried(describe(failed))
        found = values_of(target)
        differing |= {fqn for fqn, value in wanted.items() if fqn not in found or not same(value, found[fqn])}
    return Tried(None, frozenset(differing))


def brought_back(model: LoadedModel, fqns: Iterable[str]) -> frozenset[str]:
    """Those of the tensors whose random values loading gives to an instance that had others. Raises `CannotBuild`."""
    source, target = (filled(model, seed) for seed in _SEEDS[0])
    wanted, before = values_of(source), values_of(target)
    if _given(source, target) is not None:
        return frozenset()
    found = values_of(target)
    known = (fqn for fqn in fqns if fqn in wanted and fqn in found and not same(wanted[fqn], before[fqn]))
    return frozenset(fqn for fqn in known if same(wanted[fqn], found[fqn]))


def _given(source: nn.Module, target: nn.Module) -> Exception | None:
    """Loads what `source` saves into `target`; what saving or strict loading raises, if it does."""
    state = attempted(lambda: _through_a_file(source.state_dict()))
    return state if isinstance(state, Exception) else failure_of_loading(target, state)


def values_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """A copy of every runtime tensor that has values."""
    lazy = torch.nn.parameter.is_lazy
    return {item.fqn: item.tensor.detach().clone() for item in listed(model) if not lazy(item.tensor)}


def _count_on(model: nn.Module) -> None:
    """Changes the integers, so that those that are not loaded are seen."""
    for item in listed(model):
        tensor = item.tensor
        counts = type(tensor) is torch.Tensor and tensor.layout == torch.strided and not tensor.is_quantized
        if counts and tensor.dtype in (torch.int64, torch.int32) and 0 not in tensor.stride():
            tensor += 1


def _through_a_file(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """The state dict as `torch.save` and `torch.load` give it; copied where a file cannot hold it as it is."""
    file = io.BytesIO()
    try:
        torch.save(state, file)
    except RuntimeError:  # views of one tensor in several dtypes
        made = type(state)((k, v.clone() if isinstance(v, torch.Tensor) else v) for k, v in state.items())  # type: ignore[call-arg]
        if hasattr(state, "_metadata"):
            made._metadata = state._metadata  # type: ignore[attr-defined]
        return made
    file.seek(0)
    loaded: Mapping[str, Any] = torch.load(file, weights_only=False)  # what this process has just written
    return loaded


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are of one class, dtype and shape, and have the same bits."""
    if (type(one), one.dtype, one.shape, one.layout) != (type(other), other.dtype, other.shape, other.layout):
        return False
    parts = inside(one), inside(other)
    if parts[0]:
        return len(parts[0]) == len(parts[1]) and all(map(same, *parts))
    if one.is_quantized:
        return torch.equal(one, other)
    return same_bits(one, other)
