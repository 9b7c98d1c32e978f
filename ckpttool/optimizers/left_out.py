"""An optimizer with ids after parameters of its model were left out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ckpttool.core import expression as ex
from ckpttool.core.checkpoint import TensorEntry
from ckpttool.core.errors import Problem, Refused, same_problem
from ckpttool.core.names import Names
from ckpttool.core.optimizer_state import OptimizerState
from ckpttool.core.strides import Shape
from ckpttool.core.text import plural, shell, some
from ckpttool.naming.model_change import ModelChange
from ckpttool.optimizers.identify import ParamMap, identify_params, names_without_model
from ckpttool.optimizers.parameters import Parameters
from ckpttool.optimizers.request import OptimizerRequest

_FLOATS = ("float", "bfloat", "complex")
_NAME_MODEL = (
    "pass --model MODEL (and --optimizer O), which says whose state it is; or drop the optimizer"
    " too: {drop}"
)


def without_left_out(
    state: OptimizerState, request: OptimizerRequest, narrowed: ModelChange, where: str
) -> OptimizerRequest | None:
    """Return the request for the parameters that are not left out of the model. None if all are
    kept, and if nothing says whose state it is.

    Raise `Refused` if all are left out, and if nothing says whose state the ids are, and one of
    them may belong to a tensor that is left out.
    """
    param_map = _identified(state, request, where)
    if param_map is None:
        # else --select: a note says that it is the state of all parameters
        if request.model is not None:
            _check_none_left_out(state, narrowed, where)
        return None
    keys_of = _serialized_keys(request.names)
    left_out = []
    for name in param_map.names.values():
        if narrowed.loses([name, *keys_of.get(name, ())]):
            left_out.append(name)
    if not left_out:
        return None
    if len(left_out) == len(state.params):
        raise Refused(
            f"{where}: all of its parameters are left out of the model",
            hint=f"drop the optimizer too: {shell('--drop', where)}",
            problems=same_problem("left out of the model", left_out),
        )
    names = frozenset(left_out)
    return replace(request, ruled=narrowed, model=narrowed, owners=param_map, left_out=names)


def _identified(state: OptimizerState, request: OptimizerRequest, where: str) -> ParamMap | None:
    """Return whose state the ids are, if the file or the model says it without a contradiction."""
    state_dicts = request.state_dicts
    if request.names is None:
        return names_without_model(state, state_dicts)
    try:
        param_map = identify_params(state, request.names, where, state_dicts)
    except Refused:
        return None
    return param_map if param_map.doubt is None else None


def _serialized_keys(names: Names | None) -> dict[str, list[str]]:
    """Map the canonical name of each parameter to the serialized keys that are computed from it."""
    keys: dict[str, list[str]] = {}
    if names is None:
        return keys
    canonical = Parameters(names).canonical
    for saved in names.serialized:
        if saved.source is None:
            continue
        for fqn in ex.refs(saved.source):
            if fqn in canonical:
                keys.setdefault(canonical[fqn], []).append(saved.key)
    return keys


def _check_none_left_out(state: OptimizerState, narrowed: ModelChange, where: str) -> None:
    """Raise `Refused` if a tensor that is left out may be one of the parameters that the optimizer
    numbers.
    """
    shapes: set[Shape] = set()  # of parameters, as far as their state shows them
    has_unknown = False
    for param in state.params:
        param_shapes = set(filter(None, state.shapes(param).values()))
        shapes |= param_shapes
        has_unknown |= not param_shapes
    problems = []
    for entry in _dropped_floats(narrowed):
        if has_unknown or entry.shape in shapes:
            problems.append(Problem("left out of the model", entry.key))
    if problems:
        raise Refused(
            f"{where}: parameters may be left out of the model, and nothing says which of its ids"
            " are theirs",
            hint=_NAME_MODEL.format(drop=shell("--drop", where)),
            problems=problems,
        )


def check_names_are_keys(names: Sequence[str], narrowed: ModelChange, where: str) -> None:
    """Raise `Refused` if the model has no key for some parameters, and a tensor that is left out
    may be computed from them.
    """
    keys = narrowed.keys_of(names)
    unknown = [name for name in names if name not in keys]
    if not unknown:
        return
    problems = []
    param_keys = set(keys.values())
    for entry in _dropped_floats(narrowed):
        if entry.key not in param_keys:
            problems.append(Problem("left out of the model", entry.key))
    if problems:
        raise Refused(
            f"{where}: parameters may be left out of the model, which has no key for"
            f" {plural(len(unknown), 'parameter')} of the optimizer: {some(unknown)}",
            hint=_NAME_MODEL.format(drop=shell("--drop", where)),
            problems=problems,
        )


def _dropped_floats(narrowed: ModelChange) -> Iterator[TensorEntry]:
    """Yield the floating-point tensors that are left out: only these are parameters with state."""
    entries = narrowed.section.by_key()
    for dropped in narrowed.plan.dropped:
        entry = entries.get(dropped.key)
        if isinstance(entry, TensorEntry) and entry.dtype.startswith(_FLOATS):
            yield entry
