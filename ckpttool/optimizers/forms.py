"""The three forms of an optimizer's state dict, read to an `OptimizerState` and written from one.

``id``: torch's own, with numbers; ``fqn``: the same with names; ``flat``: one dict with the names
in its keys.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckpttool.core.checkpoint import ExtraEntry, Section, TensorEntry
from ckpttool.core.errors import CkptError, Problem, Refused, same_problem
from ckpttool.core.optimizer_state import (
    FLAT,
    FQN,
    GROUPS,
    ID,
    PARAMS,
    STATE,
    OptimizerState,
    Param,
    ParamGroup,
    kept,
    looks_flat,
    rebuilt,
)
from ckpttool.optimizers.options import same_options

# Reading


def read(section: Section) -> OptimizerState:
    """Return the state of the optimizer in `section`, in any form.

    Raises `CkptError`, all problems at once, if it is in none of the three.
    """
    where = section.title
    if section.mapping is None:
        raise CkptError(
            f"{where}: its param groups cannot be read: the format has no place for them, or they"
            " share containers too often",
            hint="`ckpttool inspect` shows what is in it; a file of another format can be converted"
            " to one file of torch.save",
        )
    mapping = kept(section.mapping, set(section.tensor_keys))
    problems: list[Problem] = []
    read_form = _read_flat if looks_flat(list(mapping)) else _read_nested
    state = read_form(mapping, problems)
    for param, count in Counter(state.params).items():
        if count > 1:
            problems.append(Problem("is listed more than once in the param groups", str(param)))
    if problems:
        raise CkptError(
            f"{where} is not an optimizer's state dict as torch writes it",
            hint="`ckpttool inspect` shows what is in it",
            problems=problems,
        )
    return state


def _read_nested(mapping: Mapping[Any, Any], problems: list[Problem]) -> OptimizerState:
    states, listed = mapping.get(STATE), mapping.get(GROUPS)
    if not isinstance(states, Mapping):
        problems.append(Problem("is not a dict", STATE))
        states = {}
    if not isinstance(listed, (list, tuple)):
        problems.append(Problem("is not a list", GROUPS))
        listed = ()
    groups = []
    params: set[Param] = set()
    for index, entry in enumerate(listed):
        group = _read_group(entry, index, problems)
        groups.append(group)
        params.update(group.params)
    types = set(map(type, params))
    if len(types) > 1:
        problems.append(Problem("some params are ids and some names", GROUPS))
    state, loose = _read_states(states, params, problems)
    rest = {key: value for key, value in mapping.items() if key not in (STATE, GROUPS)}
    return OptimizerState(FQN if types == {str} else ID, tuple(groups), state, loose, rest)


def _read_states(
    states: Mapping[Any, Any], params: Container[Param], problems: list[Problem]
) -> tuple[dict[Param, Mapping[Any, Any]], dict[str, Any]]:
    """Return the state of each parameter, and state that belongs to no parameter."""
    state: dict[Param, Mapping[Any, Any]] = {}
    loose: dict[str, Any] = {}
    for key, value in states.items():
        if key in params and isinstance(value, Mapping):
            state[key] = value
        elif key in params:
            problems.append(Problem("is not a dict", f"{STATE}.{key}"))
        elif isinstance(key, str):
            loose[key] = value
        else:
            problems.append(Problem("no param group has this parameter", f"{STATE}.{key}"))
    return state, loose


def _read_group(group: Any, index: int, problems: list[Problem]) -> ParamGroup:
    options = dict(group) if isinstance(group, Mapping) else {}
    params = options.pop(PARAMS, None)
    is_list = isinstance(params, (list, tuple))
    if not is_list or not all(type(param) in (int, str) for param in params):
        problems.append(Problem("has no list of ids or names", f"{GROUPS}.{index}.{PARAMS}"))
        params = ()
    return ParamGroup(tuple(params), options)


def _read_flat(mapping: Mapping[Any, Any], problems: list[Problem]) -> OptimizerState:
    options: dict[str, dict[str, Any]] = {}
    values: dict[str, Any] = {}  # of the state
    for key, value in mapping.items():
        kind, _, rest = key.partition(".")
        if kind == STATE:
            values[key] = value
        elif kind == GROUPS:
            fqn, dot, option = rest.rpartition(".")
            if not dot:
                problems.append(Problem("names no parameter", key))
            options.setdefault(fqn, {})[option] = value
    state: dict[Param, dict[Any, Any]] = {}
    for key, value in values.items():
        _, _, path = key.partition(".")
        owner = _owner(path, options)
        if owner is None:
            problems.append(Problem("no param_groups key names this parameter", key))
            continue
        slots = path.removeprefix(f"{owner}.").split(".")
        if not _put(state.setdefault(owner, {}), slots, value):
            problems.append(Problem("conflicts with another part of the state", key))
    return OptimizerState(FLAT, _equal_groups(options), state)


def _equal_groups(options: Mapping[str, Mapping[str, Any]]) -> tuple[ParamGroup, ...]:
    """Return the groups of a flattened optimizer, which does not keep them: parameters with equal
    options are one group, in the order of the first.
    """
    params: list[list[Param]] = []
    group_options: list[Mapping[str, Any]] = []
    for fqn, fqn_options in options.items():
        for index, others in enumerate(group_options):
            if same_options(others, fqn_options):
                params[index].append(fqn)
                break
        else:
            params.append([fqn])
            group_options.append(fqn_options)
    return tuple(map(ParamGroup, map(tuple, params), group_options))


def _owner(path: str, params: Container[Param]) -> str | None:
    """Return the parameter that a flat key belongs to. Of ``a.b`` and ``a``, the key ``a.b.c``
    belongs to ``a.b``.
    """
    while "." in path:
        path = path.rpartition(".")[0]
        if path in params:
            return path
    return None


def _put(mapping: dict[Any, Any], path: Sequence[str], value: Any) -> bool:
    """Put the value at the path. Return False if there is something else, there or on the way."""
    for name in path[:-1]:
        mapping = mapping.setdefault(name, {})
        if not isinstance(mapping, dict):
            return False
    return mapping.setdefault(path[-1], value) is value


# Writing


def write(state: OptimizerState, section: Section) -> Section:
    """Return the section with this state, in the form that the state has."""
    tensors: list[TensorEntry] = []

    def keyed(path: tuple[str, ...], value: Any) -> Any:
        if not isinstance(value, (TensorEntry, ExtraEntry)):
            return value
        entry = replace(value, key=".".join(path))
        if isinstance(entry, TensorEntry):
            tensors.append(entry)
        return entry

    if state.form == FLAT:
        mapping = _flat(state)
    else:
        groups = [{**group.options, PARAMS: list(group.params)} for group in state.groups]
        mapping = {STATE: {**state.state, **state.loose}, GROUPS: groups, **state.rest}
    mapping = rebuilt(mapping, keyed)
    return replace(section, kind="optimizer", tensors=tuple(tensors), extras=(), mapping=mapping)


def _flat(state: OptimizerState) -> dict[Any, Any]:
    """Return one dict: ``state.layers.0.weight.exp_avg``, ``param_groups.layers.0.weight.lr``, ...

    Raises `Refused` for state that torch.distributed.checkpoint cannot flatten either, and for
    conflicting keys.
    """
    problems = same_problem("belongs to no parameter", (*state.loose, *state.rest))
    parts: list[tuple[str, Any]] = []
    params = set(state.params)
    for fqn, param_state in state.state.items():
        if not param_state:
            continue
        for key, value in _flattened(str(fqn), param_state, problems):
            path = f"{STATE}.{key}"
            parts.append((path, value))
            if _owner(key, params) != fqn:
                problems.append(Problem("would be the state of another parameter", path))
    for group in state.groups:
        if not group.params:
            problems.append(Problem("a param group without parameters", GROUPS))
        for fqn in group.params:
            for name, value in group.options.items():
                parts.append((f"{GROUPS}.{fqn}.{name}", value))
    flat = dict(parts)
    if len(flat) < len(parts):
        for key, count in Counter(key for key, _ in parts).items():
            if count > 1:
                problems.append(Problem("two parameters' names lead to this key", key))
    if problems:
        raise Refused(
            "the flattened form has no place for all of this optimizer's state",
            hint="--optimizer-keys fqn names the parameters and keeps the rest as it is",
            problems=problems,
        )
    return flat


def _flattened(prefix: str, value: Any, problems: list[Problem]) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, Mapping):
        yield prefix, value
        if isinstance(value, (list, tuple)):
            problems.append(Problem("a list in the state of a parameter", f"{STATE}.{prefix}"))
    elif not value:
        problems.append(Problem("an empty dict in the state of a parameter", f"{STATE}.{prefix}"))
    else:
        for name, part in value.items():
            yield from _flattened(f"{prefix}.{name}", part, problems)
