"""The param groups of an optimizer after a remap: which parameters stand in which, in which order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ckpttool import expression as ex
from ckpttool.errors import Problem, Refused
from ckpttool.expression import Expression
from ckpttool.names import Names
from ckpttool.naming.optimizers.moves import arranged, grouped, identity, placed
from ckpttool.naming.optimizers.parameters import Parameters
from ckpttool.optimizer_state import ID, OptimizerState, ParamGroup


def new_groups(
    named: OptimizerState, sources: Mapping[str, Expression], old: Names | None, new: Names | None, to: str, where: str
) -> tuple[ParamGroup, ...]:
    """The new param groups: those of the new optimizer, or else the old ones in the new model's order.

    `named` is the state under canonical names, `sources` what each new parameter is of them, `to` the form of the keys;
    `old` are the names of who saved it, `new` of who loads it, None where that is the same. Raises `Refused` where
    nothing says in which group a parameter belongs.
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
        return arranged(named, sources, parameters.groups, target.optimizer_groups)
    layout = _in_model_order(named, sources, old, parameters)
    if layout is not None:
        return arranged(named, sources, [layout], ())
    if to != ID:
        return placed(named, sources)
    if any(name not in sources for name in parameters.trainable):
        raise Refused(
            f"{where} has {len(named.groups)} param groups, and the new model has parameters that it has not",
            hint="pass --to-optimizer O, the function that makes the new optimizer",
            problems=[Problem("in which group?", name) for name in parameters.trainable if name not in sources],
        )
    rank = {name: place for place, name in enumerate(parameters.shapes)}
    groups = placed(named, sources)
    return tuple(grouped(sorted(own.params, key=lambda name: rank[str(name)]), own.options) for own in groups)


def renamed_groups(
    named: OptimizerState, sources: Mapping[str, Expression], saved_by: Names | None, where: str
) -> tuple[ParamGroup, ...] | None:
    """The groups of who saved it, its parameters under new names; None where these are not one for each of the old."""
    called = {ref: name for name, source in sources.items() for ref in ex.refs(source)}
    if not len(called) == len(sources) == len(named.params):
        return None
    groups = new_groups(named, identity(named.params), saved_by, None, ID, where)
    return tuple(grouped([called.get(str(p), p) for p in group.params], group.options) for group in groups)


def _ordered_like(groups: tuple[ParamGroup, ...], wanted: Sequence[Sequence[str]]) -> tuple[ParamGroup, ...]:
    """The groups as the optimizer has them, if these are the same: then loading by position finds them too."""
    own = {frozenset(map(str, group.params)): group for group in groups}
    if len(own) != len(groups) or own.keys() != {frozenset(params) for params in wanted}:
        return groups
    return tuple(grouped(params, own[frozenset(params)].options) for params in wanted)


def _same_parameters(named: OptimizerState, parameters: Parameters, where: str) -> None:
    """Raises `Refused` where the optimizer has other parameters than the file: a change of form loses nothing."""
    have, want = set(map(str, named.params)), {name for group in parameters.groups for name in group}
    problems = [Problem("in the file, and not in the optimizer", name) for name in sorted(have - want)]
    problems += [Problem("in the optimizer, and not in the file", name) for name in sorted(want - have)]
    if problems:
        raise Refused(
            f"{where} was not saved by this optimizer: its parameters are others",
            hint="--to-model and --to-optimizer name what is to load it",
            problems=problems,
        )


def _in_model_order(
    named: OptimizerState, sources: Mapping[str, Expression], saved_by: Names | None, parameters: Parameters
) -> list[str] | None:
    """The parameters of an optimizer with one group, as ``model.parameters()`` gives them; None where it has more.

    It is taken to hold what it held before: all parameters of the model, or all that are trainable, or just its own.
    """
    if len(named.nonempty_groups) != 1:
        return None
    old = Parameters(saved_by) if saved_by is not None else parameters
    have = set(map(str, named.params))
    for mine, theirs in ((set(old.shapes), tuple(parameters.shapes)), (set(old.trainable), parameters.trainable)):
        if have == mine:
            return list(theirs)
    return [name for name in parameters.shapes if name in sources]
