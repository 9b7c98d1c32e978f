"""An optimizer's state dict as a value, with parameters named by ids, FQNs or flat keys."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from itertools import chain
from typing import Any, NamedTuple, Union

from ckpttool.core.checkpoint import TensorEntry
from ckpttool.core.strides import Shape
from ckpttool.core.values import dataclass

ID, FQN, FLAT = "id", "fqn", "flat"
FORMS = (ID, FQN, FLAT)
STATE, GROUPS, PARAMS, PARAM_NAMES = "state", "param_groups", "params", "param_names"
Param = Union[int, str]


class FilledTensor(NamedTuple):
    """A tensor of state whose elements are one number."""

    dtype: str
    shape: Shape
    fill: float | bool


@dataclass(frozen=True, slots=True)
class ParamGroup:
    """A param group: its parameters, and its other entries (``param_names`` too) in the file's
    order.
    """

    params: tuple[Param, ...]
    options: Mapping[str, Any]

    @property
    def param_names(self) -> tuple[str, ...] | None:
        """The FQNs that the optimizer was given with its parameters (torch 2.6 and later), or
        None.
        """
        names = self.options.get(PARAM_NAMES)
        if not isinstance(names, (list, tuple)) or len(names) != len(self.params):
            return None
        return tuple(names) if all(isinstance(name, str) for name in names) else None

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """The options without ``param_names``: equal for two groups that can be merged."""
        return {name: value for name, value in self.options.items() if name != PARAM_NAMES}


def params_of(groups: Iterable[ParamGroup]) -> Iterator[Param]:
    """Return the parameters of the groups, one group after the other."""
    return chain.from_iterable(group.params for group in groups)


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """The saved state of an optimizer. Values are plain Python, a `TensorEntry`, or an `ExtraEntry`
    for other objects.

    `state` maps a parameter to its state by name; a parameter that took no step has none. `loose`
    is state without a parameter, `rest` the entries other than ``state`` and ``param_groups``; both
    are copied.
    """

    form: str
    groups: tuple[ParamGroup, ...]
    state: Mapping[Param, Mapping[Any, Any]]
    loose: Mapping[str, Any] = field(default_factory=dict)
    rest: Mapping[str, Any] = field(default_factory=dict)

    @property
    def params(self) -> tuple[Param, ...]:
        return tuple(params_of(self.groups))

    @property
    def nonempty_groups(self) -> list[ParamGroup]:
        return [group for group in self.groups if group.params]

    @property
    def is_stateless(self) -> bool:
        """True if no parameter has any state, as before the first step, or for SGD without
        momentum.
        """
        values = chain(*(slots.values() for slots in self.state.values()))
        return all(value is None for value in values)

    def shapes(self, param: Param) -> dict[str, Shape]:
        """Return the shape of each tensor in a parameter's state, by the name of the state."""
        shapes = {}
        for name, value in self.state.get(param, {}).items():
            if isinstance(value, TensorEntry):
                shapes[str(name)] = value.shape
        return shapes


def with_filled(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of a parameter with `FilledTensor` tensors, which JSON has as lists."""
    values = {}
    for name, value in state.items():
        if isinstance(value, list):
            dtype, shape, fill = value
            value = FilledTensor(dtype, tuple(shape), fill)
        values[name] = value
    return values


def renamed(state: OptimizerState, names: Mapping[Param, str]) -> OptimizerState:
    """Return the state with parameters under their names, in form ``fqn``."""
    groups = []
    for group in state.groups:
        params = tuple(names[param] for param in group.params)
        options = group.options
        if group.param_names is not None:
            options = {**options, PARAM_NAMES: [*params]}
        groups.append(ParamGroup(params, options))
    by_name: dict[Param, Mapping[Any, Any]] = {}
    for param, slots in state.state.items():
        by_name[names[param]] = slots
    return replace(state, form=FQN, groups=tuple(groups), state=by_name)


def numbered(state: OptimizerState) -> OptimizerState:
    """Return the state with parameters numbered in the order of the groups, as
    ``Optimizer.state_dict`` does.
    """
    ids: dict[Param, Param] = {param: index for index, param in enumerate(state.params)}
    groups = []
    for group in state.groups:
        groups.append(replace(group, params=tuple(ids[param] for param in group.params)))
    by_id = {ids[param]: state.state[param] for param in ids if param in state.state}
    return replace(state, form=ID, groups=tuple(groups), state=by_id)


def looks_flat(keys: Sequence[object]) -> bool:
    """Return True if a dict with these keys is a flattened optimizer state dict."""
    has_groups = False
    for key in keys:
        if not isinstance(key, str) or not key.startswith((f"{STATE}.", f"{GROUPS}.")):
            return False
        has_groups = has_groups or key.startswith(f"{GROUPS}.")
    return has_groups


def kept(mapping: Mapping[Any, Any], keys: Collection[str]) -> dict[Any, Any]:
    """Return the mapping without tensors whose keys are not in `keys`: these were dropped."""
    result: dict[Any, Any] = {}
    for name, value in mapping.items():
        if isinstance(value, Mapping):
            result[name] = kept(value, keys)
        elif name == GROUPS and isinstance(value, list):
            groups = []
            for part in value:
                groups.append(kept(part, keys) if isinstance(part, Mapping) else part)
            result[name] = groups
        elif not isinstance(value, TensorEntry) or value.key in keys:
            result[name] = value
    return result


Leaf = Callable[["tuple[str, ...]", Any], Any]


def rebuilt(value: Any, leaf: Leaf) -> Any:
    """Return the value with ``leaf(path, part)`` for every part that has no parts.

    Unchanged parts stay shared: a flattened optimizer has one list of ``param_names`` for each of
    its parameters.
    """
    same: set[int] = set()

    def rebuild(part: Any, path: tuple[str, ...]) -> Any:
        if id(part) in same:
            return part
        if isinstance(part, Mapping):
            pairs = {name: rebuild(inner, (*path, str(name))) for name, inner in part.items()}
            if not all(map(operator.is_, pairs.values(), part.values())):
                return pairs
        elif isinstance(part, (list, tuple)):
            items = [rebuild(inner, (*path, str(index))) for index, inner in enumerate(part)]
            if not all(map(operator.is_, items, part)):
                return type(part)(items)
        else:
            return leaf(path, part)
        same.add(id(part))
        return part

    return rebuild(value, ())
