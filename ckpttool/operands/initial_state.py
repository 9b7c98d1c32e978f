"""The state that an OPTIMIZER creates for parameters without state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpttool.core.optimizer_state import with_filled
from ckpttool.distributed.job import current
from ckpttool.operands.model import ModelOperand


def initial_states(
    model: ModelOperand, groups: Mapping[str, Mapping[str, Any]]
) -> tuple[Mapping[str, Mapping[str, Any]], Mapping[str, str]]:
    """Return the state that the model's optimizer creates for parameters without state, by FQN, and
    why it is not known; see `tracing.initial_state`. `groups` has their hyperparameters.
    """
    from ckpttool.tracing import initial_state
    from ckpttool.tracing.build_optimizer import load_optimizer

    def ask() -> tuple[Mapping[str, Mapping[str, Any]], Mapping[str, str]]:
        optimizer = load_optimizer(model.optimizer, model.model)
        return initial_state.initial_states(model.definition(), optimizer, groups)

    job = current()
    if job is None:
        return ask()
    states, unknown = job.of_first(f"initial states {model.optimizer} {sorted(groups)}", ask)
    return {fqn: with_filled(state) for fqn, state in states.items()}, unknown
