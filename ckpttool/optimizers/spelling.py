"""Names of parameters with the wrappers of the keys next to them, or without."""

from __future__ import annotations

from collections.abc import Mapping

from ckpttool.core.errors import Problem, Refused
from ckpttool.core.optimizer_state import ID, OptimizerState, Param
from ckpttool.naming import wrappers
from ckpttool.naming.model_change import copied
from ckpttool.naming.wrappers import strip
from ckpttool.optimizers.request import OptimizerRequest, OptimizerTask


def spelled_names(
    state: OptimizerState, moved: OptimizerState, task: OptimizerTask
) -> dict[Param, str]:
    """Return the name of each parameter as it is written: names next to ids are spelled as the
    model's keys, with wrappers.

    Raise `Refused` for other forms if the names would have no wrappers next to a model whose keys
    get some.
    """
    request = task.request
    names = {param: str(param) for param in moved.params}
    wrapped = _wrapped_names(moved, request)
    if task.to == ID:
        has_names = all(group.param_names for group in moved.nonempty_groups)
        return names | wrapped if has_names else names
    old_keys = set() if request.model is None else set(request.model.section.keys)
    # torch.distributed.checkpoint names parameters without the wrappers of the keys next to them
    are_apart = state.form != ID and old_keys.isdisjoint(map(str, state.params))
    if wrapped and not are_apart:
        param, name = next(iter(wrapped.items()))
        raise Refused(
            f"{task.where}: the names of its parameters have no wrappers, and the model's keys"
            " would have some",
            hint="--to serialized removes the wrappers from the keys, --optimizer-keys id removes"
            " the names from the optimizer",
            problems=[Problem(f"the key is {name}", str(param))],
        )
    return names


def _wrapped_names(moved: OptimizerState, request: OptimizerRequest) -> dict[Param, str]:
    """Return the parameters whose keys in the model have wrappers, with these keys."""
    keys = set(request.model_keys)
    evidence = wrappers.infer(request.model_keys)
    prefix = f"{evidence.root[-1]}." if evidence.root else ""
    by_name = {strip(key, evidence.paths): key for key in request.model_keys}
    wrapped: dict[Param, str] = {}
    for param in moved.params:
        if param in keys or str(param).startswith(prefix or "."):
            continue
        name = copied(by_name.get(str(param), "")) or prefix + str(param)
        if name != param:
            wrapped[param] = name
    return wrapped


def without_wrappers(names: Mapping[Param, str], request: OptimizerRequest) -> dict[Param, str]:
    """Return the names without the wrappers that the remap removes from the model's keys, or
    replaces.
    """
    model = request.model
    if request.ruled is not None or model is None or not model.renames(list(names.values())):
        return dict(names)
    paths = wrappers.recognize(model.section.keys)
    return {param: strip(name, paths) for param, name in names.items()}
