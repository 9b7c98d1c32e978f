"""State that the optimizer creates for parameters without any."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from ckpttool.core import expression as ex
from ckpttool.core.names import Names
from ckpttool.core.optimizer_state import FLAT, ID, FilledTensor, Param, ParamGroup
from ckpttool.core.text import Info, plural, some
from ckpttool.evaluate.apply import entry_of
from ckpttool.optimizers.classes import SHARED_BY_ALL
from ckpttool.optimizers.options import plain_options
from ckpttool.optimizers.parameters import Parameters
from ckpttool.optimizers.request import Create


def created_state(
    groups: Sequence[ParamGroup],
    states: Mapping[Param, Mapping[Any, Any]],
    target: Names | None,
    create: Create | None,
    to: str,
    where: str,
) -> tuple[dict[Param, Mapping[Any, Any]], list[str]]:
    """Return the state that the optimizer creates for trainable parameters without state, if that
    was requested, and notes on it.

    ``Optimizer.load_state_dict``, which reads ids, lets the next step create it.
    """
    if to == ID or target is None or not target.optimizer:
        return {}, []
    parameters = Parameters(target)
    options_of = _without_state(groups, states, parameters, to)
    if not options_of:
        return {}, []
    if create is None:
        names = [parameters.canonical[fqn] for fqn in options_of]
        # the others may be parameters for which the optimizer keeps no state
        names = [name for name in names if name in parameters.first_step]
        if not names:
            return {}, []
        text = (
            f"{where}: {plural(len(names), 'trainable parameter')} without state, which"
            f" set_optimizer_state_dict refuses; with --partial, {target.optimizer_class} creates"
            f" it: {some(names)}"
        )
        return {}, [text]
    filled, unknown = create(options_of)
    created: dict[Param, Mapping[Any, Any]] = {}
    for fqn, state in filled.items():
        name = parameters.canonical[fqn]
        created[name] = {slot: _entry(value) for slot, value in state.items()}
    notes: list[str] = []
    if created:
        count = plural(len(created), "parameter")
        text = f"{where}: new state of {count}, as {target.optimizer_class} creates it"
        notes.append(Info(f"{text}: {some(list(map(str, created)))}", "remap"))
    for reason in dict.fromkeys(unknown.values()):
        names = [parameters.canonical[fqn] for fqn in unknown if unknown[fqn] == reason]
        notes.append(f"{where}: no state is created for {some(names)}: {reason}")
    return created, notes


def _without_state(
    groups: Sequence[ParamGroup],
    states: Mapping[Param, Mapping[Any, Any]],
    parameters: Parameters,
    to: str,
) -> dict[str, Mapping[str, Any]]:
    """Return the FQN of each trainable parameter that has no state while others have some, with the
    hyperparameters of its group. torch loads a state without any, but not a flattened one.
    """
    slots = set(map(str, chain.from_iterable(states.values())))
    if (not slots and to != FLAT) or slots & SHARED_BY_ALL:
        return {}
    trainable = set(parameters.trainable)
    options_of: dict[str, Mapping[str, Any]] = {}
    for group in groups:
        options = plain_options(group.hyperparameters)
        for param in group.params:
            if param in trainable and not states.get(param):
                options_of[parameters.fqns[str(param)]] = options
    return options_of


def _entry(value: Any) -> Any:
    if not isinstance(value, FilledTensor):
        return value
    return entry_of("", ex.filled(value.shape, value.dtype, value.fill), {})
