"""The classes of optimizers: how to recognize them, and which state a step of each needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain

from ckpttool.core.optimizer_state import (
    GROUPS,
    PARAM_NAMES,
    STATE,
    OptimizerState,
    Param,
    ParamGroup,
)
from ckpttool.core.strides import Shape
from ckpttool.core.values import dataclass


@dataclass(frozen=True, slots=True)
class OptimizerClass:
    """A class by the names of what it saves: the slots of a parameter's `state`, and
    hyperparameters `options` that together occur in this class only. Several classes have the same
    slots.
    """

    title: str
    state: frozenset[str]
    options: frozenset[str]


# The first row that fits is the class, so a row whose names are part of another's comes after it.
TABLE = tuple(
    OptimizerClass(title, frozenset(state.split()), frozenset(options.split()))
    for title, state, options in (
        ("NAdam", "exp_avg exp_avg_sq mu_product", "betas momentum_decay"),
        ("Adam or AdamW", "exp_avg exp_avg_sq", "betas amsgrad"),
        ("RAdam", "exp_avg exp_avg_sq", "betas decoupled_weight_decay"),
        ("Adamax", "exp_avg exp_inf", "betas foreach weight_decay"),
        ("SparseAdam", "exp_avg exp_avg_sq", "betas eps maximize"),
        ("Adadelta", "square_avg acc_delta", "rho"),
        ("RMSprop", "square_avg", "alpha centered"),
        ("SGD", "momentum_buffer", "dampening nesterov"),
        ("Muon", "momentum_buffer", "ns_steps"),
        ("Adagrad", "sum", "lr_decay initial_accumulator_value"),
        ("Adafactor", "row_var col_var", "beta2_decay d"),
        ("ASGD", "ax eta mu", "lambd t0"),
        ("Rprop", "prev step_size", "etas step_sizes"),
        ("LBFGS", "old_dirs old_stps", "history_size line_search_fn"),
        ("Adafactor of transformers", "exp_avg_sq_row exp_avg_sq_col", "decay_rate clip_threshold"),
    )
)


def class_of(state: OptimizerState) -> str | None:
    """Return the title of the torch.optim class that the state belongs to; None if the table does
    not know it.

    The param groups' hyperparameters decide. Without them it is the first class with these slots.
    """
    by_options = _by_options([group.options for group in state.groups])
    if by_options is not None:
        return by_options.title
    names = set(map(str, chain.from_iterable(state.state.values())))
    return next((row.title for row in TABLE if row.state <= names), None)


def _by_options(groups: Iterable[Mapping[str, object]]) -> OptimizerClass | None:
    options = set(chain.from_iterable(groups))
    return next((row for row in TABLE if row.options <= options), None)


# Hyperparameters that torch adds to groups of files that lack them (each class's ``__setstate__``),
# or that a scheduler put there, which no step needs.
_ADDED_BY_TORCH = frozenset(
    {
        "amsgrad",
        "maximize",
        "foreach",
        "capturable",
        "differentiable",
        "fused",
        "nesterov",
        "centered",
        "decoupled_weight_decay",
        "initial_lr",
        "max_lr",
        "min_lr",
        "base_momentum",
        "max_momentum",
        "swa_lr",
    }
)
# State that a step creates only if a hyperparameter of the file asks for it -> the hyperparameter.
# SGD creates its buffer whenever it is missing.
_IF_REQUESTED = {"max_exp_avg_sq": "amsgrad", "grad_avg": "centered", "momentum_buffer": "momentum"}
_CREATED_LATER = frozenset({("SGD", "momentum_buffer")})


def missing_for_step(
    state: OptimizerState,
    groups: Sequence[Mapping[str, object]],
    steps: Mapping[Param, Sequence[str]],
) -> list[str]:
    """Return the keys that an optimizer with these hyperparameters needs for a step, and the state
    does not have.

    `steps` are the names of the state that a first step creates for a parameter, if known. torch
    loads such a state, and fails with a ``KeyError`` at the next step (pytorch#7499).
    """
    # the constructor's options are in every group; others are the user's
    options = [name for name in dict.fromkeys(chain.from_iterable(groups)) if _in_all(name, groups)]
    needed = [name for name in options if name != PARAM_NAMES and name not in _ADDED_BY_TORCH]
    missing = []
    for index, group in enumerate(state.groups):
        for name in needed:
            if name not in group.options:
                missing.append(f"{GROUPS}.{index}.{name}")
    row = _by_options(groups)
    usual = () if row is None or row.title == class_of(state) else sorted(row.state)
    requested = _requested(state, "" if row is None else row.title)
    for param, param_state in state.state.items():
        if not param_state:
            continue
        for name in steps.get(param) or usual:
            is_needed = name not in _IF_REQUESTED or name in requested.get(param, ())
            if name not in param_state and is_needed:
                missing.append(f"{STATE}.{param}.{name}")
    return missing


def _in_all(name: str, groups: Sequence[Mapping[str, object]]) -> bool:
    return all(name in group for group in groups)


def _requested(state: OptimizerState, title: str) -> dict[Param, list[str]]:
    """Return parameter -> the names of state that the hyperparameters of its group ask for."""
    requested: dict[Param, list[str]] = {}
    for group in state.groups:
        names = [name for name, option in _IF_REQUESTED.items() if group.options.get(option)]
        names = [name for name in names if (title, name) not in _CREATED_LATER]
        requested.update(dict.fromkeys(group.params, names))
    return requested


def with_new_options(
    groups: Sequence[ParamGroup],
    loaded_by: OptimizerState,
    steps: Mapping[Param, Sequence[str]],
    saved: OptimizerState,
) -> tuple[ParamGroup, ...]:
    """Return the groups with the options that a newer version of their optimizer has: `loaded_by`,
    group by group.

    Options that torch adds itself are added to the groups of any class, others only if `saved` is a
    state of the same class: one that has all that a step needs. `steps` are as in
    `missing_for_step`.
    """
    new = [group.options for group in loaded_by.groups]
    state_keys = [
        key for key in missing_for_step(saved, new, steps) if not key.startswith(f"{GROUPS}.")
    ]
    same_class = class_of(saved) == class_of(loaded_by) and not state_keys
    filled = []
    for group, options in zip(groups, new):
        added = {}
        for name, value in options.items():
            if name not in group.options and (same_class or name in _ADDED_BY_TORCH):
                added[name] = [*map(str, group.params)] if name == PARAM_NAMES else value
        filled.append(replace(group, options={**group.options, **added}))
    return tuple(filled)


# State of all parameters together, saved under the first: it cannot move with a parameter.
SHARED_BY_ALL = frozenset({"old_dirs", "old_stps", "H_diag", "prev_flat_grad", "ro", "d", "al"})

ELEMENTWISE = frozenset(
    {
        "exp_avg",
        "exp_avg_sq",
        "max_exp_avg_sq",
        "exp_inf",
        "momentum_buffer",
        "square_avg",
        "grad_avg",
        "acc_delta",
        "sum",
        "ax",
        "prev",
        "step_size",
        "variance",
    }
)

# State with another shape than its parameter -> its shape for a parameter of this shape.
_FACTORED: Mapping[str, Callable[[Shape], Shape]] = {
    "row_var": lambda shape: (*shape[:-1], 1),
    "col_var": lambda shape: (*shape[:-2], 1, shape[-1]),
    "exp_avg_sq_row": lambda shape: shape[:-1],
    "exp_avg_sq_col": lambda shape: (*shape[:-2], shape[-1]),
}


def fits(name: str, state: Shape, parameter: Shape) -> bool:
    """Return True if a parameter of this shape can have a state of this name and shape, and for
    unknown names.
    """
    if name in ELEMENTWISE:
        return state == parameter
    if name in _FACTORED:
        return len(parameter) > 1 and state == _FACTORED[name](parameter)
    return True
