"""From a model definition to its `Names`: runs its saving and loading once on meta, and writes down what happened."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ckpttool.expression import Expression, Ref, refs
from ckpttool.naming.hooks import Watcher, quiet
from ckpttool.naming.load_model import LoadedModel
from ckpttool.naming.names import LoadedTensor, Names, RuntimeTensor, SerializedKey
from ckpttool.naming.record import Recorder
from ckpttool.naming.roundtrip import problems
from ckpttool.naming.runtime import (
    dtype_name,
    fresh,
    listed,
    metadata_of,
    model_code,
    on_meta_or_real,
    recording,
    runtime_tensors,
    shape_of,
    wrapper_paths,
)
from ckpttool.naming.verdict import DtypeChange, Verdict, load_verdict, loaded

__all__ = ["DtypeChange", "Verdict", "load_verdict", "trace", "wrapper_paths"]


@dataclass(frozen=True, slots=True)
class Saved:
    """What one run of ``state_dict()`` showed; `state` is what it returned."""

    runtime: tuple[RuntimeTensor, ...]
    serialized: tuple[SerializedKey, ...]
    extra_state: tuple[str, ...]
    state: Mapping[str, Any]


def trace(model: LoadedModel) -> Names:
    """All names of the model's tensors, both ways. Raises `CkptError` where its own code fails."""
    saved = on_meta_or_real(model, lambda real: save(model, real))
    verdict = on_meta_or_real(model, lambda real: load(model, saved, real))
    sources = {s.key: s.source for s in saved.serialized}
    wrong = problems(saved.runtime, saved.serialized, verdict)
    metadata = metadata_of(saved.state)
    return Names(
        model=model.operand,
        torch=torch.__version__,
        runtime=saved.runtime,
        serialized=saved.serialized,
        load=tuple(LoadedTensor(fqn, _by_own_name(fqn, value, sources)) for fqn, value in verdict.reads.items()),
        not_serialized=_not_serialized(saved),
        extra_state=saved.extra_state,
        roundtrips=not wrong,
        roundtrip_problems=tuple(map(str, wrong)),
        modules=None if metadata is None else tuple(metadata),
    )


def save(model: LoadedModel, real: bool) -> Saved:
    """Runs ``state_dict()`` on a fresh instance and reads every key's expression."""
    instance = model.build(real)
    items = listed(instance)
    recorder = Recorder()
    for item in items:
        recorder.name(item.tensor, Ref(item.first))
    tensors = runtime_tensors(instance, items)
    watcher = Watcher(instance, recorder)
    with model_code("state_dict()", watcher), recording(recorder):
        state = instance.state_dict()
    first = {item.fqn: item.first for item in items}
    with quiet():
        keys = tuple(
            _serialized(key, value, recorder, watcher, first) for key, value in state.items() if _is_saved(key, value)
        )
    return Saved(tensors, keys, tuple(key for key, value in state.items() if not _is_saved(key, value)), state)


def load(model: LoadedModel, saved: Saved, real: bool) -> Verdict:
    """Loads fresh tensors of the serialized keys into a fresh instance."""
    state: OrderedDict[str, Any] = OrderedDict()
    for key, value in saved.state.items():
        state[key] = fresh(value) if isinstance(value, torch.Tensor) else value
    metadata = metadata_of(saved.state)
    if metadata is not None:
        state._metadata = metadata  # type: ignore[attr-defined]
    return loaded(model.build(real), state, real)


def _by_own_name(fqn: str, value: Expression | None, sources: Mapping[str, Expression | None]) -> Expression | None:
    """`value`, by the key of the tensor's own name where several keys hold the same tensor (tied weights)."""
    source = sources.get(fqn)
    if isinstance(value, Ref) and source is not None and source == sources.get(value.key):
        return Ref(fqn)
    return value


def _is_saved(key: str, value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not key.endswith("_extra_state")


def _serialized(
    key: str, value: torch.Tensor, recorder: Recorder, watcher: Watcher, first: Mapping[str, str]
) -> SerializedKey:
    source = recorder.value(value)
    natural = isinstance(source, Ref) and first.get(key) == source.key
    return SerializedKey(
        key=key,
        dtype=dtype_name(value.dtype),
        shape=shape_of(value),
        source=source if any(True for _ in refs(source)) else None,
        hook=None if natural else watcher.hook_of(key, value),
    )


def _not_serialized(saved: Saved) -> tuple[str, ...]:
    fed = {key for s in saved.serialized if s.source is not None for key in refs(s.source)}
    return tuple(r.fqn for r in saved.runtime if (r.alias_of or r.fqn) not in fed)
