"""Build the real optimizer of a model's meta twin, and run its loading and one step."""

from __future__ import annotations

import contextlib
import copy
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from ckpttool.core.checkpoint import ExtraEntry, Section, TensorEntry
from ckpttool.core.errors import CkptError, Problem
from ckpttool.core.names import Names, OptimizerParam
from ckpttool.core.optimizer_state import FLAT, GROUPS, ID, STATE, Param, rebuilt
from ckpttool.core.text import a, plural
from ckpttool.core.values import dataclass
from ckpttool.optimizers.forms import form_of
from ckpttool.tracing.build_model import LoadedModel, find, says_meta, user_code
from ckpttool.tracing.output_capture import prints_once
from ckpttool.tracing.runtime import is_cheap, memory_available, nbytes

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
