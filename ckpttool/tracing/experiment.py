"""The steps of every experiment on real instances of a model: build, fill with values, save or load, compare."""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from collections.abc import Collection, Mapping
from typing import Any, Literal, Union

import torch
from torch import nn

from ckpttool.evaluate.torch_eval import same_bits
from ckpttool.tracing.build_model import LoadedModel
from ckpttool.tracing.recorder.memory import inside
from ckpttool.tracing.runtime import listed
from ckpttool.tracing.user_code import attempt

_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
Filling = Union[int, Literal["zeros", "ones", "own"]]  # a seed, one value everywhere, or the values of the constructor
FILLINGS = (1, 2)  # seeds of the further runs that tell whether names or expressions depend on values
CONSTANT: tuple[Filling, ...] = ("zeros", "ones")


def filled(model: LoadedModel, filling: Filling, real: bool = True) -> nn.Module:
    """Return a fresh instance with the values of `fill`."""
    instance = model.build(real)
    fill(instance, filling)
    return instance


def fill(model: nn.Module, filling: Filling, only: Collection[str] | None = None) -> None:
    """Give every tensor that has values (or `only` those with these first names) other values, integers as `others`.

    The values of a negative seed are the negatives of the positive seed's.
    """
    if filling == "own":
        return
    seed = 0 if isinstance(filling, str) else filling
    generator = torch.Generator().manual_seed(abs(seed))
    with torch.no_grad():
        for item in listed(model):
            tensor = item.tensor
            if only is not None and item.first not in only:
                continue
            plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout == torch.strided
            if not plain or tensor.is_quantized or tensor.device.type != "cpu" or 0 in tensor.stride():
                continue
            if isinstance(filling, str):
                if tensor.dtype == torch.bool or tensor.is_floating_point() or tensor.is_complex():
                    tensor.fill_(filling == "ones")  # integers may be indices
            elif tensor.is_floating_point() or tensor.is_complex():
                kind = tensor.dtype if tensor.is_complex() else None
                values = torch.randn(tensor.shape, generator=generator, dtype=kind)
                tensor.copy_(-values if seed < 0 else values)
            else:
                # Of two even or two odd seeds, one negative, each truth value is tried both ways.
                opposite = tensor.dtype == torch.bool and (seed % 2 == 0) != (seed < 0)
                tensor.copy_(~others(tensor) if opposite else others(tensor))


def others(integers: torch.Tensor) -> torch.Tensor:
    """Return other integers or truth values of the same shape: the same in another order, since they may be indices.

    If the order changes nothing, the first half gets other values, so that the order matters the next time.
    """
    if integers.dtype in _SIGNED:  # torch can do little with unsigned integers
        return others(integers.view(_SIGNED[integers.dtype])).view(integers.dtype)
    reordered = integers.flip(tuple(range(integers.dim())))
    if not torch.equal(reordered, integers):
        return reordered
    half = (torch.arange(integers.numel()) * 2 <= integers.numel()).reshape(integers.shape)
    return integers ^ half if integers.dtype == torch.bool else (integers + half).to(integers.dtype)


def load_strictly(model: nn.Module, state: Mapping[str, object], **options: bool) -> object:
    """Run ``load_state_dict(state, strict=True)``; without `strict` if the model's own method does not take it."""
    parameters = inspect.signature(model.load_state_dict).parameters.values()
    if any(parameter.name == "strict" or parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return model.load_state_dict(state, strict=True, **options)
    return model.load_state_dict(state, **options)


def failure_of_loading(model: nn.Module, state: Mapping[str, object], **options: bool) -> Exception | None:
    """Return what the model's own strict loading raises, without a recorder; None if it succeeds."""
    result = attempt(lambda: load_strictly(model, state, **options))
    return result if isinstance(result, Exception) else None


def values_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return a copy of every runtime tensor that has values."""
    lazy = torch.nn.parameter.is_lazy
    return {item.fqn: item.tensor.detach().clone() for item in listed(model) if not lazy(item.tensor)}


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have one class, dtype and shape, and the same bits."""
    if (type(one), one.dtype, one.shape, one.layout) != (type(other), other.dtype, other.shape, other.layout):
        return False
    parts = inside(one), inside(other)
    if parts[0]:
        return len(parts[0]) == len(parts[1]) and all(map(same, *parts))
    if one.is_quantized:
        return torch.equal(one, other)
    return same_bits(one, other)


def copied_state(state: Mapping[str, object]) -> OrderedDict[str, Any]:
    """Return the state dict with its tensors in new memory, and with its ``_metadata``."""
    copied: OrderedDict[str, Any] = OrderedDict()
    for key, value in state.items():
        copied[key] = value
        if isinstance(value, torch.Tensor) and not torch.nn.parameter.is_lazy(value):
            plain = type(value) in (torch.Tensor, nn.Parameter) and value.layout == torch.strided
            if value.device.type == "meta" and plain:
                copied[key] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
            else:
                copied[key] = value.detach().clone()
    metadata = metadata_of(state)
    if metadata is not None:
        copied._metadata = copy.deepcopy(metadata)  # type: ignore[attr-defined]
    return copied


def metadata_of(state: Mapping[str, object]) -> Mapping[str, object] | None:
    """Return the ``_metadata`` (module versions) of a state dict."""
    metadata = getattr(state, "_metadata", None)
    return metadata if isinstance(metadata, Mapping) else None
