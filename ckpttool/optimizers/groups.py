"""The param groups of an optimizer after a remap, and the order of its parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

from ckpttool.core import expression as ex
from ckpttool.core.errors import Problem, Refused
from ckpttool.core.expression import Expression
from ckpttool.core.names import Names
from ckpttool.core.optimizer_state import (
    FLAT,
    ID,
    OptimizerState,
    Param,
    ParamGroup,
)
from ckpttool.core.text import plural, some
from ckpttool.optimizers.forms import with_new_options
from ckpttool.optimizers.identify import (
    Parameters,
)
from ckpttool.optimizers.transform import (
    arranged,
    grouped,
    placed,
)


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
        return placed(named, sources)
    parameters = Parameters(target)
    if new is None and to != ID:
        return _ordered_like(placed(named, sources), parameters.groups)
    if parameters.groups and (target.optimizer or target.optimizer_groups):
        if new is None:
            _same_parameters(named, parameters, where)
        groups = arranged(
            named, sources, parameters.groups, target.optimizer_groups, by_parameter=was == FLAT
        )
        if new is None:
            return groups
        return with_new_options(groups, parameters.fresh_optimizer, parameters.first_step, named)
    layout = _in_model_order(named, sources, old, parameters)
    if layout is not None:
        return arranged(named, sources, [layout], ())
    if to != ID:
        return placed(named, sources)
    added = [name for name in parameters.trainable if name not in sources]
    if added:
        raise Refused(
            f"{where} has {len(named.groups)} param groups, and the new model has parameters that"
            " it has not",
            hint="pass --to-optimizer O, the function that makes the new optimizer",
            problems=[Problem("in which group?", name) for name in added],
        )
    rank = {name: place for place, name in enumerate(parameters.shapes)}
    ordered = []
    for group in placed(named, sources):
        params = sorted(group.params, key=lambda name: rank[str(name)])
        ordered.append(grouped(params, group.options))
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
    return tuple(grouped(params, by_params[frozenset(params)].options) for params in order)


def _same_parameters(named: OptimizerState, parameters: Parameters, where: str) -> None:
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
            f"{where} was not saved by this optimizer: its parameters are others",
            hint="--to-model and --to-optimizer name what is to load it",
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

    It holds the same as before: all parameters of the model, or all trainable ones, or only its
    own.
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
        renamed_groups.append(grouped(params, group.options))
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
            " learning-rate scheduler that was saved has one value for each of the old ones"
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
            f"{where}: left out, the state of {plural(len(dropped), 'parameter')}: {some(dropped)}"
        )
    if state.form == FLAT and to != FLAT and not any(group.param_names for group in state.groups):
        notes.append(
            f"{where}: the flattened form does not say which param groups there were; parameters"
            f" with the same hyperparameters are one group now ({len(state.groups)} in all)"
        )
    return notes
