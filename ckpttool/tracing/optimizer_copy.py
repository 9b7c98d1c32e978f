"""Copies of a live optimizer, for copies of its model."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any

import torch
from torch.nn import Module
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from ckpttool.core.errors import CkptError, Problem
from ckpttool.core.text import plural
from ckpttool.naming.wrappers import strip
from ckpttool.tracing.instances import is_dtensor, wrapper_paths
from ckpttool.tracing.user_code import attempt


def like(optimizer: Optimizer, model: Module) -> Callable[[Module], Optimizer]:
    """Return a function that makes such an optimizer, with a copy of its state, for a copy of
    `model`, or for the same model without its wrappers.

    The constructors of some optimizers create state that a step needs. Raise `CkptError` if the
    optimizer has parameters that the model does not have.
    """
    paths = wrapper_paths(model)
    names = {id(parameter): strip(name, paths) for name, parameter in model.named_parameters()}
    strangers = []
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in names:
                problem = f"a parameter of shape {list(parameter.shape)}"
                strangers.append(Problem(problem, f"param_groups.{index}"))
    if strangers:
        raise CkptError(
            f"the optimizer has {plural(len(strangers), 'parameter')} that the model does not have",
            hint="pass the optimizer that was made of this model's parameters",
            problems=strangers,
        )

    def make(fresh: Module) -> Optimizer:
        twin = type(optimizer).__new__(type(optimizer))
        # Schedulers and profilers replace `step` in the instance, and hooks on steps are about the
        # real one.
        twin.__dict__.update(vars(optimizer))
        twin.__dict__.pop("step", None)
        for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            if name in twin.__dict__:
                twin.__dict__[name] = type(twin.__dict__[name])()
        parameters = _by_canonical_name(fresh)
        _check_has(parameters, names.values())
        twin.state = defaultdict(dict)
        for owner, values in optimizer.state.items():
            parameter = parameters[names[id(owner)]] if id(owner) in names else owner
            device = torch.device("cpu")
            if isinstance(parameter, torch.Tensor):
                device = parameter.device
            twin.state[parameter] = tree_map(partial(_copied, device=device), values)
        twin.param_groups = []
        for group in optimizer.param_groups:
            params = [parameters[names[id(parameter)]] for parameter in group["params"]]
            twin.param_groups.append({**group, "params": params})
        return twin

    return make


def _by_canonical_name(model: Module) -> dict[str, torch.nn.Parameter]:
    paths = wrapper_paths(model)
    named = model.named_parameters(remove_duplicate=False)
    return {strip(name, paths): parameter for name, parameter in named}


def _check_has(parameters: Collection[str], names: Iterable[str]) -> None:
    problems = [Problem("not in the definition", name) for name in names if name not in parameters]
    if problems:
        raise CkptError(
            f"the definition builds a model without {plural(len(problems), 'parameter')} of the"
            " live model",
            hint="pass definition=build, the function or class that builds this model before it is"
            " sharded",
            problems=problems,
        )


def _copied(value: Any, device: torch.device) -> Any:
    """Return a copy of a value of an optimizer's state; a step reads its counters, so single
    elements are real.
    """
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    if value.numel() == 1 and device.type == "meta":
        device = torch.device("cpu")
    if type(value) is torch.Tensor:
        return value.detach().to(device, copy=True)
    clone = None if is_dtensor(value) else attempt(value.detach().clone)
    if isinstance(clone, torch.Tensor):
        return clone
    # sharded, or of a class that has no copies
    return torch.zeros(value.shape, dtype=value.dtype, device=device)
