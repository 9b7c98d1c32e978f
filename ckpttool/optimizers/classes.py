"""The state of each torch.optim class: its names, and the shapes of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from ckpttool.core.optimizer_state import GROUPS, PARAM_NAMES, STATE, OptimizerState, Param
from ckpttool.core.values import dataclass

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OptimizerClass:
    """`state` are names that together occur in this class only, and so are the hyperparameters `options`."""

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
    """Return the title of the torch.optim class that the state belongs to; None if the table does not know it.

    The param groups' hyperparameters decide, or else the names in the state.
    """
    options = {name for group in state.groups for name in group.options}
    names = {str(name) for own in state.state.values() for name in own}
    row = _by_options(options) or next((row for row in TABLE if row.state <= names), None)
    return None if row is None else row.title


def _by_options(options: Collection[str]) -> OptimizerClass | None:
    return next((row for row in TABLE if row.options.issubset(options)), None)


# Hyperparameters that torch adds to groups of files that lack them (each class's ``__setstate__``), and state that a
# step creates only if the file's hyperparameters ask for it.
_FILLED_IN = frozenset(
    {
        *("amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused", "nesterov", "centered"),
        "decoupled_weight_decay",
    }
)
_ON_REQUEST = frozenset({"max_exp_avg_sq", "grad_avg", "momentum_buffer"})


def lacking(
    state: OptimizerState, groups: Sequence[Mapping[str, object]], steps: Mapping[Param, Sequence[str]]
) -> list[str]:
    """Return the keys that an optimizer with these hyperparameters needs and the state of another class lacks.

    `steps` are the names of the state that a first step creates for a parameter, if known. torch loads such a state,
    and fails with a ``KeyError`` at the next step (pytorch#7499).
    """
    needed = dict.fromkeys(name for group in groups for name in group if name != PARAM_NAMES and name not in _FILLED_IN)
    missing = [
        f"{GROUPS}.{index}.{name}"
        for index, group in enumerate(state.groups)
        for name in needed
        if name not in group.options
    ]
    row = _by_options({name for group in groups for name in group})
    usual = () if row is None or row.title == class_of(state) else sorted(row.state)
    return missing + [
        f"{STATE}.{param}.{name}"
        for param, own in state.state.items()
        for name in steps.get(param) or usual
        if own and name not in own and name not in _ON_REQUEST
    ]


# State of all parameters together, saved under the first: it cannot move with a parameter.
WHOLE = frozenset({"old_dirs", "old_stps", "H_diag", "prev_flat_grad", "ro", "d", "al"})

ELEMENTWISE = frozenset(
    {
        *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg"),
        *("acc_delta", "sum", "ax", "prev", "step_size", "variance"),
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
    """Return True if a parameter of this shape can have a state of this name and shape, and for unknown names."""
    if name in ELEMENTWISE:
        return state == parameter
    if name in _FACTORED:
        return len(parameter) > 1 and state == _FACTORED[name](parameter)
    return True
