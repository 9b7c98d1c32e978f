"""From an OPTIMIZER operand to the ids of a model's parameters: builds the real optimizer on the model's meta twin."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ckpttool.errors import CkptError, Problem
from ckpttool.names import Names, OptimizerParam
from ckpttool.tracing.load_model import LoadedModel, find, user_code
from ckpttool.tracing.once import prints_once
from ckpttool.tracing.runtime import memory_available, nbytes
from ckpttool.values import dataclass
from ckpttool.words import a, plural

_FORM = "an optimizer is a function of the model that returns a torch.optim.Optimizer: file.py:make_optimizer"


@dataclass(frozen=True, slots=True)
class LoadedOptimizer:
    """An optimizer's definition. `make` is what the user named: a function of the model, or a torch.optim class."""

    operand: str
    make: Callable[..., Any]

    def build(self, model: nn.Module, on_meta: bool) -> torch.optim.Optimizer:
        """The optimizer of `model`. Raises `CkptError` with the user's own error where it cannot be made."""
        is_class = isinstance(self.make, type) and issubclass(self.make, torch.optim.Optimizer)
        with user_code(f"{self.operand} cannot be called with the model", on_meta=on_meta):
            made = self.make(model.parameters() if is_class else model)
        if isinstance(made, Mapping):  # what Lightning's configure_optimizers may return
            made = made.get("optimizer")
        if isinstance(made, (list, tuple)) and len(made) == 1:
            made = made[0]
        if not isinstance(made, torch.optim.Optimizer):
            raise CkptError(f"{self.operand} gives {a(made)}, not an optimizer", hint=_FORM)
        return made


def load_optimizer(operand: Any) -> LoadedOptimizer:
    """The optimizer's definition: an operand, whose import runs the user's code, or the function or class itself.

    Raises `CkptError` where there is none.
    """
    target = find(operand, _FORM) if isinstance(operand, str) else operand
    if not isinstance(operand, str):
        operand = getattr(operand, "__name__", repr(operand))
    if not callable(target):
        raise CkptError(f"{operand} is no function but {a(target)}", hint=_FORM)
    return LoadedOptimizer(operand, target)


def with_optimizer(names: Names, model: LoadedModel, optimizer: LoadedOptimizer) -> Names:
    """`names` with the ids, groups and hyperparameters of the optimizer.

    Made on the meta device, where a step costs nothing; for real where its code reads values, and there is memory for
    weights, gradients and moments.
    """
    if model.materialize:
        return _read(names, model.build(True), optimizer, False)
    twin = model.build(False)
    try:
        return _read(names, twin, optimizer, True)
    except CkptError:
        if 6 * nbytes(twin) > memory_available():
            raise
    return _read(names, model.build(True), optimizer, False)


def _read(names: Names, model: nn.Module, optimizer: LoadedOptimizer, on_meta: bool) -> Names:
    made = optimizer.build(model, on_meta)
    fqns = {id(parameter): fqn for fqn, parameter in model.named_parameters()}
    states = _states(made)
    params: list[OptimizerParam] = []
    strangers: list[Problem] = []
    for index, group in enumerate(made.param_groups):
        for parameter in group["params"]:
            fqn = fqns.get(id(parameter))
            if fqn is None:
                strangers.append(Problem(f"a parameter of shape {list(parameter.shape)}", f"param_groups.{index}"))
            else:
                params.append(OptimizerParam(len(params), fqn, index, states.get(id(parameter), ())))
    if strangers:
        raise CkptError(
            f"{optimizer.operand}: the optimizer has {plural(len(strangers), 'parameter')} that the model has not",
            hint="it has to take its parameters from the model that it is called with",
            problems=strangers,
        )
    groups = tuple(
        {name: _plain(value) for name, value in group.items() if name != "params" and _is_plain(value)}
        for group in made.param_groups
    )
    return replace(names, optimizer=tuple(params), optimizer_class=type(made).__name__, optimizer_groups=groups)


def _states(optimizer: torch.optim.Optimizer) -> dict[int, tuple[str, ...]]:
    """The names of the state that a first step makes, by parameter; none where a step cannot be tried."""
    with contextlib.suppress(Exception), prints_once():  # LBFGS wants a closure, others values
        take_step(optimizer)
    return {id(parameter): tuple(map(str, state)) for parameter, state in optimizer.state.items()}


def take_step(optimizer: torch.optim.Optimizer) -> None:
    """A step of the optimizer with gradients of zeros. Raises what its code raises."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
    optimizer.step()


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


def _plain(value: Any) -> Any:
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value
