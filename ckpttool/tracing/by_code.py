"""Runs a model's own loading, or saving, on a checkpoint's values: for what no operators say.

A real instance loads the checkpoint strictly, and its tensors are read; or it gets the checkpoint's tensors as its own,
and its ``state_dict()`` is. Either is done twice, with instances that held other values: what is not determined by the
checkpoint alone comes out differently, and is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Any

import torch
from torch import nn

from ckpttool.checkpoint import Lazy, Section, Storage, TensorEntry, in_row_major
from ckpttool.errors import Problem, Refused
from ckpttool.evaluate.with_torch import to_bytes
from ckpttool.expression import BY_CODE, LOADED, SAVED
from ckpttool.plan import ModelRun
from ckpttool.tracing.load_model import LoadedModel, describe
from ckpttool.tracing.loading import undecided
from ckpttool.tracing.runtime import attempted, check_memory, dtype_name, failure_of_loading, layout_of, listed
from ckpttool.tracing.saving import fill
from ckpttool.tracing.stored import stored
from ckpttool.tracing.tried import same
from ckpttool.values import dataclass
from ckpttool.words import plural

_SEEDS = (0, 1)  # of the two instances


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
    first, again = (_CARRIED_OUT[way](model, given, names, seed) for seed in _SEEDS)
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
