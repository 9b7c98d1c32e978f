"""Compare two optimizers: class, groups, hyperparameters and state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from ckpttool.core.checkpoint import Checkpoint, ExtraEntry, Section, TensorEntry
from ckpttool.core.errors import Refused
from ckpttool.core.keys import free
from ckpttool.core.names import Names
from ckpttool.core.optimizer_state import FQN, GROUPS, ID, PARAMS, STATE, OptimizerState, Param, numbered
from ckpttool.core.text import Info
from ckpttool.core.values import dataclass
from ckpttool.diffing.result import HARMLESS, ONLY_LEFT, ONLY_RIGHT, Entry, Outlines, only_left, only_right
from ckpttool.diffing.sections import Values, compare_pair
from ckpttool.operands.checkpoint import saved_state_dicts
from ckpttool.optimizers.classes import class_of
from ckpttool.optimizers.forms import read, same_option
from ckpttool.optimizers.identify import ParamMap, owners, same_key_order
from ckpttool.optimizers.transform import different

_ENTRIES = (TensorEntry, ExtraEntry)
_HOLDERS = (*_ENTRIES, Mapping, list, tuple)


@dataclass(frozen=True, slots=True)
class Misassigned:
    """State that would reach other parameters: `reason` is why, `details` say it of each parameter."""

    reason: str
    details: Mapping[Any, str | None]


# Param groups


def group_entries(left: OptimizerState, right: OptimizerState, astray: Misassigned | None = None) -> list[Entry]:
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
    return entries + _members(pairs, _homes(left), _homes(right), astray or Misassigned("", {}))


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
    pairs: Mapping[int, int], left: Mapping[Param, int], right: Mapping[Param, int], astray: Misassigned
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


class Found(NamedTuple):
    """The entries of a diff of two optimizers, the notes on them, and the tensors of each side by the entries' keys."""

    entries: tuple[Entry, ...]
    notes: tuple[str, ...]
    outlines: tuple[Outlines, Outlines]


@dataclass(frozen=True, slots=True)
class SavedOptimizer:
    """An optimizer in a file. `beside` are the file's state dicts, as far as their keys stand in the saved order."""

    section: Section
    beside: tuple[Section, ...] = ()

    @staticmethod
    def of(checkpoint: Checkpoint, section: Section) -> SavedOptimizer:
        """The optimizer `section` of `checkpoint`, with what the whole file shows."""
        return SavedOptimizer(section, saved_state_dicts(checkpoint))


def optimizer_section(checkpoint: Checkpoint) -> Section | None:
    """The checkpoint's optimizer, if it has just one."""
    return checkpoint.optimizers[0] if len(checkpoint.optimizers) == 1 else None


def optimizer_alone(checkpoint: Checkpoint) -> Section | None:
    """The checkpoint's optimizer, if it is all that there is to compare."""
    return None if checkpoint.state_dicts else optimizer_section(checkpoint)


@dataclass(frozen=True, slots=True)
class _Side:
    """A saved optimizer with its parameters under the best names that there are: those of `owners`, if it has any."""

    state: OptimizerState
    saved: OptimizerState
    owners: ParamMap | None

    @property
    def known(self) -> bool:
        return self.state.form != ID


def compare_optimizers(
    left: SavedOptimizer, right: SavedOptimizer, names: Names | None = None, values: Values | None = None
) -> Found:
    """Two saved optimizers.

    Parameters are compared by name where both sides have names (with a model: any names), else by id; of two that torch
    loads by position, equal names in other places are differences too. Raises `CkptError` where a side is no
    optimizer's state dict.
    """
    notes: list[str] = []
    mine, theirs = (_side(one, names, side, notes) for one, side in ((left, "left"), (right, "right")))
    forms = mine.saved.form, theirs.saved.form
    if forms == (ID, ID) and not (mine.known and theirs.known):
        mine, theirs = (replace(one, state=one.saved, owners=None) for one in (mine, theirs))
        astray = _by_key_order(left, right, mine.state)
        if astray is None:
            notes.append(Info("parameters are compared by their ids: pass --model MODEL to compare them by name"))
    elif forms == (ID, ID):
        by_file = all(one.owners is None or one.owners.evidence == "param_names" for one in (mine, theirs))
        astray = (None if by_file else _by_key_order(left, right, mine.state)) or _elsewhere(mine, theirs)
    else:
        astray = None
    if mine.known != theirs.known:
        mine, theirs = (replace(one, state=numbered(one.state)) for one in (mine, theirs))
        notes.append(Info("parameters are compared by their places in the param groups"))
    doubted = [_doubted(one, notes, side) for one, side in ((mine, "left"), (theirs, "right"))]
    if forms != (ID, ID) or not same_key_order(
        left.beside, right.beside
    ):  # else one model saved both, whichever it was
        astray = next((found for found in doubted if found is not None), astray)
    entries = [
        *_forms(*forms),
        *group_entries(mine.state, theirs.state, astray),
        *state_entries(mine.state, theirs.state, values),
    ]
    if {entry.status for entry in entries} - HARMLESS == {"order"} and mine.known:
        notes.append(Info("by the names of the parameters nothing differs but their places"))
    notes += _classes(class_of(mine.state), class_of(theirs.state))
    return Found(tuple(entries), tuple(notes), (tensors_of(mine.state), tensors_of(theirs.state)))


def _side(saved: SavedOptimizer, names: Names | None, side: str, notes: list[str]) -> _Side:
    """The state under its parameters' names, or as it is where nothing says them: then with a note."""
    state = read(saved.section)
    if not state.params:
        return _Side(replace(state, form=FQN), state, None)
    try:
        found = owners(state, names, side, saved.beside)
    except Refused as error:
        if names is not None:  # ids that nothing names are compared as they are, and a note says that
            notes.append(said(error))
        return _Side(state, state, None)
    if found.assumed:
        notes.append(found.rests_on(side))
    return _Side(found.state, state, found)


def is_named(saved: SavedOptimizer) -> bool:
    """Whether the file itself says whose state it is."""
    return _side(saved, None, "", []).known


def said(error: Refused) -> str:
    """A refusal as a note."""
    return f"{error.message}: {error.problems[0]}" if error.problems else f"{error.message} ({error.hint})"


def _by_key_order(left: SavedOptimizer, right: SavedOptimizer, state: OptimizerState) -> Misassigned | None:
    """Ids that nothing names, of models that were registered in different orders: none is known to be the same."""
    if same_key_order(left.beside, right.beside) is not False:
        return None
    reason = "the models' keys stand in different orders in the two files, so equal ids need not be one parameter"
    return Misassigned(reason, dict.fromkeys(state.params))


def _elsewhere(mine: _Side, theirs: _Side) -> Misassigned | None:
    """Parameters that both sides have under one name and in different places."""
    if mine.state.is_stateless and theirs.state.is_stateless:
        return None
    place = {param: at for at, param in enumerate(theirs.state.params)}
    details = {
        param: f"number {at} on the left, {place[param]} on the right"
        for at, param in enumerate(mine.state.params)
        if place.get(param, at) != at
    }
    return Misassigned("one parameter in different places: loaded by position, its state would reach another", details)


def _doubted(side: _Side, notes: list[str], where: str) -> Misassigned | None:
    """What speaks against the owners of one side: none of its ids is known then."""
    doubt = None if side.owners is None else side.owners.doubt
    if doubt is None:
        return None
    notes.append(f"{where}: {doubt.message}: {doubt.problems[0]} ({doubt.hint})")
    return Misassigned(doubt.message, dict.fromkeys(side.state.params))


def _forms(left: str, right: str) -> list[Entry]:
    words = {ID: "ids, as torch.optim writes them", FQN: "names", "flat": "names in flat keys"}
    if left == right:
        return []
    return [Entry("renamed", (STATE,), (STATE,), f"left's parameters are {words[left]}, right's {words[right]}")]


def _classes(left: str | None, right: str | None) -> list[str]:
    if left == right:
        return []
    known = [name or "an optimizer that is not torch's" for name in (left, right)]
    return [f"the left state is that of {known[0]}, the right one that of {known[1]}: neither loads the other's"]
