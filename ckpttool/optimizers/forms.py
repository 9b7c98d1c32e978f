"""The three forms of an optimizer's state dict, read to an `OptimizerState` and written from one.

``id``: torch's own, numbers; ``fqn``: the same with names; ``flat``: one dict with the names in its keys.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckpttool.core.checkpoint import ExtraEntry, Section, TensorEntry
from ckpttool.core.errors import CkptError, Problem, Refused
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
from ckpttool.evaluate.compare import same_objects, same_values

# Reading


def form_of(section: Section) -> str:
    """The form of the optimizer in `section`: ``id``, ``fqn`` or ``flat``."""
    return read(section).form


def read(section: Section) -> OptimizerState:
    """The state of the optimizer in `section`, in whichever form it is.

    Raises `CkptError`, all problems at once, where it is in none of the three.
    """
    mapping = section.mapping
    where = section.title
    if mapping is None:
        raise CkptError(
            f"{where}: this file's format gives no access to an optimizer's hyperparameters",
            hint="convert it to one file of torch.save first",
        )
    mapping = kept(mapping, {entry.key for entry in section.tensors})
    problems: list[Problem] = []
    found = (_read_flat if looks_flat(list(mapping)) else _read_nested)(mapping, problems)
    twice = [param for param, count in Counter(found.params).items() if count > 1]
    problems += [Problem("stands in more than one place of the param groups", str(param)) for param in twice]
    if problems:
        raise CkptError(
            f"{where} is not an optimizer's state dict as torch writes it",
            hint="`ckpttool inspect` shows what is in it",
            problems=problems,
        )
    return found


def _read_nested(mapping: Mapping[Any, Any], problems: list[Problem]) -> OptimizerState:
    for key, kind in ((STATE, Mapping), (GROUPS, (list, tuple))):
        if not isinstance(mapping.get(key), kind):
            problems.append(Problem("is an object of its own", key))
    groups = [_read_group(group, index, problems) for index, group in enumerate(_list(mapping.get(GROUPS)))]
    params = {param for group in groups for param in group.params}
    if len({type(param) for param in params}) > 1:
        problems.append(Problem("some params are ids and some names", GROUPS))
    state: dict[Param, Mapping[Any, Any]] = {}
    loose: dict[str, Any] = {}
    for key, value in _dict(mapping.get(STATE)).items():
        if key in params and isinstance(value, Mapping):
            state[key] = value
        elif isinstance(key, str) and key not in params:
            loose[key] = value
        else:
            text = "is no dict" if key in params else "no param group has this parameter"
            problems.append(Problem(text, f"{STATE}.{key}"))
    rest = {key: value for key, value in mapping.items() if key not in (STATE, GROUPS)}
    named = bool(params) and all(isinstance(param, str) for param in params)
    return OptimizerState(FQN if named else ID, tuple(groups), state, loose, rest)


def _read_group(group: Any, index: int, problems: list[Problem]) -> ParamGroup:
    options = _dict(group)
    params = options.get(PARAMS)
    if not isinstance(params, (list, tuple)) or not all(type(param) in (int, str) for param in params):
        problems.append(Problem("has no list of ids or names", f"{GROUPS}.{index}.{PARAMS}"))
        params = ()
    return ParamGroup(tuple(params), {name: value for name, value in options.items() if name != PARAMS})


def _read_flat(mapping: Mapping[Any, Any], problems: list[Problem]) -> OptimizerState:
    options: dict[str, dict[str, Any]] = {}
    for key, value in mapping.items():
        kind, _, rest = key.partition(".")
        if kind == GROUPS:
            fqn, dot, option = rest.rpartition(".")
            if not dot:
                problems.append(Problem("names no parameter", key))
            options.setdefault(fqn, {})[option] = value
    state: dict[Param, dict[Any, Any]] = {}
    for key, value in mapping.items():
        kind, _, rest = key.partition(".")
        if kind != STATE:
            continue
        fqn = _owner(rest, options)
        if fqn is None:
            problems.append(Problem("no param_groups key names this parameter", key))
        elif not _put(state.setdefault(fqn, {}), rest[len(fqn) + 1 :].split("."), value):
            problems.append(Problem("stands in the place of another part of the state", key))
    return OptimizerState(FLAT, _regrouped(options), state)


def _owner(path: str, params: Container[Param]) -> str | None:
    """Whose state a flat key is: of ``a.b`` and ``a``, if both are there, the state ``a.b.c`` is the first one's."""
    while "." in path:
        path = path.rpartition(".")[0]
        if path in params:
            return path
    return None


def _put(where: dict[Any, Any], path: Sequence[str], value: Any) -> bool:
    """Puts the value where the path leads; False where something else stands there, or on the way."""
    for name in path[:-1]:
        where = where.setdefault(name, {})
        if not isinstance(where, dict):
            return False
    return where.setdefault(path[-1], value) is value


def _regrouped(options: Mapping[str, Mapping[str, Any]]) -> tuple[ParamGroup, ...]:
    """Parameters with equal options as one group, in the order of their first parameters: the flat form has no more."""
    groups: list[tuple[Mapping[str, Any], list[Param]]] = []
    for fqn, own in options.items():
        for known, params in groups:
            if same_options(known, own):
                params.append(fqn)
                break
        else:
            groups.append((own, [fqn]))
    return tuple(ParamGroup(tuple(params), own) for own, params in groups)


def same_options(left: Mapping[str, Any], right: Mapping[str, Any]) -> bool:
    """Whether two groups' options are the same, tensors by their bytes."""
    return left.keys() == right.keys() and all(same_option(left[name], right[name]) for name in left)


def same_option(left: Any, right: Any) -> bool:
    """Whether two values of an option are the same; two tensors are where they are one tensor or hold equal bytes."""
    if left is right:
        return True
    if isinstance(left, TensorEntry) and isinstance(right, TensorEntry):
        return same_values(left, right)
    if isinstance(left, ExtraEntry) and isinstance(right, ExtraEntry):
        return same_objects(left, right)
    if isinstance(left, (TensorEntry, ExtraEntry)) or isinstance(right, (TensorEntry, ExtraEntry)):
        return False
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(map(same_option, left, right))
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return same_options(left, right)
    return bool(left == right) and isinstance(left, bool) == isinstance(right, bool)


def _dict(value: Any) -> Mapping[Any, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else ()


# Writing


def write(state: OptimizerState, section: Section) -> Section:
    """`section` with `state` in it, in the form that `state` says."""
    tensors: list[TensorEntry] = []

    def keyed(path: tuple[str, ...], value: Any) -> Any:
        if not isinstance(value, (TensorEntry, ExtraEntry)):
            return value
        made = replace(value, key=".".join(path))
        tensors.extend([made] if isinstance(made, TensorEntry) else [])
        return made

    mapping = rebuilt(_FORM[state.form](state), keyed)
    return replace(section, kind="optimizer", tensors=tuple(tensors), extras=(), mapping=mapping)


def _nested(state: OptimizerState) -> dict[Any, Any]:
    groups = [{**group.options, PARAMS: list(group.params)} for group in state.groups]
    return {STATE: {**state.state, **state.loose}, GROUPS: groups, **state.rest}


def _flat(state: OptimizerState) -> dict[Any, Any]:
    """Raises `Refused` for what torch.distributed.checkpoint cannot flatten either, and for what would be one key."""
    problems = [Problem("belongs to no parameter", key) for key in (*state.loose, *state.rest)]
    parts: list[tuple[str, Any]] = []
    params = set(state.params)
    for fqn, own in state.state.items():
        found = [*_flattened(str(fqn), own, problems)] if own else []
        parts += [(f"{STATE}.{key}", value) for key, value in found]
        astray = (key for key, _ in found if _owner(key, params) != fqn)
        problems += [Problem("would be the state of another parameter", f"{STATE}.{key}") for key in astray]
    for group in state.groups:
        if not group.params:
            problems.append(Problem("a param group without parameters", GROUPS))
        parts += [(f"{GROUPS}.{fqn}.{name}", v) for fqn in group.params for name, v in group.options.items()]
    flat = dict(parts)
    if len(flat) < len(parts):
        twice = (key for key, count in Counter(key for key, _ in parts).items() if count > 1)
        problems += [Problem("two parameters' names lead to this key", key) for key in twice]
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


_FORM: dict[str, Callable[[OptimizerState], dict[Any, Any]]] = {ID: _nested, FQN: _nested, FLAT: _flat}
