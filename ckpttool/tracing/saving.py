"""Runs of a model's own ``state_dict()`` under the recorder: every key's expression, and whose code
named it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from ckpttool.core.errors import CkptError
from ckpttool.core.expression import Expression, Op, Ref, is_constant, is_opaque, refs
from ckpttool.core.names import Hook, RuntimeTensor, SerializedKey
from ckpttool.core.tables import by_key, first_names
from ckpttool.core.text import a
from ckpttool.core.values import dataclass
from ckpttool.tracing.build_model import LoadedModel
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
from ckpttool.tracing.recorder import Recorder, ValuesAsked, recording
from ckpttool.tracing.user_code import seeded


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
        fqns = set(self.carried)
        for saved in (*self.serialized, *self.further):
            fqns.update(refs(saved.source))
        return frozenset(fqns)

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
    serialized, reads = saved.serialized, saved.reads
    keys = dict.fromkeys((*(entry.key for entry in serialized), *saved.extra_state))
    seen, always, further = dict(keys), set(keys), dict[str, SerializedKey]()
    unexplained, is_proven = set[str](), False
    for filling in (*FILLINGS, *CONSTANT):
        try:
            other = save_once(filled(model, filling, real), real)
        except CodeFailed:
            continue  # a check on values that these do not pass
        # one value everywhere may pass a check that others do not
        is_proven |= isinstance(filling, int)
        reads += other.reads
        entries = by_key(other.serialized)
        written = dict.fromkeys((*entries, *other.extra_state))
        seen.update(written)
        always &= set(written)
        for key, entry in entries.items():
            if key not in keys:
                further[key] = entry
        serialized = tuple(_of_both(entry, entries.get(entry.key), reads) for entry in serialized)
        unexplained.update(_changed_constants(serialized, saved.state, other.state))
    feeding = _feeders(model, saved, unexplained)
    explained = []
    for entry in serialized:
        read = _read_by(entry.hook, reads)
        if entry.key in feeding:
            entry = replace(entry, source=opaque(*map(Ref, feeding[entry.key])))
        elif read and not is_proven and isinstance(entry.source, Op):
            entry = replace(entry, source=opaque(entry.source, *read))
        explained.append(entry)
    return replace(
        saved,
        serialized=tuple(explained),
        varying=tuple(key for key in seen if key not in always),
        further=tuple(further.values()),
    )


def _changed_constants(
    keys: Iterable[SerializedKey], state: Mapping[str, Any], other: Mapping[str, Any]
) -> Iterator[str]:
    """Yield the keys with other values in another run, although no tensor explains their value."""
    for entry in keys:
        if not is_opaque(entry.source) or not is_constant(entry.source):
            continue
        value = other.get(entry.key)
        if not isinstance(value, torch.Tensor) or not same(state[entry.key], value):
            yield entry.key


def _of_both(
    entry: SerializedKey,
    other: SerializedKey | None,
    reads: tuple[tuple[Hook | None, tuple[str, ...]], ...],
) -> SerializedKey:
    """Return the key as two runs with other values write it: opaque if its expression holds for
    some values only.
    """
    if other is None or (other.source == entry.source and not is_opaque(entry.source)):
        return entry
    source = opaque(entry.source, other.source, *_read_by(entry.hook, reads))
    return replace(entry, source=source)


def _read_by(
    hook: Hook | None, reads: tuple[tuple[Hook | None, tuple[str, ...]], ...]
) -> list[Ref]:
    values: list[Ref] = []
    for reader, names in reads:
        if reader == hook:
            values += map(Ref, names)
    return values


def _feeders(model: LoadedModel, saved: Saved, keys: Collection[str]) -> dict[str, list[str]]:
    """Return for each of the keys the tensors that change it when they alone are changed."""

    def state_with(name: str) -> Mapping[str, Any]:
        instance = model.build(True)
        fill(instance, FILLINGS[0], only=[name])
        try:
            return save_once(instance, True).state
        except CodeFailed:
            return {}

    return feeders(first_names(saved.runtime), keys, saved.state, state_with)


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
                raise ValuesAsked
            if not isinstance(state, Mapping) or not all(isinstance(key, str) for key in state):
                raise TypeError(f"state_dict() gives {a(state)}, not a mapping from names")
    except CkptError:
        raise
    except (Exception, SystemExit) as error:
        raise code_failed("state_dict()", watcher, error) from error
    keys: list[SerializedKey] = []
    extra: dict[str, Any] = {}
    carried = set[str]()
    with quiet():
        for key, value in state.items():
            source = recorder.value(value) if isinstance(value, torch.Tensor) else None
            if source is None or _is_extra_state(key, source):
                extra[key] = value
                continue
            has_its_name = isinstance(source, Ref) and first.get(key) == source.key
            hook = None if has_its_name else watcher.hook_of(key, value)
            keys.append(SerializedKey(key, dtype_name(value.dtype), shape_of(value), source, hook))
        for tensor in tensors_in(extra):
            carried.update(refs(recorder.value(tensor)))
    return Saved(
        runtime,
        tuple(keys),
        tuple(extra),
        state,
        places={item.fqn: item.token for item in items},
        real=real,
        reads=tuple(recorder.reads),
        carried=frozenset(carried),
    )


def _is_extra_state(key: str, source: Expression) -> bool:
    """Return whether the tensor of this key is extra state, and not a tensor of the model; a buffer
    may have such a name too.
    """
    if not _is_extra_name(key):
        return False
    return not (isinstance(source, Ref) and _is_extra_name(source.key))


def _is_extra_name(name: str) -> bool:
    return name.rpartition(".")[2] == "_extra_state"
