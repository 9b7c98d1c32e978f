"""Experiments on real instances of a model: build, fill, save or load, compare."""

from __future__ import annotations

import io
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ckpttool.core.checkpoint import Lazy, Section, Storage, TensorEntry, in_row_major
from ckpttool.core.errors import CkptError, Problem, Refused
from ckpttool.core.expression import BY_CODE, LOADED, SAVED
from ckpttool.core.keys import dotted
from ckpttool.core.plan import ModelRun
from ckpttool.core.text import plural
from ckpttool.core.values import dataclass
from ckpttool.evaluate.torch_eval import same_bits, to_bytes
from ckpttool.tracing.build_model import LoadedModel, describe
from ckpttool.tracing.loading import Verdict, loaded, undecided
from ckpttool.tracing.recorder.memory import inside
from ckpttool.tracing.runtime import (
    attempted,
    check_memory,
    copied_state,
    dtype_name,
    failure_of_loading,
    is_cheap,
    layout_of,
    listed,
    metadata_of,
    shape_of,
)
from ckpttool.tracing.safe_state_dict import stored
from ckpttool.tracing.saving import CONSTANT, Filling, fill, filled

_NOT_LOOKED = "on the meta device alone: whether its constructor makes other tensors for real was not looked at"
_UNLIKE = "built on the meta device its constructor makes other tensors than for real, and there is no memory for that"


def beside_real(model: LoadedModel) -> tuple[LoadedModel, tuple[str, ...]]:
    """`model`, to be built for real from now on where its meta twin has other tensors; what there is to be noted.

    A cheap model is built for real and compared; of any other the constructor runs with tensors that say that they are
    on the CPU, and have no memory.
    """
    if model.materialize:
        return model, ()
    try:
        twin = _listing(model.build(False))
        real = _listing(model.build(True) if is_cheap(model) else _fake(model))
    except CkptError:
        return model, (_NOT_LOOKED,)
    if twin == real:
        return model, ()
    try:
        check_memory(model, 0, _UNLIKE)
    except CkptError as error:
        return model, (error.message,)
    return replace(model, materialize=True), ()


def _fake(model: LoadedModel) -> nn.Module:
    """An instance whose tensors pass for real ones. Raises `CannotBuild` where its constructor sees through that."""
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cpu"):
        return model.build(True)


def _listing(model: nn.Module) -> list[tuple[object, ...]]:
    """Names, dtypes, shapes, and which tensors are one: what needs neither memory nor addresses."""
    first: dict[int, str] = {}
    found: list[tuple[object, ...]] = []
    for path, module in model.named_modules(remove_duplicate=False):
        for kind, table in (("parameter", module._parameters), ("buffer", module._buffers)):
            for name, tensor in table.items():
                fqn = dotted(path, name)
                if tensor is not None:
                    hidden = kind == "buffer" and name in module._non_persistent_buffers_set
                    one = first.setdefault(id(tensor), fqn)
                    found.append((fqn, kind, hidden, one, dtype_name(tensor.dtype), shape_of(tensor)))
    return found


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


_MOST = 8  # versions that are tried


def versions_asked_for(
    model: LoadedModel, state: Mapping[str, Any], verdict: Verdict, real: bool
) -> dict[str, Any] | None:
    """Module path -> version in `state`, which the model saved and loads as `verdict` says, where code is that may ask.

    None where it loads the same whatever the versions are, or does not load at all.
    """
    own = metadata_of(state)
    if own is None or not verdict.ok:
        return None
    versions = {path: payload.get("version") for path, payload in own.items() if isinstance(payload, Mapping)}
    for other in _under_other_versions(state, versions):
        instance = model.build(real)
        asking = _with_own_code(instance)
        if not asking:
            return None
        found = {path: version for path, version in versions.items() if path in asking} or versions
        try:
            again = loaded(instance, other, real)
        except CkptError:  # what an old version had is not there
            return found
        if not again.ok:
            return found
        if again.reads != verdict.reads:  # which random numbers bring about too
            return found if loaded(model.build(real), copied_state(state), real).reads == verdict.reads else None
    return None


def _under_other_versions(state: Mapping[str, Any], own: Mapping[str, Any]) -> Iterator[OrderedDict[str, Any]]:
    """The state dict without versions, then under every other one up to the next."""
    made = copied_state(state)
    del made._metadata  # type: ignore[attr-defined]
    yield made
    highest = max((version for version in own.values() if isinstance(version, int)), default=0)
    for version in range(1, min(highest + 2, _MOST)):
        if set(own.values()) != {version}:
            made = copied_state(state)
            made._metadata = OrderedDict((path, {"version": version}) for path in own)  # type: ignore[attr-defined]
            yield made


def _with_own_code(model: nn.Module) -> set[str]:
    """The paths of modules whose loading runs other code than `nn.Module`'s, which asks for no version."""
    return {
        path
        for path, module in model.named_modules(remove_duplicate=False)
        if module._load_state_dict_pre_hooks
        or getattr(module._load_from_state_dict, "__func__", None) is not nn.Module._load_from_state_dict
        or (not path and type(module).load_state_dict is not nn.Module.load_state_dict)
    }


_BY_CODE_SEEDS = (0, 1)  # of the two instances


@dataclass(slots=True, eq=False)
class ModelCode:
    """A model's own code, as plans run it; a run is made once, however often it is asked for."""

    model: LoadedModel
    done: list[tuple[ModelRun, Mapping[str, TensorEntry]]] = field(default_factory=list)

    def __call__(self, run: ModelRun, given: Section, names: Sequence[str]) -> Mapping[str, TensorEntry]:
        """The value of each of `names`, which stay in memory until they are written.

        Raises `Refused` where the model does not take the values, or what it makes of them is not the same twice, and
        `CkptError` where there is no memory for it.
        """
        for known, values in self.done:
            if known == run and values.keys() >= set(names):
                return values
        found, need = _twice(self.model, run.way, given, names)
        made = {name: _entry(name, tensor, need) for name, tensor in found.items()}
        self.done.append((run, made))
        return made


def _twice(model: LoadedModel, way: str, given: Section, names: Sequence[str]) -> tuple[dict[str, torch.Tensor], int]:
    """The values, and the bytes of memory that they took at most."""
    what = f"{plural(len(names), 'tensor')} can only be computed by {model.operand}'s own {BY_CODE[way]}()"
    need = check_memory(model, 2 * sum(entry.nbytes for entry in given.tensors), what)
    first, again = (_CARRIED_OUT[way](model, given, names, seed) for seed in _BY_CODE_SEEDS)
    differing = [name for name in names if not same(first[name], again[name])]
    if differing:
        raise Refused(
            f"{model.operand}'s own {BY_CODE[way]}() does not give the same twice",
            hint="fix it there: what it computes depends on more than the checkpoint",
            problems=[Problem("another value each time", name) for name in differing],
        )
    return first, need


def _loaded(model: LoadedModel, given: Section, names: Sequence[str], seed: int) -> dict[str, torch.Tensor]:
    """The runtime tensors `names` of an instance that has loaded `given`."""
    instance, state = model.build(True, seed), _known(model, given)
    if seed:
        fill(instance, seed, names)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        failed = failure_of_loading(instance, state)
    if failed is not None:
        raise _failed(model, LOADED, failed)
    return _dense({item.fqn: item.tensor for item in listed(instance)}, names)


def _saved(model: LoadedModel, given: Section, names: Sequence[str], seed: int) -> dict[str, torch.Tensor]:
    """The entries `names` of the state dict of an instance whose runtime tensors are those of `given`."""
    instance = model.build(True, seed)
    _put(instance, {key: value for key, value in _known(model, given).items() if isinstance(value, torch.Tensor)})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        state = attempted(instance.state_dict)
    if isinstance(state, Exception):
        raise _failed(model, SAVED, state)
    return _dense(state, names)


def _known(model: LoadedModel, given: Section) -> Mapping[str, Any]:
    """The section as torch would hand it over. Raises `CkptError` where not all of it can be made here."""
    found = stored(given, True)
    if found.unknown:
        raise undecided(model, found.unknown)
    return found.state


def _put(instance: nn.Module, values: Mapping[str, torch.Tensor]) -> None:
    """Gives the instance's tensors these values, in the dtypes that they have."""
    items = listed(instance)
    owners = Counter({id(item.tensor): item.token[0] for item in items}.values())
    problems = []
    with torch.no_grad():
        for item in items:
            value = values.get(item.fqn)
            if value is None:
                continue
            if value.shape != item.tensor.shape:
                problems.append(
                    Problem(f"shape {list(value.shape)}, the model has {list(item.tensor.shape)}", item.fqn)
                )
            elif value.dtype == item.tensor.dtype:
                item.tensor.copy_(value)
            elif owners[item.token[0]] == 1:
                item.tensor.data = value.clone()
            else:
                problems.append(Problem("another dtype, and it shares memory with other tensors", item.fqn, "dtype"))
    if problems:
        raise Refused(
            "the tensors are not this model's", hint="`ckpttool diff --model MODEL CKPT` says more", problems=problems
        )


def _dense(found: Mapping[str, Any], names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Those called `names`, in memory of their own. Raises `Refused` where one is no dense tensor."""
    problems = [
        Problem("the model's own code makes no dense tensor of it", name)
        for name in names
        if not isinstance(value := found.get(name), torch.Tensor) or layout_of(value) != "strided"
    ]
    if problems:
        hint = "`ckpttool trace` says what the model's own code makes of them"
        raise Refused("not all of it can be written", hint=hint, problems=problems)
    return {name: found[name].detach().clone(memory_format=torch.contiguous_format) for name in names}


def _failed(model: LoadedModel, way: str, error: Exception) -> Refused:
    return Refused(
        f"{model.operand}'s own {BY_CODE[way]}(), which has to compute a part, fails: {describe(error)}",
        hint="`ckpttool diff --model MODEL CKPT` says more; torch fails the same way",
    )


def _entry(name: str, value: torch.Tensor, need: int) -> TensorEntry:
    nbytes = value.numel() * value.element_size()
    storage = Storage(Lazy(nbytes, lambda: [to_bytes(value)], reads=0, memory=need))
    return in_row_major(name, dtype_name(value.dtype), tuple(value.shape), storage)


_CARRIED_OUT: Mapping[str, Callable[[LoadedModel, Section, Sequence[str], int], dict[str, torch.Tensor]]] = {
    LOADED: _loaded,
    SAVED: _saved,
}
