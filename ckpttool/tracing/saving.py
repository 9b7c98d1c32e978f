"""Runs of a model's own ``state_dict()`` under the recorder: every key's expression, and whose code
named it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from ckpttool.core.errors import CkptError
from ckpttool.core.expression import Op, Ref, is_constant, is_opaque, refs
from ckpttool.core.names import Hook, RuntimeTensor, SerializedKey
from ckpttool.core.text import a
from ckpttool.core.values import dataclass
from ckpttool.tracing.build_model import LoadedModel, seeded
from ckpttool.tracing.hooks import Watcher, quiet
from ckpttool.tracing.instances import (
    CONSTANT,
    FILLINGS,
    CodeFailed,
    code_failed,
    dtype_name,
    feeders,
    fill,
    filled,
    listed,
    runtime_tensors,
    same,
    shape_of,
    tensors_in,
)
from ckpttool.tracing.memory import Token, opaque
from ckpttool.tracing.recorder import NeedsValues, Recorder, recording


@dataclass(frozen=True)
class Saved:
    """The result of ``state_dict()``; `state` is what it returned, `real` says whether its tensors
    have values.

    `places` are the tokens of the runtime tensors before the run, `reads` the values that hooks
    looked at. `carried` are runtime tensors inside extra entries. `varying` are the names of keys
    that are written for some values of the tensors only; `further` are the varying keys that this
    run did not write.
    """

    runtime: tuple[RuntimeTensor, ...]
    serialized: tuple[SerializedKey, ...]
    extra_state: tuple[str, ...]
    state: Mapping[str, Any]
    places: Mapping[str, Token]
    real: bool
    reads: tuple[tuple[Hook | None, tuple[str, ...]], ...] = ()
    carried: frozenset[str] = frozenset()
    varying: tuple[str, ...] = ()
    further: tuple[SerializedKey, ...] = ()

    @cached_property
    def fed(self) -> frozenset[str]:
        """The runtime tensors (first names) that are saved, in any form."""
        return (
            frozenset(key for s in (*self.serialized, *self.further) for key in refs(s.source))
            | self.carried
        )

    @property
    def is_opaque(self) -> bool:
        """Return whether a key was computed in a way that could not be followed."""
        return any(is_opaque(s.source) for s in self.serialized)


def save(model: LoadedModel, real: bool, instance: nn.Module | None = None) -> Saved:
    """Run ``state_dict()`` on a fresh `instance`; again with other values if its code looked at
    values.

    Raises `CodeFailed` if the model's own code raises.
    """
    saved = save_once(model.build(real) if instance is None else instance, real)
    if not saved.reads and not real:
        return saved
    keys = dict.fromkeys((*(s.key for s in saved.serialized), *saved.extra_state))
    serialized = list(saved.serialized)
    reads = saved.reads
    seen, always, further = dict(keys), set(keys), dict[str, SerializedKey]()
    unexplained, proven = set[str](), False
    for filling in (*FILLINGS, *CONSTANT):
        try:
            other = save_once(filled(model, filling, real), real)
        except CodeFailed:
            continue  # a check on values that these do not pass
        # one value everywhere may pass a check that others do not
        proven |= isinstance(filling, int)
        reads += other.reads
        by_key = {s.key: s for s in other.serialized}
        written = dict.fromkeys((*by_key, *other.extra_state))
        seen.update(written)
        always &= set(written)
        further.update((key, s) for key, s in by_key.items() if key not in keys)
        for index, s in enumerate(serialized):
            second = by_key.get(s.key)
            if second is not None and (second.source != s.source or is_opaque(s.source)):
                # The expression holds for these values only.
                source = opaque(s.source, second.source, *_read_by(s.hook, reads))
                serialized[index] = s = replace(s, source=source)
            if is_opaque(s.source) and is_constant(s.source):
                value = other.state.get(s.key)
                if not isinstance(value, torch.Tensor) or not same(saved.state[s.key], value):
                    unexplained.add(s.key)
    feeding = _feeders(model, saved, unexplained)
    for index, s in enumerate(serialized):
        if not proven and isinstance(s.source, Op) and _read_by(s.hook, reads):
            serialized[index] = s = replace(s, source=opaque(s.source, *_read_by(s.hook, reads)))
        if s.key in feeding:
            serialized[index] = replace(s, source=opaque(*map(Ref, feeding[s.key])))
    varying = tuple(key for key in seen if key not in always)
    return replace(
        saved, serialized=tuple(serialized), varying=varying, further=tuple(further.values())
    )


def _read_by(
    hook: Hook | None, reads: tuple[tuple[Hook | None, tuple[str, ...]], ...]
) -> list[Ref]:
    return [Ref(name) for reader, names in reads if reader == hook for name in names]


def _feeders(model: LoadedModel, saved: Saved, keys: Collection[str]) -> dict[str, list[str]]:
    """Return for each of the keys the tensors that change it when they alone are changed."""

    def state_with(name: str) -> Mapping[str, Any]:
        instance = model.build(True)
        fill(instance, FILLINGS[0], only=[name])
        try:
            return save_once(instance, True).state
        except CodeFailed:
            return {}

    return feeders(
        [r.fqn for r in saved.runtime if r.alias_of is None], keys, saved.state, state_with
    )


def save_once(instance: nn.Module, real: bool) -> Saved:
    """Run ``state_dict()`` of `instance`, which is changed. Raises `CodeFailed` if its code
    raises.
    """
    items = listed(instance)
    first = {item.fqn: item.first for item in items}
    runtime = runtime_tensors(instance, items)
    recorder = Recorder()
    for item in items:
        recorder.name(item.tensor, Ref(item.first))
    watcher = Watcher(instance, recorder)
    try:
        with seeded(0), recording(recorder):
            state = instance.state_dict()
            if recorder.blind:
                raise NeedsValues
            if not isinstance(state, Mapping) or not all(isinstance(key, str) for key in state):
                raise TypeError(f"state_dict() gives {a(state)}, not a mapping from names")
    except CkptError:
        raise
    except (Exception, SystemExit) as error:
        raise code_failed("state_dict()", watcher, error) from error
    keys: list[SerializedKey] = []
    extra: dict[str, Any] = {}
    with quiet():
        for key, value in state.items():
            source = recorder.value(value) if isinstance(value, torch.Tensor) else None
            # A tensor that is extra state is not a tensor of the model; a buffer may have such a
            # name too.
            is_extra = _is_extra_state(key) and not (
                isinstance(source, Ref) and _is_extra_state(source.key)
            )
            if source is None or is_extra:
                extra[key] = value
                continue
            has_own_name = isinstance(source, Ref) and first.get(key) == source.key
            hook = None if has_own_name else watcher.hook_of(key, value)
            keys.append(SerializedKey(key, dtype_name(value.dtype), shape_of(value), source, hook))
        carried = frozenset(
            key for tensor in tensors_in(extra) for key in refs(recorder.value(tensor))
        )
    places = {item.fqn: item.token for item in items}
    return Saved(
        runtime, tuple(keys), tuple(extra), state, places, real, tuple(recorder.reads), carried
    )


def _is_extra_state(name: str) -> bool:
    return name.rpartition(".")[2] == "_extra_state"
