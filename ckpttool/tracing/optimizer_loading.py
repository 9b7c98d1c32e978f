"""What loading a saved optimizer state, and two steps after it, do in torch: found out by running them.

A small model is built for real, a large one on the meta device, where tensors have no data.
"""

from __future__ import annotations

import contextlib
import copy
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from ckpttool.checkpoint import ExtraEntry, Section, TensorEntry
from ckpttool.errors import CkptError
from ckpttool.naming.optimizers.forms import form_of
from ckpttool.optimizer_state import FLAT, GROUPS, ID, STATE, Param, rebuilt
from ckpttool.tracing.load_model import LoadedModel, says_meta
from ckpttool.tracing.load_optimizer import LoadedOptimizer, take_step
from ckpttool.tracing.runtime import is_cheap
from ckpttool.values import dataclass

_OWNER = "ckpttool.owner"  # stands in the state of each parameter, and says where it came from


@dataclass(frozen=True, slots=True)
class OptimizerVerdict:
    """What torch does with a saved state.

    `landed`: the FQN of each parameter that was given state -> the id in the file that it was the state of; empty for a
    state that goes by names. `error` is what loading, or one of two steps after it, raises; `stepped` says whether a
    step could be tried at all.
    """

    landed: Mapping[str, Param]
    error: str | None
    stepped: bool


class _Run(NamedTuple):
    """A fresh model and its optimizer."""

    model: nn.Module
    optimizer: torch.optim.Optimizer


@dataclass(frozen=True, slots=True)
class _Trial:
    model: LoadedModel
    optimizer: LoadedOptimizer
    section: Section
    form: str
    real: bool

    def fresh(self) -> _Run:
        made = self.model.build(self.real)
        return _Run(made, self.optimizer.build(made, not self.real))

    def state(self) -> dict[Any, Any]:
        """The saved state in tensors of its own: steps change them, and hooks the groups."""
        saved = self.section.mapping or {}
        if self.form != FLAT:
            saved = {name: saved.get(name) for name in (STATE, GROUPS)}
        return copy.deepcopy(dict(rebuilt(saved, lambda _, value: _made(value, self.real))))

    def load(self, run: _Run, state: Any) -> None:
        """Loads a state by position, or one that names its parameters by name."""
        if self.form == ID:
            run.optimizer.load_state_dict(state)
        else:
            from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

            options = StateDictOptions(flatten_optimizer_state_dict=self.form == FLAT)
            set_optimizer_state_dict(run.model, run.optimizer, state, options=options)

    def save(self, run: _Run) -> Any:
        if self.form == ID:
            return run.optimizer.state_dict()
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

        options = StateDictOptions(flatten_optimizer_state_dict=self.form == FLAT)
        return get_optimizer_state_dict(run.model, run.optimizer, options=options)


def optimizer_verdict(model: LoadedModel, optimizer: LoadedOptimizer, section: Section) -> OptimizerVerdict | None:
    """Load the state of the section into a fresh optimizer, and take two steps.

    A state of ids goes through ``Optimizer.load_state_dict``, one of names through ``set_optimizer_state_dict`` of
    torch.distributed.checkpoint. Return None if that cannot be tried: for a large model that cannot be built on meta.
    """
    cheap = is_cheap(model, 4 * sum(entry.nbytes for entry in section.tensors))
    if model.materialize and not cheap:
        return None
    with contextlib.suppress(CkptError, ImportError):  # a torch that was built without torch.distributed
        return _tried(_Trial(model, optimizer, section, form_of(section), real=cheap))
    return None


def _tried(trial: _Trial) -> OptimizerVerdict | None:
    run, state = trial.fresh(), trial.state()
    loads, steps = _own_state(trial)
    error = _raised(lambda: trial.load(run, state))
    if error is not None:
        if not trial.real and (not loads or says_meta(error)):
            return None
        return OptimizerVerdict({}, error, False)
    landed = _landed(trial) if trial.form == ID else {}
    if not steps:
        return OptimizerVerdict(landed, None, False)
    error = _raised(lambda: _two_steps(run.optimizer))
    if error is not None and says_meta(error):  # the file's hyperparameters ask for values that meta tensors have not
        return OptimizerVerdict(landed, None, False)
    return OptimizerVerdict(landed, error, True)


def _own_state(trial: _Trial) -> tuple[bool, bool]:
    """Whether such an optimizer loads a state that it wrote itself, and takes steps before and after it."""
    first, second = trial.fresh(), trial.fresh()
    stepped = _raised(lambda: _two_steps(first.optimizer)) is None
    loads = _raised(lambda: trial.load(second, trial.save(first))) is None
    return loads, loads and stepped and _raised(lambda: _two_steps(second.optimizer)) is None


def _landed(trial: _Trial) -> dict[str, Param]:
    """Which parameter is given the state of which id. Empty state is not marked: torch makes it at the next step."""
    run, state = trial.fresh(), trial.state()
    for param, own in state[STATE].items():
        if own and isinstance(own, dict):
            own[_OWNER] = param
    if _raised(lambda: trial.load(run, state)) is not None:
        return {}
    states = ((fqn, run.optimizer.state.get(parameter, {})) for fqn, parameter in run.model.named_parameters())
    return {fqn: own[_OWNER] for fqn, own in states if _OWNER in own}


def _two_steps(optimizer: torch.optim.Optimizer) -> None:
    take_step(optimizer)
    take_step(optimizer)


def _raised(run: Callable[[], object]) -> str | None:
    """What the user's or torch's code raises, in words."""
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            run()
        except ImportError:
            raise
        except Exception as error:  # whatever it is, it is the answer
            return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}".rstrip(": ")
    return None


def _made(value: Any, real: bool) -> Any:
    """A tensor of zeros, or without data; a single element, as a step counter is, for real: steps read it."""
    if isinstance(value, ExtraEntry):
        return value.value
    if not isinstance(value, TensorEntry):
        return value
    dtype = getattr(torch, value.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise CkptError(f"no tensor of dtype {value.dtype} can be made", hint="")
    if value.numel == 1:
        return torch.ones(value.shape, dtype=dtype)
    return torch.zeros(value.shape, dtype=dtype, device=None if real else "meta")
