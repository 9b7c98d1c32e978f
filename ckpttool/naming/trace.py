"""From a model definition to its `Names`: runs its saving and loading once on meta, and writes down what happened."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ckpttool.expression import Expression, Op, Ref, refs
from ckpttool.naming.hooks import Watcher, quiet
from ckpttool.naming.load_model import LoadedModel
from ckpttool.naming.names import LoadedTensor, Names, RuntimeTensor, SerializedKey
from ckpttool.naming.record import Questions, Recorder, Token, token
from ckpttool.naming.wrappers import BY_CLASS, strip

__all__ = ["trace", "wrapper_paths"]


@dataclass(frozen=True, slots=True)
class Listed:
    """One line of ``named_parameters`` / ``named_buffers``."""

    fqn: str
    kind: str
    tensor: torch.Tensor
    token: Token
    persistent: bool


@dataclass(frozen=True, slots=True)
class Saved:
    """What one run of ``state_dict()`` showed."""

    runtime: tuple[RuntimeTensor, ...]
    serialized: tuple[SerializedKey, ...]
    extra_state: tuple[str, ...]
    modules: tuple[str, ...] | None
    state: Mapping[str, Any]


def wrapper_paths(module: nn.Module) -> frozenset[str]:
    """The dotted paths whose last segment was put there by a wrapper: a live module of a wrapper's class says so."""
    paths = set()
    for path, child in module.named_modules(remove_duplicate=False):
        for cls in type(child).__mro__:
            row = BY_CLASS.get(f"{cls.__module__}.{cls.__qualname__}")
            if row is not None:
                paths.add(f"{path}.{row.segment}" if path else row.segment)
    return frozenset(paths)


def listed(model: nn.Module) -> tuple[Listed, ...]:
    """Every runtime tensor under every name, in ``named_parameters`` then ``named_buffers`` order."""
    hidden = set()
    for path, module in model.named_modules(remove_duplicate=False):
        for name in getattr(module, "_non_persistent_buffers_set", ()):
            hidden.add(f"{path}.{name}" if path else name)
    found = [
        Listed(fqn, "parameter", tensor, token(tensor), True)
        for fqn, tensor in model.named_parameters(remove_duplicate=False)
    ]
    found += [
        Listed(fqn, "buffer", tensor, token(tensor), fqn not in hidden)
        for fqn, tensor in model.named_buffers(remove_duplicate=False)
    ]
    return tuple(found)


def first_names(runtime: tuple[Listed, ...]) -> dict[Token, str]:
    """Token -> first FQN of the tensors that are one tensor."""
    first: dict[Token, str] = {}
    for item in runtime:
        first.setdefault(item.token, item.fqn)
    return first


@contextlib.contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Runs the model's own code under the recorder; its prints go to stderr, its warnings nowhere."""
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with recorder, Questions(recorder):
            yield


def trace(model: LoadedModel) -> Names:
    """All names of the model's tensors, both ways. Raises `CkptError` where its own code fails."""
    saved = save(model, model.materialize)
    return Names(
        model=model.operand,
        torch=torch.__version__,
        runtime=saved.runtime,
        serialized=saved.serialized,
        load=load(model, saved, model.materialize),
        not_serialized=_not_serialized(saved),
        extra_state=saved.extra_state,
        modules=saved.modules,
    )


def save(model: LoadedModel, real: bool) -> Saved:
    """Runs ``state_dict()`` on a fresh instance and reads every key's expression."""
    instance = model.build(real)
    runtime = listed(instance)
    first = first_names(runtime)
    recorder = Recorder()
    for item in runtime:
        recorder.name(item.tensor, Ref(first[item.token]))
    tensors = _runtime(instance, runtime, first)
    watcher = Watcher(instance, recorder)
    with recording(recorder):
        state = instance.state_dict()
    with quiet():
        keys = tuple(
            _serialized(key, value, recorder, watcher, tensors) for key, value in state.items() if _is_saved(key, value)
        )
    metadata = getattr(state, "_metadata", None)
    return Saved(
        runtime=tensors,
        serialized=keys,
        extra_state=tuple(key for key, value in state.items() if not _is_saved(key, value)),
        modules=None if metadata is None else tuple(metadata),
        state=state,
    )


def load(model: LoadedModel, saved: Saved, real: bool) -> tuple[LoadedTensor, ...]:
    """Loads fresh tensors of the serialized keys into a fresh instance and reads every runtime tensor's expression."""
    instance = model.build(real)
    before = first_names(listed(instance))
    recorder = Recorder()
    state: OrderedDict[str, Any] = OrderedDict()
    for key, value in saved.state.items():
        state[key] = _fresh(value) if isinstance(value, torch.Tensor) else value
        if isinstance(value, torch.Tensor):
            recorder.name(state[key], Ref(key))
    if saved.modules is not None:
        state._metadata = saved.state._metadata  # type: ignore[attr-defined]
    unwritten = Op("unwritten")
    for item in listed(instance):
        recorder.name(item.tensor, unwritten)
    del before
    watcher = Watcher(instance, recorder)
    with recording(recorder):
        instance.load_state_dict(state, strict=False)
    del watcher
    with quiet():
        values = [(item.fqn, recorder.value(item.tensor)) for item in listed(instance)]
    return tuple(LoadedTensor(fqn, _own_name(fqn, value, saved)) for fqn, value in values)


def _own_name(fqn: str, value: Expression, saved: Saved) -> Expression | None:
    """`value`, by the key of the tensor's own name where several keys hold the same tensor (tied weights)."""
    if not any(True for _ in refs(value)):
        return None
    source = {s.key: s.source for s in saved.serialized}
    if isinstance(value, Ref) and fqn in source and source[fqn] is not None and source[fqn] == source.get(value.key):
        return Ref(fqn)
    return value


def _fresh(value: torch.Tensor) -> torch.Tensor:
    if torch.nn.parameter.is_lazy(value):
        return value
    if type(value) in (torch.Tensor, nn.Parameter) and value.layout == torch.strided and not value.is_quantized:
        fresh = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        return fresh if value.device.type == "meta" else fresh.copy_(value)
    return value.detach().clone()


def _runtime(model: nn.Module, runtime: tuple[Listed, ...], first: Mapping[Token, str]) -> tuple[RuntimeTensor, ...]:
    paths = wrapper_paths(model)
    return tuple(
        RuntimeTensor(
            fqn=item.fqn,
            canonical=strip(item.fqn, paths),
            kind=item.kind,
            persistent=item.persistent,
            trainable=item.tensor.requires_grad,
            dtype=_dtype(item.tensor),
            shape=_shape(item.tensor),
            alias_of=None if first[item.token] == item.fqn else first[item.token],
        )
        for item in runtime
    )


def _is_saved(key: str, value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not key.endswith("_extra_state")


def _serialized(
    key: str, value: torch.Tensor, recorder: Recorder, watcher: Watcher, runtime: tuple[RuntimeTensor, ...]
) -> SerializedKey:
    source: Expression | None = recorder.value(value)
    if source is not None and not any(True for _ in refs(source)):
        source = None
    natural = isinstance(source, Ref) and any(
        r.fqn == key and (r.alias_of or r.fqn) == source.key for r in runtime if r.fqn == key
    )
    return SerializedKey(key, _dtype(value), _shape(value), source, None if natural else watcher.hook_of(key, value))


def _not_serialized(saved: Saved) -> tuple[str, ...]:
    fed = {key for s in saved.serialized if s.source is not None for key in refs(s.source)}
    return tuple(r.fqn for r in saved.runtime if (r.alias_of or r.fqn) not in fed)


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _shape(tensor: torch.Tensor) -> tuple[int, ...] | None:
    return None if torch.nn.parameter.is_lazy(tensor) else tuple(tensor.shape)
