"""The parameters of an optimizer after a remap, as expressions over the old ones."""

from __future__ import annotations

from collections.abc import Container, Mapping

from ckpttool.core import expression as ex
from ckpttool.core.errors import Problem, Refused, same_problem
from ckpttool.core.expression import Expression, Ref
from ckpttool.core.names import SERIALIZED, Names
from ckpttool.core.optimizer_state import ID, OptimizerState
from ckpttool.core.text import shell
from ckpttool.naming.model_change import ModelChange, is_whole
from ckpttool.optimizers.identify import (
    match_to_model,
)
from ckpttool.optimizers.request import OptimizerTask
from ckpttool.optimizers.transform import (
    identity,
    sources_between,
    start_from_scratch,
    to_serialized,
)


def sources_of_new_params(
    named: OptimizerState, task: OptimizerTask
) -> tuple[dict[str, Expression], bool]:
    """Return the new parameters as expressions over the old ones, and whether they follow the keys
    of the model.

    The first that applies decides: parameters that are left out, the rules, the names of another
    model, a function that renames.
    """
    request = task.request
    if request.left_out and request.ruled is not None:
        return _kept(named, request.left_out, request.ruled), True
    ruled = _by_rules(named, task)
    if ruled is not None:
        return ruled, True
    names, called = request.names, request.called or str
    if request.to_names is not None and names is not None:
        new_names = {str(param): called(str(param)) for param in named.params}
        return sources_between(names, request.to_names, new_names), False
    if request.form == SERIALIZED and names is not None and task.to != ID:
        before = to_serialized(names, named.params)
    else:
        before = identity(named.params)
    after = {called(name): source for name, source in before.items()}
    if len(after) < len(before):
        raise Refused(
            "the rules give several parameters of the optimizer one name",
            hint="`--dry-run` shows the names",
        )
    return after, False


def _by_rules(named: OptimizerState, task: OptimizerTask) -> dict[str, Expression] | None:
    """Return the parameters after the rules; None without rules, or if no parameter is a tensor of
    the model.
    """
    request, where = task.request, task.where
    ruled = request.ruled
    if ruled is None:
        return None
    before = identity(named.params)
    if request.names is not None:
        serialized = to_serialized(request.names, named.params)
        if len(ruled.shapes(list(serialized))) > len(ruled.shapes(list(before))):
            before = serialized
    after = ruled.sources(before, where)
    if after is None:
        if not ruled.keeps_places and len(request.state_dicts) == 1:
            raise Refused(
                f"{where}: none of its parameters is a tensor of the model, so that its state"
                " cannot follow the tensors",
                hint=start_from_scratch(where),
                problems=[Problem("no tensor of the model", str(param)) for param in named.params],
            )
        return None
    if task.keeps_ids:
        _check_places(named, after, ruled is request.narrowed, where)
    return after


def _kept(
    named: OptimizerState, left_out: Container[str], change: ModelChange
) -> dict[str, Expression]:
    """Return the parameters that are not left out, under the new names of their keys."""
    names = [str(param) for param in named.params if param not in left_out]
    new_names = change.new_names(names)
    return {new_names.get(name, name): Ref(name) for name in names}


def _check_places(
    named: OptimizerState, after: Mapping[str, Expression], is_narrowed: bool, where: str
) -> None:
    """Raise `Refused` unless each parameter stays one, so that ids can stay what they are."""
    kept = set(ex.refs(tuple(after.values())))
    if len(after) == len(kept) == len(named.params) and all(map(is_whole, after.values())):
        return
    if is_narrowed:
        left_out = [str(param) for param in named.params if str(param) not in kept]
        raise Refused(
            f"{where}: parameters of the model are left out, and the optimizer still numbers them",
            hint=f"drop the optimizer too: {shell('--drop', where)}; or pass --optimizer-keys fqn,"
            " to keep the state of the other parameters under their names",
            problems=same_problem("left out of the model", left_out),
        )
    raise Refused(
        f"{where}: the model gets other parameters, and nothing says in which order it registers"
        " them",
        hint="pass --to-model NEW, the model that is to load it; or --optimizer-keys fqn,"
        " which names them",
    )


def under_names_of(
    sources: Mapping[str, Expression], names: Names, where: str
) -> dict[str, Expression]:
    """Return `sources` under the canonical names of the model that will load them, if it has these
    names.
    """
    canonical, problems = match_to_model(sources, names)
    if not canonical:
        raise Refused(
            f"{where}: none of its parameters has a name of {names.model}",
            hint="--rule 'FROM => TO' says which parameter is which",
            problems=problems,
        )
    return {canonical[name]: source for name, source in sources.items() if name in canonical}
