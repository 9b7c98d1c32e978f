"""The state that an optimizer creates for a parameter, which then takes its first step with it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ckpttool.core.errors import CkptError
from ckpttool.core.optimizer_state import FilledTensor
from ckpttool.core.text import first_line
from ckpttool.core.values import dataclass
from ckpttool.tracing.build_model import LoadedModel
from ckpttool.tracing.build_optimizer import LoadedOptimizer
from ckpttool.tracing.instances import dtype_name
from ckpttool.tracing.user_code import prints_once

# elements of a parameter that is tried as it is; of a larger one, a small part with its dimensions
_MOST_ELEMENTS = 2**16
_MOST_LENGTH = 8


class _NotKnown(Exception):
    """Why the initial state of a parameter is not known."""


class _StateIsThere(Exception):
    """Ends a step before it changes anything."""


def initial_states(
    model: LoadedModel, optimizer: LoadedOptimizer, groups: Mapping[str, Mapping[str, Any]]
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Return FQN -> the state that the optimizer creates for a parameter without state, and FQN ->
    why it is not known.

    `groups` has the hyperparameters for each of the parameters. Tensors are `FilledTensor`. The
    state is right if the optimizer takes the same steps with it as without it, which is tried. A
    parameter for which the optimizer keeps no state is in neither of the two.
    """
    instance = model.build()
    answers: dict[object, dict[str, Any] | str] = {}
    states: dict[str, dict[str, Any]] = {}
    unknown: dict[str, str] = {}
    for fqn, options in groups.items():
        parameter = instance.get_parameter(fqn)
        if nn.parameter.is_lazy(parameter):
            unknown[fqn] = "the model creates this parameter when it first runs"
            continue
        like = id(options), parameter.shape, parameter.dtype
        if like not in answers:
            answers[like] = _answer(instance, optimizer, parameter, options)
        answer = answers[like]
        if isinstance(answer, str):
            unknown[fqn] = answer
        elif answer:
            states[fqn] = answer
    return states, unknown


def _answer(
    instance: nn.Module,
    optimizer: LoadedOptimizer,
    parameter: nn.Parameter,
    options: Mapping[str, Any],
) -> dict[str, Any] | str:
    """Return the state that is created for the parameter, or why it is not known."""
    try:
        with prints_once():
            return _initial_state(instance, optimizer, parameter, options)
    except (_NotKnown, CkptError) as error:
        return str(error)


def _initial_state(
    instance: nn.Module,
    optimizer: LoadedOptimizer,
    parameter: nn.Parameter,
    options: Mapping[str, Any],
) -> dict[str, Any]:
    shape = parameter.shape
    small = shape
    if shape.numel() > _MOST_ELEMENTS:
        small = torch.Size(min(length, _MOST_LENGTH) for length in shape)
    value = torch.rand(small, generator=torch.Generator().manual_seed(0)).to(parameter.dtype)
    state = _checked(_trial(instance, optimizer, parameter, value, options))
    shapes = {name: value.shape for name, value in state.items() if _is_tensor(value)}
    if small != shape and shapes:
        without_data = torch.empty(shape, dtype=parameter.dtype, device="meta")
        whole = _trial(instance, optimizer, parameter, without_data, options)
        shapes = _shapes_of_state(whole, shapes)
    initial = {}
    for name, value in state.items():
        if _is_tensor(value):
            initial[name] = _filled(name, value, shapes[name])
        elif value is None or type(value) in (bool, int, float, str):
            initial[name] = value
        else:
            raise _NotKnown(f"{name} is neither a tensor nor a number")
    return initial


@dataclass(frozen=True, slots=True)
class _LoneParameter:
    """An optimizer that has one parameter only. `at_start` is the state that its constructor
    created.
    """

    optimizer: torch.optim.Optimizer
    parameter: nn.Parameter
    value: torch.Tensor
    at_start: dict[str, Any]

    def steps(
        self, state: Mapping[str, Any], gradients: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return the parameter and its state after steps from `state` with these gradients."""
        self._begin(state)
        for gradient in gradients:
            self.parameter.grad = gradient.clone()
            self._run(self.optimizer.step)
        return self.parameter.detach().clone(), self._state()

    def before_step(self) -> dict[str, Any]:
        """Return the state that the first step creates, before it is changed; the state of the
        constructor, if the class does not tell the two apart.
        """
        create = getattr(self.optimizer, "_init_group", None)
        if create is None:
            return self.at_start

        def create_only(*args: Any, **kwargs: Any) -> None:
            create(*args, **kwargs)
            raise _StateIsThere

        self._begin(self.at_start)
        self.parameter.grad = torch.zeros_like(self.parameter)
        setattr(self.optimizer, "_init_group", create_only)  # noqa: B010
        try:
            self._run(self.optimizer.step)
        except _StateIsThere:
            pass
        finally:
            delattr(self.optimizer, "_init_group")
        return self._state()

    def after_step(self) -> dict[str, Any]:
        """Return the state after a step with a gradient of zeros."""
        return self.steps(self.at_start, [torch.zeros_like(self.value)])[1]

    def _begin(self, state: Mapping[str, Any]) -> None:
        with torch.no_grad():
            self.parameter.copy_(self.value)
        self.optimizer.state.pop(self.parameter, None)
        if state:
            self.optimizer.state[self.parameter] = copy.deepcopy(dict(state))

    def _state(self) -> dict[str, Any]:
        return copy.deepcopy(dict(self.optimizer.state.get(self.parameter, {})))

    def _run(self, step: Callable[[], object]) -> None:
        try:
            step()
        except _StateIsThere:
            raise
        except Exception as error:  # any error of the optimizer's code is a reason
            name = type(self.optimizer).__name__
            raise _NotKnown(f"a step of {name} fails: {first_line(error)}") from error


def _trial(
    instance: nn.Module,
    definition: LoadedOptimizer,
    parameter: nn.Parameter,
    value: torch.Tensor,
    options: Mapping[str, Any],
) -> _LoneParameter:
    """Return a trial of an optimizer that gets a tensor like `value` in place of the parameter."""
    tried = nn.Parameter(value.clone())
    _put(instance, parameter, tried)
    try:
        optimizer = definition.build(instance, value.is_meta)
    finally:
        _put(instance, tried, parameter)
    groups = [group for group in optimizer.param_groups if _holds(group["params"], tried)]
    if not groups:
        raise _NotKnown("the optimizer chooses parameters by their sizes")
    group = {**groups[0], **options, "params": [tried]}
    if value.is_meta and group.get("fused"):
        group["fused"] = False  # such kernels need data
    optimizer.param_groups[:] = [group]
    return _LoneParameter(optimizer, tried, value, copy.deepcopy(optimizer.state.get(tried, {})))


def _put(instance: nn.Module, old: nn.Parameter, new: nn.Parameter) -> None:
    """Replace a parameter by another, under all of its names."""
    for module in instance.modules():
        for name, parameter in module._parameters.items():
            if parameter is old:
                module._parameters[name] = new


def _holds(parameters: Sequence[nn.Parameter], parameter: nn.Parameter) -> bool:
    return any(other is parameter for other in parameters)


def _checked(trial: _LoneParameter) -> dict[str, Any]:
    """Return the state with which two steps do the same as without any state."""
    shape, dtype = trial.value.shape, trial.value.dtype
    generator = torch.Generator().manual_seed(1)
    gradients = [torch.randn(shape, generator=generator).to(dtype) for _ in range(2)]
    parameter, state = trial.steps(trial.at_start, gradients)
    if not state:
        return {}
    for candidate in (trial.before_step(), trial.after_step()):
        if candidate.keys() != state.keys():
            continue
        other_parameter, other_state = trial.steps(candidate, gradients)
        if torch.equal(parameter, other_parameter) and _same(state, other_state):
            return candidate
    name = type(trial.optimizer).__name__
    raise _NotKnown(f"{name} creates it and changes it in one step")


def _shapes_of_state(trial: _LoneParameter, small: Mapping[str, Any]) -> dict[str, torch.Size]:
    """Return the shapes of the state of a parameter without data; `small` is the state of a small
    part of it.
    """
    state = trial.before_step()
    if not small.keys() <= state.keys():
        state = trial.after_step()
    shapes = {}
    for name in small:
        value = state.get(name)
        if not isinstance(value, torch.Tensor):
            raise _NotKnown("the optimizer chooses the kind of state by the parameter's size")
        shapes[name] = value.shape
    return shapes


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _filled(name: str, value: torch.Tensor, shape: torch.Size) -> FilledTensor:
    """Return the tensor with this shape, if all of its elements are one number."""
    elements = value.flatten()
    is_plain = type(value) is torch.Tensor and not value.is_complex()
    if not is_plain or not elements.numel() or not bool((elements == elements[0]).all()):
        raise _NotKnown(f"the elements of {name} are not one number")
    return FilledTensor(dtype_name(value.dtype), tuple(shape), elements[0].item())


def _same(left: Mapping[str, Any], right: Mapping[str, Any]) -> bool:
    if left.keys() != right.keys():
        return False
    for name, value in left.items():
        other = right[name]
        if _is_tensor(value):
            if not _is_tensor(other) or value.dtype != other.dtype:
                return False
            if not torch.equal(value, other):
                return False
        elif value != other:
            return False
    return True
