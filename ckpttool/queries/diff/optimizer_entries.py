"""The entries of a diff of two optimizers whose parameters have one kind of names: groups, members, state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from ckpttool.checkpoint import TensorEntry
from ckpttool.naming.optimizers.moves import different
from ckpttool.optimizer_state import GROUPS, PARAMS, STATE, OptimizerState, Param
from ckpttool.queries.diff.keys import Values, compare_pair
from ckpttool.queries.diff.result import Entry, only_left, only_right
from ckpttool.values import dataclass


@dataclass(frozen=True, slots=True)
class Astray:
    """State that would reach other parameters: `reason` is why, `details` say it of each parameter."""

    reason: str
    details: Mapping[Any, str | None]


# Param groups


def group_entries(left: OptimizerState, right: OptimizerState, astray: Astray | None = None) -> list[Entry]:
    """Hyperparameters and parameters, group by group; those of `astray` are of status ``order``."""
    pairs = _pairs(left, right)
    entries: list[Entry] = []
    for index, group in enumerate(left.groups):
        other = pairs.get(index)
        if other is None:
            entries.append(only_left(f"{GROUPS}.{index}", "only left has this param group"))
        else:
            entries += _options(index, other, group.hyperparameters, right.groups[other].hyperparameters)
    taken = set(pairs.values())
    entries += [
        only_right(f"{GROUPS}.{index}", "only right has this param group")
        for index in range(len(right.groups))
        if index not in taken
    ]
    return entries + _members(pairs, _homes(left), _homes(right), astray or Astray("", {}))


def _homes(state: OptimizerState) -> dict[Param, int]:
    """Parameter -> the index of its group."""
    return {param: index for index, group in enumerate(state.groups) for param in group.params}


def _pairs(left: OptimizerState, right: OptimizerState) -> dict[int, int]:
    """Which group is which: those that share most parameters, the rest by position."""
    home, taken, pairs = _homes(right), set[int](), dict[int, int]()
    for index, group in enumerate(left.groups):
        shared = Counter(home[param] for param in group.params if param in home)
        best = next((other for other, _ in shared.most_common() if other not in taken), None)
        if best is not None:
            pairs[index] = best
            taken.add(best)
    for index in range(min(len(left.groups), len(right.groups))):
        if index not in pairs and index not in taken:
            pairs[index] = index
            taken.add(index)
    return pairs


def _options(index: int, other: int, left: Mapping[str, Any], right: Mapping[str, Any]) -> list[Entry]:
    entries = []
    differing = different(left, right)
    for name in dict.fromkeys((*left, *right)):
        mine, theirs = (f"{GROUPS}.{index}.{name}",), (f"{GROUPS}.{other}.{name}",)
        if name not in differing:
            entries.append(Entry("same", mine, theirs))
        elif name not in right:
            entries.append(Entry("unexpected", mine, (), f"only left's param groups have `{name}`"))
        elif name not in left:
            entries.append(Entry("missing", (), theirs, f"only right's param groups have `{name}`"))
        else:
            entries.append(
                Entry("value", mine, theirs, f"another `{name}`", None, "{} instead of {}".format(*differing[name]))
            )
    return entries


def _members(
    pairs: Mapping[int, int], left: Mapping[Param, int], right: Mapping[Param, int], astray: Astray
) -> list[Entry]:
    """Every parameter of the groups: in the same group on both sides, in another place, or on one side only."""
    entries = []
    for param, index in left.items():
        key = (f"{GROUPS}.{index}.{PARAMS}.{param}",)
        if param not in right:
            entries.append(Entry("unexpected", key, (), f"only left has this parameter, in param group {index}"))
            continue
        other = right[param]
        theirs = (f"{GROUPS}.{other}.{PARAMS}.{param}",)
        if param in astray.details:
            entries.append(Entry("order", key, theirs, astray.reason, None, astray.details[param]))
        elif pairs.get(index) == other:
            entries.append(Entry("same", key, theirs))
        else:
            entries.append(Entry("renamed", key, theirs, f"in param group {index} on the left, {other} on the right"))
    entries += [
        only_right(f"{GROUPS}.{other}.{PARAMS}.{param}", f"only right has it, in param group {other}")
        for param, other in right.items()
        if param not in left
    ]
    return entries


# State


class _Value(NamedTuple):
    param: Param
    name: str
    value: Any


def state_entries(left: OptimizerState, right: OptimizerState, values: Values | None) -> list[Entry]:
    """The state of every parameter, name by name."""
    mine, theirs = _flat(left), _flat(right)
    entries = [_pair(key, mine[key].value, theirs[key].value, values) for key in mine if key in theirs]
    entries += [only_left(key, _lacking(value, right, "right")) for key, value in mine.items() if key not in theirs]
    entries += [only_right(key, _lacking(value, left, "left")) for key, value in theirs.items() if key not in mine]
    return entries


def _flat(state: OptimizerState) -> dict[str, _Value]:
    return {
        f"{STATE}.{param}.{name}": _Value(param, str(name), value)
        for param, own in state.state.items()
        for name, value in own.items()
    }


def tensors_of(state: OptimizerState) -> dict[str, TensorEntry]:
    """The tensors of the state by the keys that entries have for them."""
    return {key: own.value for key, own in _flat(state).items() if isinstance(own.value, TensorEntry)}


def _lacking(value: _Value, state: OptimizerState, side: str) -> str:
    """Why a side has no such state."""
    if state.state.get(value.param):
        return f"{side} has no `{value.name}` in its state"
    return f"{side} has no state for this parameter"


def _pair(key: str, left: Any, right: Any, values: Values | None) -> Entry:
    keys = (key,), (key,)
    if not isinstance(left, TensorEntry) or not isinstance(right, TensorEntry):
        if isinstance(left, TensorEntry) or isinstance(right, TensorEntry):
            return Entry("dtype", *keys, "a tensor on one side, a Python value on the other")
        differing = different({"": left}, {"": right})
        return Entry("value", *keys, "another value") if differing else Entry("same", *keys)
    return replace(compare_pair(left, right, values), left=(key,), right=(key,))
