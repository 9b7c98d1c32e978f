"""What ``Optimizer.load_state_dict`` and a step after it do, found out by running them on tensors without data."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ckpttool.checkpoint import ExtraEntry, Section, TensorEntry
from ckpttool.errors import CkptError
from ckpttool.optimizer_state import GROUPS, STATE, Param, rebuilt
from ckpttool.tracing.load_model import LoadedModel, says_meta
from ckpttool.tracing.load_optimizer import LoadedOptimizer, take_step
from ckpttool.values import dataclass

_OWNER = "ckpttool.owner"  # stands in the state of each parameter, and says where it came from


@dataclass(frozen=True, slots=True)
class OptimizerVerdict:
    """What torch does with a saved state, in its own form (ids).

    `landed`: the FQN of each parameter that was given state -> the id in the file that it was the state of. `error` is
    what loading, or the first step after it, raises; `stepped` says whether a step could be tried at all.
    """

    landed: Mapping[str, Param]
    error: str | None
    stepped: bool


def optimizer_verdict(model: LoadedModel, optimizer: LoadedOptimizer, section: Section) -> OptimizerVerdict | None:
    """Loads the state of the section into a fresh optimizer of a model on meta, and takes a step.

    None where that cannot be tried: the model or its optimizer cannot be made on meta.
    """
    if model.materialize:
        return None
    with contextlib.suppress(CkptError):
        return _tried(lambda: _fresh(model, optimizer), section.mapping or {})
    return None


def _fresh(model: LoadedModel, optimizer: LoadedOptimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
    made = model.build(False)
    return made, optimizer.build(made, True)


def _tried(fresh: Callable[[], tuple[nn.Module, torch.optim.Optimizer]], saved: Mapping[Any, Any]) -> OptimizerVerdict:
    model, optimizer = fresh()
    state = rebuilt({STATE: saved.get(STATE), GROUPS: saved.get(GROUPS)}, lambda _, value: _on_meta(value))
    state[GROUPS] = copy.deepcopy(state[GROUPS])  # a hook may change them where they are
    state[STATE] = {param: {**own, _OWNER: param} for param, own in state[STATE].items() if isinstance(own, Mapping)}
    error = _raised(lambda: optimizer.load_state_dict(state))
    if error is not None:
        return OptimizerVerdict({}, error, False)
    landed = {
        fqn: own.pop(_OWNER)
        for fqn, parameter in model.named_parameters()
        if _OWNER in (own := optimizer.state.get(parameter, {}))
    }
    if not _steps_after_loading(fresh):
        return OptimizerVerdict(landed, None, False)
    error = _raised(lambda: take_step(optimizer))
    if error is not None and says_meta(error):  # the file's hyperparameters ask for values that meta tensors have not
        return OptimizerVerdict(landed, None, False)
    return OptimizerVerdict(landed, error, True)


def _steps_after_loading(fresh: Callable[[], tuple[nn.Module, torch.optim.Optimizer]]) -> bool:
    """Whether such an optimizer can take a step on meta, also with a state of its own that it loaded."""
    (_, first), (_, second) = fresh(), fresh()

    def run() -> None:
        take_step(first)
        second.load_state_dict(first.state_dict())
        take_step(second)

    return _raised(run) is None


def _raised(run: Callable[[], object]) -> str | None:
    """What the user's or torch's code raises, in words."""
    with contextlib.redirect_stdout(sys.stderr):
        try:
            run()
        except Exception as error:  # whatever it is, it is the answer
            return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}".rstrip(": ")
    return None


def _on_meta(value: Any) -> Any:
    """A tensor without data; a single element, as a step counter is, for real: steps read it."""
    if isinstance(value, ExtraEntry):
        return value.value
    if not isinstance(value, TensorEntry):
        return value
    dtype = getattr(torch, value.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise CkptError(f"no tensor of dtype {value.dtype} can be made", hint="")
    if value.numel == 1:
        return torch.ones(value.shape, dtype=dtype)
    return torch.empty(value.shape, dtype=dtype, device="meta")
