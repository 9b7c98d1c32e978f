"""The param groups of an optimizer after a remap, and the order of its parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from ckpttool.core import expression as ex
from ckpttool.core.errors import Problem, Refused, same_problem
from ckpttool.core.expression import Expression
from ckpttool.core.names import Names
from ckpttool.core.optimizer_state import (
    FLAT,
    ID,
    PARAM_NAMES,
    OptimizerState,
    Param,
    ParamGroup,
    params_of,
)
from ckpttool.core.tables import positions, selected
from ckpttool.core.text import plural, some
from ckpttool.optimizers.classes import with_new_options
from ckpttool.optimizers.options import different, number_of, same_options
from ckpttool.optimizers.parameters import Parameters


def new_groups(
    named: OptimizerState,
    sources: Mapping[str, Expression],
    old: Names | None,
    new: Names | None,
    was: str,
    to: str,
    where: str,
) -> tuple[ParamGroup, ...]:
    """Return the new param groups: the new optimizer's, or else the old ones in the new model's
    order.

    `named` is the state under canonical names, `sources` each new parameter as an expression over
    these, `was` and `to` are the old and the new form of the keys; `old` are the names of the model
    that saved it, `new` of the model that loads it, None for the same one. Raise `Refused` if it is
    unknown to which group a parameter belongs.
    """
    target = new or old
    if target is None:
        return keep_groups(named, sources)
    parameters = Parameters(target)
    if new is None and to != ID:
        return _ordered_like(keep_groups(named, sources), parameters.groups)
    if parameters.groups:
        if new is None:
            _require_same_parameters(named, parameters, where)
        groups = fill_layout(
            named, sources, parameters.groups, parameters.options, by_parameter=was == FLAT
        )
        if new is None:
            return groups
        return with_new_options(groups, parameters.fresh_optimizer, parameters.first_step, named)
    layout = _in_model_order(named, sources, old, parameters)
    if layout is not None:
        return fill_layout(named, sources, [layout], ())
    if to != ID:
        return keep_groups(named, sources)
    added = [name for name in parameters.trainable if name not in sources]
    if added:
        raise Refused(
            f"{where} has {len(named.groups)} param groups, and the new model adds parameters:"
            " their group is unknown",
            hint="pass --to-optimizer O, the function that makes the new optimizer",
            problems=same_problem("its group is unknown", added),
        )
    rank = positions(parameters.shapes)
    ordered = []
    for group in keep_groups(named, sources):
        params = sorted(group.params, key=lambda name: rank[str(name)])
        ordered.append(group_of(params, group.options))
    return tuple(ordered)


def _ordered_like(
    groups: tuple[ParamGroup, ...], order: Sequence[Sequence[str]]
) -> tuple[ParamGroup, ...]:
    """Return the groups in the optimizer's order, if they are the same, so that loading by position
    works too.
    """
    by_params = {frozenset(map(str, group.params)): group for group in groups}
    if len(by_params) != len(groups) or by_params.keys() != set(map(frozenset, order)):
        return groups
    return tuple(group_of(params, by_params[frozenset(params)].options) for params in order)


def _require_same_parameters(named: OptimizerState, parameters: Parameters, where: str) -> None:
    """Raise `Refused` if the optimizer has other parameters than the file: a change of form loses
    nothing.
    """
    saved, expected = set(map(str, named.params)), set(chain.from_iterable(parameters.groups))
    problems = []
    for name in sorted(saved - expected):
        problems.append(Problem("in the file, and not in the optimizer", name))
    for name in sorted(expected - saved):
        problems.append(Problem("in the optimizer, and not in the file", name))
    if problems:
        raise Refused(
            f"{where} was not saved by this optimizer: its parameters differ",
            hint="pass --to-model and --to-optimizer for the model that will load it",
            problems=problems,
        )


def _in_model_order(
    named: OptimizerState,
    sources: Mapping[str, Expression],
    saved_by: Names | None,
    parameters: Parameters,
) -> list[str] | None:
    """Return the parameters of an optimizer with one group, in ``model.parameters()`` order; None
    if it has more.

    If the file has all parameters of the model, so has the new one; if it has all trainable ones,
    the new one has these; otherwise it has the parameters that the file has.
    """
    if len(named.nonempty_groups) != 1:
        return None
    old = Parameters(saved_by) if saved_by is not None else parameters
    saved = set(map(str, named.params))
    if saved == set(old.shapes):
        return list(parameters.shapes)
    if saved == set(old.trainable):
        return list(parameters.trainable)
    return [name for name in parameters.shapes if name in sources]


def with_new_names(
    groups: Sequence[ParamGroup], sources: Mapping[str, Expression]
) -> tuple[ParamGroup, ...]:
    """Return the groups with the new name of each parameter: there is one for each old one."""
    new_names: dict[Param, Param] = {}
    for name, source in sources.items():
        for old_name in ex.refs(source):
            new_names[old_name] = name
    renamed_groups = []
    for group in groups:
        params = [new_names.get(str(param), param) for param in group.params]
        renamed_groups.append(group_of(params, group.options))
    return tuple(renamed_groups)


def notes_on_change(
    where: str,
    state: OptimizerState,
    moved: OptimizerState,
    to: str,
    new: Sequence[str],
    dropped: Sequence[str],
) -> list[str]:
    """Return notes on groups, hyperparameters and state that are others than before. Of the
    parameters, `new` have no state, and the state of `dropped` is left out.
    """
    notes = []
    if len(moved.groups) != len(state.groups):
        notes.append(
            f"{where}: {plural(len(moved.groups), 'param group')}, not {len(state.groups)}: a"
            " saved learning-rate scheduler has one value for each old group"
        )
    old_options = set(chain.from_iterable(group.options for group in state.groups))
    options = dict.fromkeys(chain.from_iterable(group.options for group in moved.groups))
    added = [name for name in options if name not in old_options]
    if added and old_options:
        notes.append(
            f"{where}: added to the param groups, as the new optimizer has them: {some(added)}"
        )
    if new:
        notes.append(f"{where}: new, and without state: {some(new)}")
    if dropped:
        notes.append(
            f"{where}: state of {plural(len(dropped), 'parameter')} left out: {some(dropped)}"
        )
    if state.form == FLAT and to != FLAT and not any(group.param_names for group in state.groups):
        notes.append(
            f"{where}: the flattened form does not say which param groups there were; parameters"
            f" with the same hyperparameters are one group now ({len(state.groups)} in all)"
        )
    return notes


# Groups of parameters


def group_of(params: Sequence[Param], options: Mapping[str, Any]) -> ParamGroup:
    """Return a group of `params` with these options. Its ``param_names``, if any, are updated."""
    if PARAM_NAMES in options:
        options = {**options, PARAM_NAMES: [str(param) for param in params]}
    return ParamGroup(tuple(params), options)


def keep_groups(state: OptimizerState, sources: Mapping[str, Expression]) -> tuple[ParamGroup, ...]:
    """Return the old groups with the new parameters in the old ones' positions. A group that loses
    all is left out.
    """
    home = _group_index(state)
    position = positions(map(str, state.params))

    def first_position(name: str) -> int:
        return min(position[ref] for ref in ex.refs(sources[name]))

    members: list[list[Param]] = [[] for _ in state.groups]
    for name in sorted(sources, key=first_position):
        refs = list(dict.fromkeys(ex.refs(sources[name])))
        first, *others = sorted({home[ref] for ref in refs})
        options = state.groups[first].hyperparameters
        if not all(same_options(options, state.groups[other].hyperparameters) for other in others):
            raise Refused(
                f"{name} is made of parameters of different param groups",
                hint="pass --to-optimizer O, the function that makes the new optimizer",
                problems=[Problem(f"param group {home[ref]}", ref) for ref in refs],
            )
        members[first].append(name)
    groups = []
    for params, group in zip(members, state.groups):
        if params or not group.params:
            groups.append(group_of(params, group.options))
    return tuple(groups)


def _group_index(state: OptimizerState) -> dict[str, int]:
    """Return the number of each parameter's group."""
    home: dict[str, int] = {}
    for index, group in enumerate(state.groups):
        home.update(dict.fromkeys(map(str, group.params), index))
    return home


def fill_layout(
    state: OptimizerState,
    sources: Mapping[str, Expression],
    layout: Sequence[Sequence[str]],
    defaults: Sequence[Mapping[str, Any]],
    *,
    by_parameter: bool = False,
) -> tuple[ParamGroup, ...]:
    """Return the groups of `layout`, which the new optimizer's code makes with the hyperparameters
    `defaults`.

    A group with the parameters of a saved group keeps that one's hyperparameters, as in
    ``load_state_dict``. Any other group is new: it takes the fields that the code sets. Without
    `defaults` it takes the fields of the first saved group of its parameters, or of the file.
    `by_parameter`: the file has hyperparameters of parameters and not of groups (a flattened
    optimizer), so no group is new that has one of these. Raises `Refused` if a group gets
    parameters from groups with different hyperparameters, and nothing says which of them it has.
    """
    home = _group_index(state)
    problems: list[Problem] = []
    groups = []
    for index, params in enumerate(layout):
        where = f"param_groups.{index}"
        expressions = [sources[name] for name in params if name in sources]
        read = set(ex.refs(tuple(expressions)))
        homes = sorted({home[ref] for ref in read})
        saved_groups = [state.groups[number] for number in homes]
        default = defaults[index] if index < len(defaults) else {}
        is_saved = len(homes) == 1 and sources.keys() >= {*params}
        if is_saved:
            is_saved = read == set(map(str, saved_groups[0].params))
        old_groups = saved_groups or list(state.groups)
        if default and not is_saved and not (by_parameter and homes):
            groups.append(group_of(params, _new_options(default, old_groups, where, problems)))
            continue
        options = old_groups[0].options if old_groups else default
        for number, group in zip(homes[1:], saved_groups[1:]):
            differing = different(saved_groups[0].hyperparameters, group.hyperparameters)
            for name, (first, other) in differing.items():
                problem = f"{name} is {first} in param group {homes[0]} and {other} in {number}"
                problems.append(Problem(problem, where))
        groups.append(group_of(params, options))
    if problems:
        raise Refused(
            "parameters of groups with different hyperparameters come together in one group",
            hint="keep them in separate groups of the new optimizer",
            problems=problems,
        )
    return tuple(groups)


LR, INITIAL_LR = "lr", "initial_lr"


def _new_options(
    default: Mapping[str, Any], saved: Sequence[ParamGroup], where: str, problems: list[Problem]
) -> dict[str, Any]:
    """Return the options of a new group: what the code sets, then what else the saved groups have.

    If a scheduler changed the saved learning rate, the new one changes by the same factor.
    """
    options = dict(saved[0].options) if saved else {}
    for group in saved[1:]:
        for name, (first, other) in different(options, group.options).items():
            if name not in (*default, LR, INITIAL_LR, PARAM_NAMES):
                problems.append(Problem(f"{name} is {first} and {other} in its groups", where))
    options.update(default)
    factors = set[float]()
    for group in saved:
        lr, initial_lr = number_of(group.options.get(LR)), number_of(group.options.get(INITIAL_LR))
        if lr is not None and initial_lr:
            factors.add(lr / initial_lr)
    base = number_of(default.get(LR))
    if base is None or not factors:
        return options
    if len(factors) > 1:
        texts = ", ".join(f"{factor:g}" for factor in sorted(factors))
        problems.append(Problem(f"its learning rates are {texts} of their initial ones", where))
        return options
    (factor,) = factors
    options[INITIAL_LR] = base
    options[LR] = base * factor
    return options


def changed_options(
    state: OptimizerState, sources: Mapping[str, Expression], groups: Sequence[ParamGroup]
) -> list[str]:
    """Return each hyperparameter that a group has and the saved group of its parameters has not, as
    text.
    """
    home = _group_index(state)
    texts = []
    for index, group in enumerate(groups):
        expressions = [sources[str(param)] for param in group.params if str(param) in sources]
        read = list(ex.refs(tuple(expressions)))
        if not read:
            continue
        saved = state.groups[min(home[ref] for ref in read)]
        differing = different(saved.hyperparameters, group.hyperparameters)
        for name, (old, new) in differing.items():
            texts.append(f"param group {index}: {name} {new} ({old} in the file)")
    return texts


def with_groups(
    state: OptimizerState, groups: tuple[ParamGroup, ...], param_states: Mapping[Param, Any]
) -> OptimizerState:
    """Return `state` with these groups and this state, in the order of the groups."""
    params = params_of(groups)
    ordered = selected(param_states, params)
    return replace(state, groups=groups, state=ordered)
