"""Which old parameters a new one is made of, and its state."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from ckpttool.core import expression as ex
from ckpttool.core.checkpoint import ExtraEntry, Section, Storage, TensorEntry
from ckpttool.core.errors import Problem, Refused
from ckpttool.core.expression import Expression, Op, Ref
from ckpttool.core.names import Names
from ckpttool.core.optimizer_state import (
    ID,
    PARAM_NAMES,
    OptimizerState,
    Param,
    ParamGroup,
    numbered,
    params_of,
)
from ckpttool.core.plan import GroupMove, OptimizerMove
from ckpttool.core.strides import Shape
from ckpttool.core.tables import inverse, selected
from ckpttool.core.text import plural
from ckpttool.evaluate.apply import entry_of
from ckpttool.evaluate.ops import OPS
from ckpttool.naming.convert import with_keys
from ckpttool.naming.match import NameTables
from ckpttool.optimizers.classes import ELEMENTWISE, SHARED_BY_ALL
from ckpttool.optimizers.options import same_option, same_options
from ckpttool.optimizers.parameters import Parameters

_FILE = "(root)"  # the title of an optimizer that is the complete file


def start_from_scratch(where: str) -> str:
    """Return the hint for the optimizer at this path of the file, whose state is of no use."""
    if where == _FILE:
        return "start the optimizer from scratch"
    return (
        f"leave its state out (--drop {shlex.quote(where)}), and start the optimizer from scratch"
    )


Sources = Mapping[str, Expression]  # new name of a parameter -> an expression over the old ones
Shapes = Mapping[str, "Shape | None"]


def identity(params: Sequence[Param]) -> dict[str, Expression]:
    return {str(param): Ref(str(param)) for param in params}


def sources_between(old: Names, new: Names, renamed: Mapping[str, str]) -> dict[str, Expression]:
    """Return the parameters of `new` as expressions over the parameters of `old`, if they can be
    computed.

    `renamed` maps the old parameters to their names after the user's rules. Equal canonical names
    are one parameter; others are matched by the keys that the old model writes and the new one
    loads.
    """
    old_parameters, new_parameters = Parameters(old), Parameters(new)
    by_name: dict[str, Expression] = {}
    for old_name, new_name in renamed.items():
        if new_name in new_parameters.shapes:
            by_name[new_name] = Ref(old_name)
    used = set(ex.refs(tuple(by_name.values())))
    saved: dict[str, Expression] = {}
    for key, written in NameTables(old).saved.items():
        if written is not None:
            saved[key] = written
    sources = dict(by_name)
    for name, source in _of_keys(new_parameters, saved).items():
        whole = _canonical(ex.substitute(source, saved.__getitem__), old_parameters)
        if whole is None:
            continue
        read = set(ex.refs(whole))
        if read <= renamed.keys() and read.isdisjoint(used):
            sources.setdefault(name, whole)
    return selected(sources, new_parameters.shapes)


def to_serialized(names: Names, params: Sequence[Param]) -> dict[str, Expression]:
    """Return each serialized key that is computed from `params`, with its expression. Of tied keys
    one is returned.
    """
    available, parameters = set(map(str, params)), Parameters(names)
    key_of: dict[Expression, str] = {}
    for key, source in NameTables(names).saved.items():
        canonical = None if source is None else _canonical(source, parameters)
        if canonical is not None and available.issuperset(ex.refs(canonical)):
            key_of.setdefault(canonical, key)
    return inverse(key_of)


def from_serialized(names: Names, params: Sequence[Param]) -> dict[str, Expression] | None:
    """Return each parameter as an expression over `params`, if all of these are serialized keys and
    some are computed; otherwise None.
    """
    saved = NameTables(names).saved
    sources = [saved.get(str(param)) for param in params]
    if None in sources or not any(isinstance(source, Op) for source in sources):
        return None
    return _of_keys(Parameters(names), map(str, params))


def _of_keys(parameters: Parameters, keys: Iterable[str]) -> dict[str, Expression]:
    """Return the parameters that these serialized keys give, as expressions over them."""
    by_name = {}
    for fqn, source in NameTables(parameters.names).runtime_values(keys).items():
        if fqn in parameters.canonical:
            by_name[parameters.canonical[fqn]] = source
    return by_name


def _canonical(source: Expression, parameters: Parameters) -> Expression | None:
    """Return the expression over canonical names; None if it reads anything but parameters."""
    if not all(fqn in parameters.canonical for fqn in ex.refs(source)):
        return None
    return with_keys(source, parameters.canonical)


# State


def move_state(
    state: OptimizerState, sources: Sources, shapes: Shapes, where: str
) -> dict[Param, Mapping[Any, Any]]:
    """Return the state of every new parameter that has one. `shapes` has the shapes of the old
    parameters.

    Raises `Refused`, all problems at once, for state that the parameter's expression cannot be
    applied to.
    """
    problems: list[Problem] = []
    carried: dict[Param, Mapping[Any, Any]] = {}
    for name, source in sources.items():
        if isinstance(source, Ref):
            param_state = state.state.get(source.key)
        else:
            param_state = _computed(name, source, state, shapes, problems)
        if param_state is not None:
            carried[name] = param_state
    shared = SHARED_BY_ALL.intersection(map(str, chain.from_iterable(state.state.values())))
    order = list(ex.refs(tuple(sources.values())))
    if shared and order != list(state.params):
        problem = "belongs to all parameters together, in their order"
        problems.append(Problem(problem, ", ".join(sorted(shared))))
    if problems:
        raise Refused(
            f"{where}: state cannot follow its parameters: {plural(len(problems), 'problem')}",
            hint=start_from_scratch(where),
            problems=problems,
        )
    return carried


def _computed(
    name: str, source: Expression, state: OptimizerState, shapes: Shapes, problems: list[Problem]
) -> Mapping[Any, Any] | None:
    refs = list(dict.fromkeys(ex.refs(source)))
    states = [state.state.get(ref, {}) for ref in refs]
    if not any(states):
        return None
    if any(param_state.keys() != states[0].keys() for param_state in states):
        problems.append(Problem(f"{' and '.join(refs)} do not have the same state", name))
        return None
    for op in ex.operators(source):
        if op not in OPS or not OPS[op].moves:
            short = ".".join(op.split(".")[:2])  # without its overload: `aten.mul`
            problem = f"computed by {short}, which changes values: moments do not follow it"
            problems.append(Problem(problem, name))
            return None
    computed = {}
    for entry in states[0]:
        values = {ref: param_state[entry] for ref, param_state in zip(refs, states)}
        try:
            computed[entry] = _value(f"{name}.{entry}", source, values, shapes)
        except Refused as error:
            problems.append(Problem(f"{entry}: {error.message}", name))
    return computed


def _value(key: str, source: Expression, values: Mapping[str, Any], shapes: Shapes) -> Any:
    """Compute one entry of a parameter's state: apply the expression to moments; a step must be
    equal everywhere.
    """
    _, _, slot = key.rpartition(".")
    has_moment_name = slot in ELEMENTWISE
    if all(_is_moment(value, shapes.get(ref), has_moment_name) for ref, value in values.items()):
        return entry_of(key, source, values)
    first, *others = values.values()
    is_tensor = isinstance(first, TensorEntry)
    if isinstance(first, ExtraEntry) or (is_tensor and first.numel != 1):
        raise Refused("it does not have the shape of its parameter", hint="")
    if not all(same_option(first, other) for other in others):
        raise Refused(f"not the same in {', '.join(values)}", hint="")
    # each parameter's step is counted up in place
    if is_tensor and first.storage is not None:
        return replace(first, storage=Storage(first.storage.data), payload=None)
    return first


def _is_moment(value: Any, shape: Shape | None, has_moment_name: bool) -> bool:
    if not isinstance(value, TensorEntry) or value.shape != shape:
        return False
    return value.shape != () or has_moment_name  # a step is a scalar too


# As a plan


def move_of(
    section: Section,
    state: OptimizerState,
    to: str,
    groups: Sequence[ParamGroup],
    sources: Sources,
    shapes: Shapes,
) -> OptimizerMove:
    """Return the change of the optimizer in `section` as data. `sources` are over the parameter
    names of `state`.

    `shapes` are the shapes of these parameters.
    """
    names = map(str, params_of(groups))
    held = selected(sources, names)
    part_shapes = {}
    for source in held.values():
        if isinstance(source, Op):
            for ref in ex.refs(source):
                shape = shapes.get(ref)
                if shape is not None:
                    part_shapes[ref] = shape
    moves = []
    for group in groups:
        like = _index_of_same(group, state.groups)
        options = group.hyperparameters if like is None else {}
        moves.append(GroupMove(tuple(map(str, group.params)), like, options))
    return OptimizerMove(section.path, to, tuple(moves), held, part_shapes)


def _index_of_same(group: ParamGroup, saved: Sequence[ParamGroup]) -> int | None:
    """Return the number of the first saved group with the same options, with names or without."""
    has_names, options = PARAM_NAMES in group.options, group.hyperparameters
    for index, other in enumerate(saved):
        if (PARAM_NAMES in other.options) != has_names:
            continue
        if same_options(other.hyperparameters, options):
            return index
    return None


def in_form(state: OptimizerState, form: str) -> OptimizerState:
    """Return the state, whose parameters have names, in one of the three forms."""
    return numbered(state) if form == ID else replace(state, form=form)
