"""Values that only the model's own code can compute: by loading, by saving, and in its
constructor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from typing import Any

import torch
from torch import nn

from ckpttool.core.checkpoint import Lazy, Section, Storage, TensorEntry, in_row_major
from ckpttool.core.errors import CkptError, Problem, Refused
from ckpttool.core.expression import BY_CODE, LOADED
from ckpttool.core.plan import ModelRun
from ckpttool.core.text import dotted, plural
from ckpttool.core.values import dataclass
from ckpttool.evaluate.torch_eval import to_bytes
from ckpttool.naming.wrappers import strip
from ckpttool.tracing.build_model import LoadedModel
from ckpttool.tracing.instances import (
    check_memory,
    dtype_name,
    failure_of_loading,
    fill,
    layout_of,
    listed,
    same,
    wrapper_paths,
)
from ckpttool.tracing.loading import undecided_error
from ckpttool.tracing.safe_state_dict import stored
from ckpttool.tracing.user_code import attempt, describe, seeded

_SEEDS = (0, 1)  # of two instances: a value that differs is random
_MOST = 1 << 30  # bytes; for its constants a larger model is built only if the user asks for it


@dataclass(slots=True, eq=False)
class ModelCode:
    """A model's own code, as plans run it; each run is done once."""

    model: LoadedModel
    done: list[tuple[ModelRun, Mapping[str, TensorEntry]]] = field(default_factory=list)

    def __call__(
        self, run: ModelRun, source: Section, names: Sequence[str]
    ) -> Mapping[str, TensorEntry]:
        """Return the value of each of `names`, which stay in memory until they are written.

        Raises `Refused` if the model does not accept the values, or computes others the second
        time, and `CkptError` if there is not enough memory.
        """
        for earlier, values in self.done:
            if earlier == run and values.keys() >= set(names):
                return values
        code = f"{self.model.operand}'s own {BY_CODE[run.way]}()"
        what = f"{plural(len(names), 'tensor')} can only be computed by {code}"
        need = check_memory(self.model, 2 * sum(entry.nbytes for entry in source.tensors), what)
        first, again = (self._values(run.way, source, names, seed) for seed in _SEEDS)
        problems = []
        for name in names:
            if not same(first[name], again[name]):
                problems.append(Problem("another value each time", name))
        if problems:
            raise Refused(
                f"{code} does not give the same twice",
                hint="fix it there: what it computes depends on more than the checkpoint",
                problems=problems,
            )
        entries = {name: _entry(name, tensor, need) for name, tensor in first.items()}
        self.done.append((run, entries))
        return entries

    def _values(
        self, way: str, source: Section, names: Sequence[str], seed: int
    ) -> dict[str, torch.Tensor]:
        """Return runtime tensors after loading `source`, or the state dict of an instance that has
        its tensors.
        """
        given = stored(source, True)
        if given.unknown:
            raise undecided_error(self.model, given.unknown)
        instance = self.model.build(True, seed)
        if way == LOADED:
            fill(instance, seed or "own", names)
        else:
            _set_tensors(instance, given.state)
        with seeded(seed):
            if way == LOADED:
                result: Any = failure_of_loading(instance, given.state)
                if result is None:
                    result = {item.fqn: item.tensor for item in listed(instance)}
            else:
                result = attempt(instance.state_dict)
        if isinstance(result, Exception):
            raise Refused(
                f"{self.model.operand}'s own {BY_CODE[way]}(), which has to compute a part, fails:"
                f" {describe(result)}",
                hint="`ckpttool diff --model MODEL CKPT` says more; torch fails the same way",
            )
        values = {}
        problems = []
        for name in names:
            value = result.get(name)
            if isinstance(value, torch.Tensor) and layout_of(value) == "strided":
                values[name] = value.detach().clone(memory_format=torch.contiguous_format)
            else:
                problems.append(Problem("the model's own code makes no dense tensor of it", name))
        if problems:
            hint = "`ckpttool trace` says what the model's own code makes of them"
            raise Refused("not all of it can be written", hint=hint, problems=problems)
        return values


def _set_tensors(instance: nn.Module, values: Mapping[str, Any]) -> None:
    """Give the instance's tensors these values, in the dtypes of the values."""
    items = listed(instance)
    owners = Counter({id(item.tensor): item.token[0] for item in items}.values())
    problems = []
    with torch.no_grad():
        for item in items:
            value = values.get(item.fqn)
            if not isinstance(value, torch.Tensor):
                continue
            if value.shape != item.tensor.shape:
                shapes = f"shape {list(value.shape)}, the model has {list(item.tensor.shape)}"
                problems.append(Problem(shapes, item.fqn))
            elif value.dtype == item.tensor.dtype:
                item.tensor.copy_(value)
            elif owners[item.token[0]] == 1:
                item.tensor.data = value.clone()
            else:
                shared = "another dtype, and it shares memory with other tensors"
                problems.append(Problem(shared, item.fqn, "dtype"))
    if problems:
        raise Refused(
            "the tensors are not this model's",
            hint="`ckpttool diff --model MODEL CKPT` says more",
            problems=problems,
        )


def _entry(name: str, value: torch.Tensor, memory: int | None = None) -> TensorEntry:
    nbytes = value.numel() * value.element_size()
    storage = Storage(Lazy(nbytes, lambda: [to_bytes(value)], reads=0, memory=memory))
    return in_row_major(name, dtype_name(value.dtype), tuple(value.shape), storage)


def values_of_constants(
    model: LoadedModel, names: Iterable[str], state_dict: Section | None
) -> dict[str, TensorEntry | str]:
    """Return the value of each tensor in a new model that has loaded `state_dict`, or why it is not
    known.

    The tensors are outside of the state dict (buffers that are not saved, plain attributes), and
    have their names without wrappers. If there is no `state_dict`, or the model does not load it,
    they have the values that the constructor gives.
    """
    names = list(names)
    try:
        need = model.nbytes
        if need > _MOST and not model.materialize:
            return dict.fromkeys(
                names, f"the model takes {need >> 20} MiB: --materialize builds it"
            )
        extra = 0 if state_dict is None else state_dict.nbytes
        check_memory(model, extra, "the model's constants were not computed")
        first, second = (_attributes(_loaded(model, seed, state_dict)) for seed in _SEEDS)
    except CkptError as error:
        return dict.fromkeys(names, error.message)
    values: dict[str, TensorEntry | str] = {}
    for name in names:
        value = first.get(name)
        if value is None or name not in second:
            values[name] = "not an attribute of the model, but a tensor in its code"
        elif layout_of(value) != "strided":
            values[name] = "it is not a dense tensor"
        elif not same(value, second[name]):
            values[name] = "the model gives it a random value"
        else:
            values[name] = _entry("", value.detach().cpu().contiguous())
    return values


def _loaded(model: LoadedModel, seed: int, state_dict: Section | None) -> nn.Module:
    """Return a new instance that has loaded `state_dict`, if there is one and it loads."""
    instance = model.build(True, seed)
    if state_dict is None:
        return instance
    given = stored(state_dict, True)
    if given.unknown:
        return instance
    with seeded(seed):
        failure = failure_of_loading(instance, given.state)
    return instance if failure is None else model.build(True, seed)


def _attributes(model: nn.Module) -> Mapping[str, torch.Tensor]:
    """Return every tensor that is an attribute, by its name without wrappers."""
    paths, tensors = wrapper_paths(model), dict[str, torch.Tensor]()
    for path, module in model.named_modules(remove_duplicate=False):
        for name, value in {**vars(module), **module._parameters, **module._buffers}.items():
            if isinstance(value, torch.Tensor):
                tensors.setdefault(strip(dotted(path, name), paths), value)
    return tensors
