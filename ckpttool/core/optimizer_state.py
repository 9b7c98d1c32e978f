"""An optimizer's state dict as a value, with parameters named by ids, FQNs or flat keys."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import field, replace
from typing import Any, Union

from ckpttool.core.checkpoint import TensorEntry
from ckpttool.core.values import dataclass

ID, FQN, FLAT = "id", "fqn", "flat"
FORMS = (ID, FQN, FLAT)
STATE, GROUPS, PARAMS, PARAM_NAMES = "state", "param_groups", "params", "param_names"
Param = Union[int, str]


@dataclass(frozen=True, slots=True)
class ParamGroup:
    """A param group: its parameters, and all else that it holds (``param_names`` too) in the file's order."""

    params: tuple[Param, ...]
    options: Mapping[str, Any]

    @property
    def param_names(self) -> tuple[str, ...] | None:
        """The FQNs that the optimizer was given with its parameters (torch 2.6 and later), or None."""
        names = self.options.get(PARAM_NAMES)
        if not isinstance(names, (list, tuple)) or len(names) != len(self.params):
            return None
        return tuple(names) if all(isinstance(name, str) for name in names) else None

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """The options without ``param_names``: what has to agree for two groups to be one."""
        return {name: value for name, value in self.options.items() if name != PARAM_NAMES}


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """What an optimizer saved. Values are Python's own, a `TensorEntry`, or an `ExtraEntry` for any other object.

    `state` maps a parameter to its state by name; a parameter that took no step has none. `loose` is state that belongs
    to no parameter, `rest` what stands beside ``state`` and ``param_groups``; both are carried.
    """

    form: str
    groups: tuple[ParamGroup, ...]
    state: Mapping[Param, Mapping[Any, Any]]
    loose: Mapping[str, Any] = field(default_factory=dict)
    rest: Mapping[str, Any] = field(default_factory=dict)

    @property
    def params(self) -> tuple[Param, ...]:
        """Every parameter, in the order of the groups."""
        return tuple(param for group in self.groups for param in group.params)

    @property
    def nonempty_groups(self) -> list[ParamGroup]:
        """The groups that hold parameters."""
        return [group for group in self.groups if group.params]

    @property
    def is_stateless(self) -> bool:
        """Whether no parameter has any state, as after no step, or of SGD without momentum: nothing can be mixed up."""
        return all(value is None for own in self.state.values() for value in own.values())

    def shapes(self, param: Param) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor in a parameter's state, by the name of the state."""
        found = self.state.get(param, {})
        return {str(name): value.shape for name, value in found.items() if isinstance(value, TensorEntry)}


def renamed(state: OptimizerState, names: Mapping[Param, str]) -> OptimizerState:
    """`state` with its parameters under their names, in form ``fqn``."""
    groups = tuple(
        replace(group, params=tuple(names[param] for param in group.params), options=_named(group, names))
        for group in state.groups
    )
    return replace(state, form=FQN, groups=groups, state={names[param]: own for param, own in state.state.items()})


def _named(group: ParamGroup, names: Mapping[Param, str]) -> Mapping[str, Any]:
    if group.param_names is None:
        return group.options
    return {**group.options, PARAM_NAMES: [names[param] for param in group.params]}


def numbered(state: OptimizerState) -> OptimizerState:
    """`state` with its parameters numbered in the order of the groups, as ``Optimizer.state_dict`` does."""
    ids: dict[Param, Param] = {param: index for index, param in enumerate(state.params)}
    groups = tuple(replace(group, params=tuple(ids[param] for param in group.params)) for group in state.groups)
    return replace(state, form=ID, groups=groups, state={ids[p]: state.state[p] for p in ids if p in state.state})


def looks_flat(keys: Sequence[object]) -> bool:
    """Whether a dict with these keys is a flattened optimizer state dict."""
    own = [key for key in keys if isinstance(key, str) and key.startswith((f"{STATE}.", f"{GROUPS}."))]
    return len(own) == len(keys) and any(key.startswith(f"{GROUPS}.") for key in own)


def kept(mapping: Mapping[Any, Any], keys: Collection[str]) -> dict[Any, Any]:
    """The mapping without tensors whose keys are not among `keys`: these were dropped."""
    found: dict[Any, Any] = {}
    for name, value in mapping.items():
        if isinstance(value, Mapping):
            found[name] = kept(value, keys)
        elif name == GROUPS and isinstance(value, list):
            found[name] = [kept(group, keys) if isinstance(group, Mapping) else group for group in value]
        elif not isinstance(value, TensorEntry) or value.key in keys:
            found[name] = value
    return found


Leaf = Callable[["tuple[str, ...]", Any], Any]


def rebuilt(value: Any, leaf: Leaf) -> Any:
    """The value with ``leaf(path, part)`` for every part that holds no others. What this leaves as it was stays shared:

    a flattened optimizer has one list of ``param_names`` for each of its parameters.
    """
    same: set[int] = set()

    def made(part: Any, path: tuple[str, ...]) -> Any:
        if id(part) in same:
            return part
        if isinstance(part, Mapping):
            pairs = {name: made(inner, (*path, str(name))) for name, inner in part.items()}
            return part if _is(part, pairs.values(), part.values(), same) else pairs
        if isinstance(part, (list, tuple)):
            items = [made(inner, (*path, str(index))) for index, inner in enumerate(part)]
            return part if _is(part, items, part, same) else type(part)(items)
        return leaf(path, part)

    return made(value, ())


def _is(whole: object, left: Iterable[object], right: Iterable[object], same: set[int]) -> bool:
    """Whether all parts are the same objects; then notes down `whole`."""
    found = all(map(operator.is_, left, right))
    if found:
        same.add(id(whole))
    return found
