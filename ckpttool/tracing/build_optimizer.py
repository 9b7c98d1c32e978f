"""Build the real optimizer of a fresh model, and run its loading and one step."""

from __future__ import annotations

import contextlib
import copy
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ckpttool.core.checkpoint import ExtraEntry, Section, TensorEntry
from ckpttool.core.errors import CkptError, Problem
from ckpttool.core.names import Names, OptimizerParam
from ckpttool.core.optimizer_state import FLAT, GROUPS, ID, STATE, Param, rebuilt
from ckpttool.core.options import call_of
from ckpttool.core.text import a, first_line, plural
from ckpttool.core.values import dataclass
from ckpttool.optimizers import forms
from ckpttool.tracing.build_model import LoadedModel
from ckpttool.tracing.find_object import find_object
from ckpttool.tracing.instances import dtype_name, is_cheap, memory_available
from ckpttool.tracing.optimizer_copy import like
from ckpttool.tracing.safe_state_dict import Maker, NotMade
from ckpttool.tracing.user_code import prints_once, says_meta, user_code

_FORM = (
    "an optimizer is a function of the model that returns a torch.optim.Optimizer:"
    " file.py:make_optimizer"
)
_OWNER = "ckpttool.owner"  # added to the state of each parameter, to see which parameter gets it
_FUSED = "fused"


@dataclass(frozen=True, slots=True)
class LoadedOptimizer:
    """An optimizer's definition. `make` is what the user named: a function of the model, or a
    torch.optim class.
    """

    operand: str
    make: Callable[..., Any]

    def build(self, model: nn.Module, on_meta: bool) -> torch.optim.Optimizer:
        """Return the optimizer of `model`. Raises `CkptError` with the user's own error."""
        maker = self.make.func if isinstance(self.make, partial) else self.make
        is_class = isinstance(maker, type) and issubclass(maker, torch.optim.Optimizer)
        with user_code(f"{self.operand} cannot be called with the model", on_meta=on_meta):
            optimizer = self.make(model.parameters() if is_class else model)
        if isinstance(optimizer, Mapping):  # Lightning's configure_optimizers may return it so
            optimizer = optimizer.get("optimizer")
        if isinstance(optimizer, (list, tuple)) and len(optimizer) == 1:
            optimizer = optimizer[0]
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise CkptError(f"{self.operand} gives {a(optimizer)}, not an optimizer", hint=_FORM)
        return optimizer


def load_optimizer(operand: Any, model: Any = None) -> LoadedOptimizer:
    """Return the definition: of an operand, whose import runs the user's code, of the function or
    class itself, or of an optimizer of the parameters of `model`, if that is a module.

    Raises `CkptError` if there is none.
    """
    target, arguments = operand, dict[str, Any]()
    if isinstance(operand, torch.optim.Optimizer) and isinstance(model, nn.Module):
        return LoadedOptimizer(type(operand).__name__, like(operand, model))
    if isinstance(operand, str):
        operand, arguments = call_of(operand)
        target = find_object(operand, _FORM)
    if isinstance(operand, torch.optim.Optimizer):
        raise CkptError(
            f"{a(operand)} object belongs to the parameters of one model",
            hint=f"pass a function that makes it for any model, as in {_function_of(operand)}",
        )
    if not isinstance(operand, str):
        operand = getattr(operand, "__name__", repr(operand))
    if not callable(target):
        raise CkptError(f"{operand} is not a function but {a(target)}", hint=_FORM)
    return LoadedOptimizer(operand, partial(target, **arguments) if arguments else target)


def _function_of(optimizer: torch.optim.Optimizer) -> str:
    """Return a function of the model that makes such an optimizer."""
    kind = type(optimizer)
    name = kind.__name__
    if getattr(torch.optim, name, None) is kind:
        name = f"torch.optim.{name}"
    rate = optimizer.defaults.get("lr")
    options = f", lr={rate}" if isinstance(rate, float) else ""
    return f"lambda model: {name}(model.parameters(){options})"


def with_optimizer(names: Names, model: LoadedModel, optimizer: LoadedOptimizer) -> Names:
    """Return `names` with the ids, groups and hyperparameters of the optimizer.

    A step on the meta device costs nothing. The optimizer is built for real if its code reads
    values, and there is memory for weights, gradients and moments.
    """
    if not model.materialize:
        try:
            return _with_ids(names, model.build(False), optimizer, True)
        except CkptError:
            if 6 * model.nbytes > memory_available():
                raise
    return _with_ids(names, model.build(True), optimizer, False)


def _with_ids(names: Names, model: nn.Module, definition: LoadedOptimizer, on_meta: bool) -> Names:
    optimizer = definition.build(model, on_meta)
    fqns = {id(parameter): fqn for fqn, parameter in model.named_parameters()}
    with contextlib.suppress(Exception), prints_once():  # LBFGS needs a closure, others need values
        _step(optimizer)
    params: list[OptimizerParam] = []
    unknown: list[Problem] = []
    groups = []
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            fqn = fqns.get(id(parameter))
            if fqn is None:
                problem = f"a parameter of shape {list(parameter.shape)}"
                unknown.append(Problem(problem, f"param_groups.{index}"))
            else:
                state = tuple(map(str, optimizer.state.get(parameter, ())))
                params.append(OptimizerParam(len(params), fqn, index, state))
        options = {}
        for name, value in group.items():
            if name != "params" and _is_plain(_number(value)):
                options[name] = _as_json(value)
        groups.append(options)
    if unknown:
        raise CkptError(
            f"{definition.operand}: the optimizer has {plural(len(unknown), 'parameter')} that the"
            " model has not",
            hint="it has to take its parameters from the model that it is called with",
            problems=unknown,
        )
    return replace(
        names,
        optimizer=tuple(params),
        optimizer_class=type(optimizer).__name__,
        optimizer_groups=tuple(groups),
    )


def _step(optimizer: torch.optim.Optimizer) -> None:
    """Take a step with gradients of zeros. Raises what its code raises.

    The fused kernels of torch do not check shapes: they would write past the end of a state that
    is smaller than its parameter. So the step is not fused.
    """
    fused = [group for group in optimizer.param_groups if group.get(_FUSED)]
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
    try:
        for group in fused:
            group[_FUSED] = False
        optimizer.step()
    finally:
        for group in fused:
            group[_FUSED] = True


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


def _number(value: Any) -> Any:
    """Return the number in a tensor with one element, as for a learning rate; any other value as it
    is.
    """
    if not isinstance(value, torch.Tensor) or value.numel() != 1 or value.is_meta:
        return value
    number = value.item()
    if isinstance(number, float) and value.dtype == torch.float32:  # 0.1, and not its 17 digits
        number = (
            float(f"{number:.7g}") if torch.tensor(float(f"{number:.7g}")) == number else number
        )
    return number


def _as_json(value: Any) -> Any:
    value = _number(value)
    return [_as_json(item) for item in value] if isinstance(value, (list, tuple)) else value


@dataclass(frozen=True, slots=True)
class OptimizerVerdict:
    """The result of loading a saved state with torch.

    `landed`: the FQN of each parameter that got state -> the id of that state in the file; empty
    for a state that names its parameters. `error` is what loading, or one of two steps after it,
    raises; `stepped` says whether a step could be tried at all. `converted` are tensors of the
    state that loading converts, as text.
    """

    landed: Mapping[str, Param]
    error: str | None
    stepped: bool
    converted: tuple[str, ...] = ()


def optimizer_verdict(
    model: LoadedModel, optimizer: LoadedOptimizer, section: Section, by_dcp: bool = False
) -> OptimizerVerdict | None:
    """Load the state of the section into a fresh optimizer, and take two steps.

    A state of ids goes through ``Optimizer.load_state_dict``, one of names through
    ``set_optimizer_state_dict`` of torch.distributed.checkpoint; before that, `by_dcp` asks for the
    keys that `dcp.load` needs. Return None if that cannot be tried: for a large model that cannot
    be built on meta.
    """
    cheap = is_cheap(model, 4 * sum(entry.nbytes for entry in section.tensors))
    if model.materialize and not cheap:
        return None
    # a torch that was built without torch.distributed
    with contextlib.suppress(CkptError, ImportError):
        return _verdict(_Trial(model, optimizer, section, forms.read(section).form, cheap, by_dcp))
    return None


def _verdict(trial: _Trial) -> OptimizerVerdict | None:
    run, state = trial.fresh(), trial.state()
    # Whether such an optimizer loads a state that it wrote itself, and takes steps before and
    # after.
    first, second = trial.fresh(), trial.fresh()
    steps = _raised(first.two_steps) is None
    loads = _raised(lambda: second.load(first.save())) is None
    steps = loads and steps and _raised(second.two_steps) is None

    error = None
    if trial.by_dcp and loads:
        error = _raised(lambda: _plan_dcp_load(first.save(), state, trial.section.path))
    error = error or _raised(lambda: run.load(state))
    if error is not None:
        if not trial.real and (not loads or says_meta(error)):
            return None
        return OptimizerVerdict({}, error, False)
    landed = _landed(trial) if trial.form == ID else {}
    converted: tuple[str, ...] = ()
    if trial.form != FLAT:
        converted = tuple(_converted(run, trial.state()[STATE], landed))
    error = _raised(run.two_steps) if steps else None
    # the file's hyperparameters need values, which meta tensors do not have
    if error is not None and says_meta(error):
        steps, error = False, None
    return OptimizerVerdict(landed, error, steps, converted)


def _landed(trial: _Trial) -> dict[str, Param]:
    """Return FQN -> the parameter of the file whose state it gets, told by a mark in each state."""
    run, state = trial.fresh(), trial.state()
    for param, values in state[STATE].items():
        # empty state is not marked: torch makes it at the next step
        if values and isinstance(values, dict):
            values[_OWNER] = param
    landed: dict[str, Param] = {}
    if _raised(lambda: run.load(state)) is None:
        for fqn, parameter in run.model.named_parameters():
            values = run.optimizer.state.get(parameter, {})
            if _OWNER in values:
                landed[fqn] = values[_OWNER]
    return landed


def _plan_dcp_load(expected: Any, saved: Any, path: str) -> None:
    """Plan ``dcp.load({path: expected})`` of a folder that holds `saved`. Raise the errors of torch
    (a missing key).
    """
    from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner

    save, load = DefaultSavePlanner(), DefaultLoadPlanner()
    save.set_up_planner({path: saved} if path else saved, is_coordinator=True)
    _, metadata = save.create_global_plan([save.create_local_plan()])
    load.set_up_planner({path: expected} if path else expected, metadata, is_coordinator=True)
    load.create_local_plan()


def _converted(run: _Run, saved: Mapping[Param, Any], landed: Mapping[str, Param]) -> Iterator[str]:
    """Yield the tensors of the state that have another dtype once they are loaded: torch takes the
    parameter's.
    """
    for fqn, parameter in run.model.named_parameters():
        before, after = saved.get(landed.get(fqn, fqn)), run.optimizer.state.get(parameter)
        if not isinstance(before, Mapping) or not isinstance(after, Mapping):
            continue
        for name, new in after.items():
            old = before.get(name)
            if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor):
                old_dtype, new_dtype = dtype_name(old.dtype), dtype_name(new.dtype)
                if old_dtype != new_dtype:
                    yield f"{fqn}.{name} ({old_dtype} to {new_dtype})"


@dataclass(frozen=True, slots=True)
class _Trial:
    model: LoadedModel
    optimizer: LoadedOptimizer
    section: Section
    form: str
    real: bool
    by_dcp: bool

    def fresh(self) -> _Run:
        instance = self.model.build(self.real)
        return _Run(instance, self.optimizer.build(instance, not self.real), self.form)

    def state(self) -> dict[Any, Any]:
        """Return the saved state in new tensors: steps change them, and hooks change the groups."""
        saved = self.section.mapping or {}
        if self.form != FLAT:
            saved = {name: saved.get(name) for name in (STATE, GROUPS)}
        tensors: dict[int, Any] = {}  # they are new, and some kinds cannot be copied

        def value(_: tuple[str, ...], part: Any) -> Any:
            new = self._value(part)
            if isinstance(new, torch.Tensor):
                tensors[id(new)] = new
            return new

        return copy.deepcopy(dict(rebuilt(saved, value)), tensors)

    def _value(self, value: Any) -> Any:
        """Return a tensor of zeros, or without data; a single element is real: steps read their
        counter.
        """
        if isinstance(value, ExtraEntry):
            return value.value
        if not isinstance(value, TensorEntry):
            return value
        if value.storage is None and self.real:
            try:
                return Maker(True).value(value)
            except NotMade as reason:
                raise CkptError(
                    f"it has {reason}, which no safe loader creates", hint=""
                ) from reason
        dtype = getattr(torch, value.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise CkptError(f"no tensor of dtype {value.dtype} can be made", hint="")
        try:
            if value.numel == 1:
                return torch.ones(value.shape, dtype=dtype)
            return torch.zeros(value.shape, dtype=dtype, device=None if self.real else "meta")
        except (NotImplementedError, RuntimeError) as error:  # quantized dtypes
            raise CkptError(f"no tensor of dtype {value.dtype} can be made", hint="") from error


@dataclass(frozen=True, slots=True)
class _Run:
    """A fresh model and its optimizer, which loads and saves by position (`form` ID) or by name."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    form: str

    def load(self, state: Any) -> None:
        if self.form == ID:
            self.optimizer.load_state_dict(state)
        else:
            from torch.distributed.checkpoint.state_dict import (
                StateDictOptions,
                set_optimizer_state_dict,
            )

            options = StateDictOptions(flatten_optimizer_state_dict=self.form == FLAT)
            set_optimizer_state_dict(self.model, self.optimizer, state, options=options)

    def save(self) -> Any:
        if self.form == ID:
            return self.optimizer.state_dict()
        from torch.distributed.checkpoint.state_dict import (
            StateDictOptions,
            get_optimizer_state_dict,
        )

        options = StateDictOptions(flatten_optimizer_state_dict=self.form == FLAT)
        return get_optimizer_state_dict(self.model, self.optimizer, options=options)

    def two_steps(self) -> None:
        _step(self.optimizer)
        _step(self.optimizer)


def _raised(run: Callable[[], object]) -> str | None:
    """Return what the user's or torch's code raises, as text."""
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            run()
        except ImportError:
            raise
        except KeyError as error:  # its text is the key alone
            return f"no entry {first_line(error)}"
        except Exception as error:  # any error is a verdict
            return first_line(error)
    return None
