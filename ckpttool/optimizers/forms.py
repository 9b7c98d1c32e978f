"""The three forms of an optimizer's state dict, read to an `OptimizerState` and written from one.

``id``: torch's own, with numbers; ``fqn``: the same with names; ``flat``: one dict with the names
in its keys.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from ckpttool.core.checkpoint import ExtraEntry, Section, TensorEntry
from ckpttool.core.errors import CkptError, Problem, Refused, same_problem
from ckpttool.core.optimizer_state import (
    FLAT,
    FQN,
    GROUPS,
    ID,
    PARAM_NAMES,
    PARAMS,
    STATE,
    OptimizerState,
    Param,
    ParamGroup,
    kept,
    looks_flat,
    rebuilt,
)
from ckpttool.core.values import dataclass
from ckpttool.evaluate.compare import same_objects, same_values
from ckpttool.io.pieces import read_all

# Reading


def read(section: Section) -> OptimizerState:
    """Return the state of the optimizer in `section`, in any form.

    Raises `CkptError`, all problems at once, if it is in none of the three.
    """
    where = section.title
    if section.mapping is None:
        raise CkptError(
            f"{where}: this file's format gives no access to an optimizer's hyperparameters",
            hint="convert it to one file of torch.save first",
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


def same_options(left: Mapping[str, Any], right: Mapping[str, Any]) -> bool:
    """Return True if two groups have the same options; tensors are compared by their bytes."""
    if left.keys() != right.keys():
        return False
    return all(same_option(left[name], right[name]) for name in left)


def same_option(left: Any, right: Any) -> bool:
    """Return True if two values of an option are the same. Tensors are, if their bytes are
    equal.
    """
    if left is right:
        return True
    if isinstance(left, TensorEntry) and isinstance(right, TensorEntry):
        return same_values(left, right)
    if isinstance(left, ExtraEntry) and isinstance(right, ExtraEntry):
        return same_objects(left, right)
    if isinstance(left, TensorEntry):
        return type(right) in (int, float) and _is_number(left, right)
    if isinstance(right, TensorEntry):
        return type(left) in (int, float) and _is_number(right, left)
    if isinstance(left, ExtraEntry) or isinstance(right, ExtraEntry):
        return False
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(map(same_option, left, right))
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return same_options(left, right)
    return bool(left == right) and isinstance(left, bool) == isinstance(right, bool)


_CODES = {"float32": "f", "float64": "d", "int64": "q", "int32": "i"}  # of `struct`


def _is_number(entry: TensorEntry, number: float) -> bool:
    """Return True if the tensor has one element, and that is the number in the tensor's dtype."""
    code = _CODES.get(entry.dtype)
    if code is None or entry.numel != 1 or entry.storage is None:
        return False
    if code in "qi" and type(number) is float:
        return False
    data = read_all(entry.storage.data)
    size = struct.calcsize(code)
    try:
        return bytes(data[entry.offset * size :][:size]) == struct.pack(code, number)
    except (struct.error, OverflowError):
        return False


# Writing


def write(state: OptimizerState, section: Section) -> Section:
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


Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OptimizerClass:
    """`state` are names that together occur in this class only, and so are the hyperparameters
    `options`.
    """

    title: str
    state: frozenset[str]
    options: frozenset[str]


# The first row that fits is the class, so a row whose names are part of another's comes after it.
TABLE = tuple(
    OptimizerClass(title, frozenset(state.split()), frozenset(options.split()))
    for title, state, options in (
        ("NAdam", "exp_avg exp_avg_sq mu_product", "betas momentum_decay"),
        ("Adam or AdamW", "exp_avg exp_avg_sq", "betas amsgrad"),
        ("RAdam", "exp_avg exp_avg_sq", "betas decoupled_weight_decay"),
        ("Adamax", "exp_avg exp_inf", "betas foreach weight_decay"),
        ("SparseAdam", "exp_avg exp_avg_sq", "betas eps maximize"),
        ("Adadelta", "square_avg acc_delta", "rho"),
        ("RMSprop", "square_avg", "alpha centered"),
        ("SGD", "momentum_buffer", "dampening nesterov"),
        ("Muon", "momentum_buffer", "ns_steps"),
        ("Adagrad", "sum", "lr_decay initial_accumulator_value"),
        ("Adafactor", "row_var col_var", "beta2_decay d"),
        ("ASGD", "ax eta mu", "lambd t0"),
        ("Rprop", "prev step_size", "etas step_sizes"),
        ("LBFGS", "old_dirs old_stps", "history_size line_search_fn"),
        ("Adafactor of transformers", "exp_avg_sq_row exp_avg_sq_col", "decay_rate clip_threshold"),
    )
)


def class_of(state: OptimizerState) -> str | None:
    """Return the title of the torch.optim class that the state belongs to; None if the table does
    not know it.

    The param groups' hyperparameters decide, or else the names in the state.
    """
    by_options = _by_options([group.options for group in state.groups])
    if by_options is not None:
        return by_options.title
    names = set(map(str, chain.from_iterable(state.state.values())))
    return next((row.title for row in TABLE if row.state <= names), None)


def _by_options(groups: Iterable[Mapping[str, object]]) -> OptimizerClass | None:
    options = set(chain.from_iterable(groups))
    return next((row for row in TABLE if row.options <= options), None)


# Hyperparameters that torch adds to groups of files that lack them (each class's ``__setstate__``),
# or that a scheduler put there, which no step needs.
_FILLED_IN = frozenset(
    {
        "amsgrad",
        "maximize",
        "foreach",
        "capturable",
        "differentiable",
        "fused",
        "nesterov",
        "centered",
        "decoupled_weight_decay",
        "initial_lr",
        "max_lr",
        "min_lr",
        "base_momentum",
        "max_momentum",
        "swa_lr",
    }
)
# State that a step creates only if a hyperparameter of the file asks for it -> the hyperparameter.
# SGD creates its buffer whenever it is missing.
_ON_REQUEST = {"max_exp_avg_sq": "amsgrad", "grad_avg": "centered", "momentum_buffer": "momentum"}
_CREATED_LATER = frozenset({("SGD", "momentum_buffer")})


def lacking(
    state: OptimizerState,
    groups: Sequence[Mapping[str, object]],
    steps: Mapping[Param, Sequence[str]],
) -> list[str]:
    """Return the keys that an optimizer with these hyperparameters needs and the state of another
    class lacks.

    `steps` are the names of the state that a first step creates for a parameter, if known. torch
    loads such a state, and fails with a ``KeyError`` at the next step (pytorch#7499).
    """
    # the constructor's options are in every group; others are the user's
    options = [name for name in dict.fromkeys(chain.from_iterable(groups)) if _in_all(name, groups)]
    needed = [name for name in options if name != PARAM_NAMES and name not in _FILLED_IN]
    missing = []
    for index, group in enumerate(state.groups):
        for name in needed:
            if name not in group.options:
                missing.append(f"{GROUPS}.{index}.{name}")
    row = _by_options(groups)
    usual = () if row is None or row.title == class_of(state) else sorted(row.state)
    requested = _requested(state, "" if row is None else row.title)
    for param, param_state in state.state.items():
        if not param_state:
            continue
        for name in steps.get(param) or usual:
            is_needed = name not in _ON_REQUEST or name in requested.get(param, ())
            if name not in param_state and is_needed:
                missing.append(f"{STATE}.{param}.{name}")
    return missing


def _in_all(name: str, groups: Sequence[Mapping[str, object]]) -> bool:
    return all(name in group for group in groups)


def _requested(state: OptimizerState, title: str) -> dict[Param, list[str]]:
    """Return parameter -> the names of state that the hyperparameters of its group ask for."""
    requested: dict[Param, list[str]] = {}
    for group in state.groups:
        names = [name for name, option in _ON_REQUEST.items() if group.options.get(option)]
        names = [name for name in names if (title, name) not in _CREATED_LATER]
        requested.update(dict.fromkeys(group.params, names))
    return requested


def with_new_options(
    groups: Sequence[ParamGroup],
    loaded_by: OptimizerState,
    steps: Mapping[Param, Sequence[str]],
    saved: OptimizerState,
) -> tuple[ParamGroup, ...]:
    """Return the groups with the options that a newer version of their optimizer has: `loaded_by`,
    group by group.

    Options that torch adds itself are added to the groups of any class, others only if `saved` is a
    state of the same class: one that has all that a step needs. `steps` are as in `lacking`.
    """
    new = [group.options for group in loaded_by.groups]
    state_keys = [key for key in lacking(saved, new, steps) if not key.startswith(f"{GROUPS}.")]
    same_class = class_of(saved) == class_of(loaded_by) and not state_keys
    filled = []
    for group, options in zip(groups, new):
        added = {}
        for name, value in options.items():
            if name not in group.options and (same_class or name in _FILLED_IN):
                added[name] = [*map(str, group.params)] if name == PARAM_NAMES else value
        filled.append(replace(group, options={**group.options, **added}))
    return tuple(filled)


# State of all parameters together, saved under the first: it cannot move with a parameter.
WHOLE = frozenset({"old_dirs", "old_stps", "H_diag", "prev_flat_grad", "ro", "d", "al"})

ELEMENTWISE = frozenset(
    {
        "exp_avg",
        "exp_avg_sq",
        "max_exp_avg_sq",
        "exp_inf",
        "momentum_buffer",
        "square_avg",
        "grad_avg",
        "acc_delta",
        "sum",
        "ax",
        "prev",
        "step_size",
        "variance",
    }
)

# State with another shape than its parameter -> its shape for a parameter of this shape.
_FACTORED: Mapping[str, Callable[[Shape], Shape]] = {
    "row_var": lambda shape: (*shape[:-1], 1),
    "col_var": lambda shape: (*shape[:-2], 1, shape[-1]),
    "exp_avg_sq_row": lambda shape: shape[:-1],
    "exp_avg_sq_col": lambda shape: (*shape[:-2], shape[-1]),
}


def fits(name: str, state: Shape, parameter: Shape) -> bool:
    """Return True if a parameter of this shape can have a state of this name and shape, and for
    unknown names.
    """
    if name in ELEMENTWISE:
        return state == parameter
    if name in _FACTORED:
        return len(parameter) > 1 and state == _FACTORED[name](parameter)
    return True
