"""Runs of a model's own ``state_dict()`` under the recorder: every key's expression, and whose code named it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, Literal, Union

import torch
from torch import nn

from ckpttool.core.expression import Expression, Op, Ref, is_constant, is_opaque, refs
from ckpttool.core.names import Hook, RuntimeTensor, SerializedKey
from ckpttool.core.text import a
from ckpttool.core.values import dataclass
from ckpttool.tracing.build_model import LoadedModel
from ckpttool.tracing.hooks import Watcher, quiet
from ckpttool.tracing.recorder.memory import Token, opaque
from ckpttool.tracing.recorder.recorder import NeedsValues, Recorder
from ckpttool.tracing.runtime import (
    CodeFailed,
    dtype_name,
    listed,
    model_code,
    recording,
    runtime_tensors,
    shape_of,
    tensors_in,
)

Reads = tuple[tuple[Hook | None, tuple[str, ...]], ...]
_MOST_TRIED = 256  # runtime tensors that are changed one by one, to see which of them feed a key
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
FILLINGS = (1, 2)  # seeds of the further runs that tell whether names or expressions depend on values
Filling = Union[int, Literal["zeros", "ones", "own"]]  # a seed, one value everywhere, or the values of the constructor
CONSTANT: tuple[Filling, ...] = ("zeros", "ones")


@dataclass(frozen=True, slots=True)
class Saved:
    """What ``state_dict()`` showed; `state` is what it returned, `real` says whether its tensors have values.

    `places` are the tokens of the runtime tensors before the run. `carried` are runtime tensors inside of extra
    entries. `varying` are the names of keys that are written for some values of the tensors and not for others;
    `further` those of these keys that this run did not show.
    """

    runtime: tuple[RuntimeTensor, ...]
    serialized: tuple[SerializedKey, ...]
    extra_state: tuple[str, ...]
    state: Mapping[str, Any]
    places: Mapping[str, Token]
    real: bool
    carried: frozenset[str] = frozenset()
    varying: tuple[str, ...] = ()
    further: tuple[SerializedKey, ...] = ()

    @property
    def fed(self) -> frozenset[str]:
        """The runtime tensors (first names) that are saved, in whatever form."""
        found = {key for s in (*self.serialized, *self.further) for key in refs(s.source)}
        return frozenset(found) | self.carried

    @property
    def is_opaque(self) -> bool:
        """True where some key was computed in a way that could not be followed."""
        return any(is_opaque(s.source) for s in self.serialized)


def save(model: LoadedModel, real: bool) -> Saved:
    """Runs ``state_dict()`` on a fresh instance; again with other values where its code looked at values.

    Raises `CodeFailed` where the model's own code raises.
    """
    saved, reads = _run(model.build(real), real)
    if not reads and not real:
        return saved
    serialized, varying, proven = saved.serialized, set[str](), False
    keys = dict.fromkeys((*(s.key for s in serialized), *saved.extra_state))
    seen, always, further = dict(keys), set(keys), dict[str, SerializedKey]()
    for filling in (*FILLINGS, *CONSTANT):
        try:
            other, more = _run(filled(model, filling, real), real)
        except CodeFailed:
            continue  # a check on values that these do not pass
        proven |= isinstance(filling, int)  # one value everywhere may pass a check that others do not
        reads += more
        by_key = {s.key: s for s in other.serialized}
        written = {*by_key, *other.extra_state}
        seen.update(dict.fromkeys((*by_key, *other.extra_state)))
        always &= written
        further.update((s.key, s) for s in other.serialized if s.key not in keys)
        serialized = tuple(_settled(s, by_key.get(s.key), reads) for s in serialized)
        unexplained = [s.key for s in serialized if is_opaque(s.source) and is_constant(s.source)]
        varying |= {key for key in unexplained if _differs(saved.state, other.state, key)}
    if not proven:
        serialized = tuple(_unproven(s, reads) for s in serialized)
    if varying:
        serialized = tuple(_with_feeders(model, saved, s) if s.key in varying else s for s in serialized)
    depends = tuple(key for key in seen if key not in always)
    return replace(saved, serialized=serialized, varying=depends, further=tuple(further.values()))


def _differs(one: Mapping[str, Any], other: Mapping[str, Any], key: str) -> bool:
    """Whether the tensor of `one` is another in `other`, or is not there."""
    a, b = one[key], other.get(key)
    return not (isinstance(b, torch.Tensor) and a.shape == b.shape and torch.equal(a, b))


def _with_feeders(model: LoadedModel, saved: Saved, key: SerializedKey) -> SerializedKey:
    """The key as computed from those tensors that change it when they alone are changed; of very many: from all."""
    names = [r.fqn for r in saved.runtime if r.alias_of is None]
    if len(names) <= _MOST_TRIED:
        names = [name for name in names if _differs(saved.state, _state_with_other(model, name), key.key)]
    return replace(key, source=opaque(*map(Ref, names)))


def _state_with_other(model: LoadedModel, name: str) -> Mapping[str, Any]:
    """The state dict of an instance in which the tensor `name` has other values."""
    instance = model.build(True)
    fill(instance, FILLINGS[0], only=[name])
    try:
        return _run(instance, True)[0].state
    except CodeFailed:
        return {}


def _settled(one: SerializedKey, other: SerializedKey | None, reads: Reads) -> SerializedKey:
    """`one`; opaque where its expression holds for these values only."""
    if other is None or (other.source == one.source and not is_opaque(one.source)):
        return one
    return replace(one, source=opaque(one.source, other.source, *_seen(one, reads)))


def _unproven(key: SerializedKey, reads: Reads) -> SerializedKey:
    """The key; opaque where its hook looked at values, and no other values could be tried."""
    seen = _seen(key, reads)
    return replace(key, source=opaque(key.source, *seen)) if isinstance(key.source, Op) and seen else key


def _seen(key: SerializedKey, reads: Reads) -> list[Ref]:
    """The tensors whose values the hook of `key` looked at."""
    return [Ref(name) for hook, names in reads if hook == key.hook for name in names]


def without_constants(keys: tuple[SerializedKey, ...]) -> tuple[SerializedKey, ...]:
    """The keys, with no expression for those that no runtime tensor feeds."""
    return tuple(replace(s, source=None) if is_constant(s.source) else s for s in keys)


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
                values = others(tensor)  # of two even or two odd seeds, one negative, each truth is tried both ways
                opposite = tensor.dtype == torch.bool and (seed % 2 == 0) != (seed < 0)
                tensor.copy_(~values if opposite else values)


def others(integers: torch.Tensor) -> torch.Tensor:
    """Other integers, or truths, of the same shape: the same ones in another order, since they may be indices.

    Of those that any order leaves alike the first half is another, so that an order shows the next time.
    """
    if integers.dtype in _SIGNED:  # torch can do little with these
        return others(integers.view(_SIGNED[integers.dtype])).view(integers.dtype)
    reordered = integers.flip(tuple(range(integers.dim())))
    if not torch.equal(reordered, integers):
        return reordered
    half = (torch.arange(integers.numel()) * 2 <= integers.numel()).reshape(integers.shape)
    return integers ^ half if integers.dtype == torch.bool else (integers + half).to(integers.dtype)


def filled(model: LoadedModel, filling: Filling, real: bool = True) -> nn.Module:
    """Return a fresh instance with the values of `fill`."""
    instance = model.build(real)
    fill(instance, filling)
    return instance


def run_once(instance: nn.Module) -> tuple[SerializedKey, ...]:
    """The keys that `instance`, which is changed, saves as it stands. Raises `CodeFailed` where its code raises."""
    return _run(instance, real=True)[0].serialized


def _run(instance: nn.Module, real: bool) -> tuple[Saved, Reads]:
    items = listed(instance)
    recorder = Recorder()
    for item in items:
        recorder.name(item.tensor, Ref(item.first))
    runtime = runtime_tensors(instance, items)
    watcher = Watcher(instance, recorder)
    with model_code("state_dict()", watcher), torch.random.fork_rng(devices=[]), recording(recorder):
        torch.manual_seed(0)  # random numbers are no difference between two runs
        state = instance.state_dict()
        if recorder.blind:
            raise NeedsValues
        if not isinstance(state, Mapping) or not all(isinstance(key, str) for key in state):
            raise TypeError(f"state_dict() gives {a(state)}, not a mapping from names")
    first = {item.fqn: item.first for item in items}
    with quiet():
        saved = {key: value for key, value in state.items() if _is_saved(key, value, recorder)}
        keys = tuple(_serialized(key, value, recorder, watcher, first) for key, value in saved.items())
        extra = {key: value for key, value in state.items() if key not in saved}
        carried = frozenset(key for tensor in tensors_in(extra) for key in refs(recorder.value(tensor)))
    places = {item.fqn: item.token for item in items}
    return Saved(runtime, keys, tuple(extra), state, places, real, carried), tuple(recorder.reads)


def _is_saved(key: str, value: Any, recorder: Recorder) -> bool:
    """Return whether the entry is a tensor of the model, and not extra state; a buffer may be called so too."""
    if not isinstance(value, torch.Tensor):
        return False
    if not _is_extra_state(key):
        return True
    source = recorder.value(value)
    return isinstance(source, Ref) and _is_extra_state(source.key)


def _is_extra_state(name: str) -> bool:
    return name.rpartition(".")[2] == "_extra_state"


def _serialized(
    key: str, value: torch.Tensor, recorder: Recorder, watcher: Watcher, first: Mapping[str, str]
) -> SerializedKey:
    source: Expression = recorder.value(value)
    natural = isinstance(source, Ref) and first.get(key) == source.key
    hook = None if natural else watcher.hook_of(key, value)
    return SerializedKey(key, dtype_name(value.dtype), shape_of(value), source, hook)
