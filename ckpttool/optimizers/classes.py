"""What the state of each torch.optim class looks like: the names it is known by, and the shapes of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from ckpttool.core.optimizer_state import GROUPS, PARAM_NAMES, STATE, OptimizerState, Param
from ckpttool.core.values import dataclass

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OptimizerClass:
    """`state` are names that only this class's state has together, `options` hyperparameters that only it has."""

    title: str
    state: frozenset[str]
    options: frozenset[str]


def _row(title: str, state: str, options: str) -> OptimizerClass:
    return OptimizerClass(title, frozenset(state.split()), frozenset(options.split()))


# The first row that fits is the class; one whose names are part of another's comes after it.
TABLE = (
    _row("NAdam", "exp_avg exp_avg_sq mu_product", "betas momentum_decay"),
    _row("Adam or AdamW", "exp_avg exp_avg_sq", "betas amsgrad"),
    _row("RAdam", "exp_avg exp_avg_sq", "betas decoupled_weight_decay"),
    _row("Adamax", "exp_avg exp_inf", "betas foreach weight_decay"),
    _row("SparseAdam", "exp_avg exp_avg_sq", "betas eps maximize"),
    _row("Adadelta", "square_avg acc_delta", "rho"),
    _row("RMSprop", "square_avg", "alpha centered"),
    _row("SGD", "momentum_buffer", "dampening nesterov"),
    _row("Muon", "momentum_buffer", "ns_steps"),
    _row("Adagrad", "sum", "lr_decay initial_accumulator_value"),
    _row("Adafactor", "row_var col_var", "beta2_decay d"),
    _row("ASGD", "ax eta mu", "lambd t0"),
    _row("Rprop", "prev step_size", "etas step_sizes"),
    _row("LBFGS", "old_dirs old_stps", "history_size line_search_fn"),
    _row("Adafactor of transformers", "exp_avg_sq_row exp_avg_sq_col", "decay_rate clip_threshold"),
)


def class_of(state: OptimizerState) -> str | None:
    """The torch.optim class that the state belongs to, in words; None for one that the table does not know.

    The param groups' hyperparameters decide; where they tell nothing, the names in the state do.
    """
    options = {name for group in state.groups for name in group.options}
    names = {str(name) for own in state.state.values() for name in own}
    found = _by_options(options) or next((row for row in TABLE if row.state <= names), None)
    return None if found is None else found.title


def _by_options(options: Collection[str]) -> OptimizerClass | None:
    return next((row for row in TABLE if row.options.issubset(options)), None)


# Hyperparameters that torch gives to groups of files that lack them (each class's own ``__setstate__``), and state that
# a step makes only where the file's hyperparameters ask for it.
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
    """What an optimizer with these hyperparameters needs and `state` lacks, as keys: it is the state of another class.

    `steps` are the names of the state that a first step gives to a parameter, where that is known. torch loads such a
    state, and fails with a ``KeyError`` at the next step (pytorch#7499).
    """
    wanted = dict.fromkeys(name for group in groups for name in group if name != PARAM_NAMES and name not in _FILLED_IN)
    found = [
        f"{GROUPS}.{index}.{name}"
        for index, group in enumerate(state.groups)
        for name in wanted
        if name not in group.options
    ]
    row = _by_options({name for group in groups for name in group})
    usual = () if row is None or row.title == class_of(state) else sorted(row.state)
    return found + [
        f"{STATE}.{param}.{name}"
        for param, own in state.state.items()
        for name in steps.get(param) or usual
        if own and name not in own and name not in _ON_REQUEST
    ]


# State that belongs to all parameters together, and stands under the first: it cannot be moved with a parameter.
WHOLE = frozenset({"old_dirs", "old_stps", "H_diag", "prev_flat_grad", "ro", "d", "al"})

ELEMENTWISE = frozenset(
    {
        *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg"),
        *("acc_delta", "sum", "ax", "prev", "step_size", "variance"),
    }
)

# State with a shape of its own -> the shape that it has for a parameter of this one.
_FACTORED: Mapping[str, Callable[[Shape], Shape]] = {
    "row_var": lambda shape: (*shape[:-1], 1),
    "col_var": lambda shape: (*shape[:-2], 1, shape[-1]),
    "exp_avg_sq_row": lambda shape: shape[:-1],
    "exp_avg_sq_col": lambda shape: (*shape[:-2], shape[-1]),
}


def fits(name: str, state: Shape, parameter: Shape) -> bool:
    """Whether a parameter of this shape can have a state of this name and shape; True where nothing is known of it."""
    if name in ELEMENTWISE:
        return state == parameter
    if name in _FACTORED:
        return len(parameter) > 1 and state == _FACTORED[name](parameter)
    return True
