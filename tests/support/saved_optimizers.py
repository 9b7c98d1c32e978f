"""Optimizer state dicts made by hand, in each form in which a file can have them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ckpttool import Diff
from command import HARMLESS

Json = dict[str, Any]
Difference = tuple[str, str, str]
OPTIONS = {"lr": 0.1, "betas": (0.9, 0.99)}


def one_step() -> Json:
    return {"step": 1, "exp_avg": torch.zeros(2)}


def saved(
    form: str,
    *groups: str,
    names: bool = False,
    stateless: str = "",
    make_state: Callable[[], Json] = one_step,
) -> Json:
    """Return the state of parameters with one-letter names as ``id``, ``fqn`` or ``flat``."""
    letters = "".join(groups)
    param_of: dict[str, Any] = {one: at if form == "id" else one for at, one in enumerate(letters)}
    state = {param_of[one]: make_state() for one in letters if one not in stateless}
    param_groups = []
    for number, group in enumerate(groups):
        options = {**OPTIONS, "weight_decay": number}
        if names:
            options["param_names"] = list(group)
        param_groups.append({**options, "params": [param_of[one] for one in group]})
    result = {"state": state, "param_groups": param_groups}
    return flattened(result) if form == "flat" else result


def flattened(state: Json) -> Json:
    """Return the state with flat keys, as ``flatten_optimizer_state_dict`` writes it."""
    flat = {}
    for param, values in state["state"].items():
        for name, value in values.items():
            flat[f"state.{param}.{name}"] = value
    for group in state["param_groups"]:
        for param in group["params"]:
            for name, value in group.items():
                if name != "params":
                    flat[f"param_groups.{param}.{name}"] = value
    return flat


def differences(diff: Diff, statuses: Sequence[str] = ()) -> list[Difference]:
    """Return status, keys, and reason with detail of each entry that is a difference."""
    found = []
    for entry in diff.entries:
        if entry.status not in HARMLESS:
            why = ": ".join(filter(None, (entry.reason, entry.detail)))
            found.append((entry.status, " ".join((*entry.left, *entry.right)), why))
    return [one for one in found if not statuses or one[0] in statuses]
