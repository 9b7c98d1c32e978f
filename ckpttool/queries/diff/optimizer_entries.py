"""The entries of a diff of two optimizers whose parameters have one kind of names: groups, members, state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from ckpttool.checkpoint import ExtraEntry, TensorEntry
from ckpttool.keys import free
from ckpttool.naming.optimizers.forms import same_option
from ckpttool.naming.optimizers.moves import different
from ckpttool.optimizer_state import GROUPS, PARAMS, STATE, OptimizerState, Param
from ckpttool.queries.diff.keys import Values, compare_pair
from ckpttool.queries.diff.result import ONLY_LEFT, ONLY_RIGHT, Entry, only_left, only_right
from ckpttool.values import dataclass

_ENTRIES = (TensorEntry, ExtraEntry)
_HOLDERS = (*_ENTRIES, Mapping, list, tuple)


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
    """A part of the state that holds no others; `param` is whose it is, None for what belongs to none."""

    key: str
    param: Param | None
    name: str
    value: Any


_Way = tuple[Any, ...]


def state_entries(left: OptimizerState, right: OptimizerState, values: Values | None) -> list[Entry]:
    """The state of every parameter, name by name, and what belongs to none."""
    mine, theirs = _flat(left), _flat(right)
    entries = [_pair(mine[way], theirs[way], values) for way in mine if way in theirs]
    entries += [only_left(own.key, _lacking(own, right, "right")) for way, own in mine.items() if way not in theirs]
    entries += [only_right(own.key, _lacking(own, left, "left")) for way, own in theirs.items() if way not in mine]
    return entries


def _flat(state: OptimizerState) -> dict[_Way, _Value]:
    """Every part of the state by the way to it; ways that are one in words (names may hold dots) have a key each."""
    found: dict[_Way, _Value] = {}
    taken: set[str] = set()
    for param, way, whole in _wholes(state):
        for at, value in _parts(whole, way):
            words = [*map(str, at)]
            found[at] = _Value(free(".".join(words), taken), param, ".".join(words[len(way) - 1 :]), value)
            taken.add(found[at].key)
    return found


def _wholes(state: OptimizerState) -> Iterator[tuple[Param | None, _Way, Any]]:
    for param, own in state.state.items():
        yield from ((param, (STATE, param, name), value) for name, value in own.items())
    yield from ((None, (STATE, name), value) for name, value in state.loose.items())
    yield from ((None, (name,), value) for name, value in state.rest.items())


def _parts(value: Any, way: _Way) -> Iterator[tuple[_Way, Any]]:
    """What dicts, and lists that hold more than plain values, are made of."""
    parts: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        parts = value.items()
    elif isinstance(value, (list, tuple)) and any(isinstance(part, _HOLDERS) for part in value):
        parts = enumerate(value)
    whole = True
    for name, part in parts:
        whole = False
        yield from _parts(part, (*way, name))
    if whole:
        yield way, value


def tensors_of(state: OptimizerState) -> dict[str, TensorEntry]:
    """The tensors of the state by the keys that entries have for them."""
    return {own.key: own.value for own in _flat(state).values() if isinstance(own.value, TensorEntry)}


def _lacking(own: _Value, state: OptimizerState, side: str) -> str:
    """Why a side has no such state."""
    if own.param is None:
        return ONLY_LEFT if side == "right" else ONLY_RIGHT
    if state.state.get(own.param):
        return f"{side} has no `{own.name}` in its state"
    return f"{side} has no state for this parameter"


def _pair(mine: _Value, theirs: _Value, values: Values | None) -> Entry:
    keys, left, right = ((mine.key,), (theirs.key,)), mine.value, theirs.value
    if isinstance(left, _ENTRIES) and isinstance(right, _ENTRIES):
        return replace(compare_pair(left, right, values), left=keys[0], right=keys[1])
    if isinstance(left, TensorEntry) or isinstance(right, TensorEntry):
        return Entry("dtype", *keys, "a tensor on one side, a Python value on the other")
    return Entry("same", *keys) if same_option(left, right) else Entry("value", *keys, "another value")
