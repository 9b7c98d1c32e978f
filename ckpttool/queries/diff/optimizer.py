"""What differs between two optimizers: their class, the parameters and hyperparameters of their groups, their state.

Says what torch's "parameter group that doesn't match the size" and ``KeyError: 'betas'`` do not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from ckpttool.checkpoint import Checkpoint, Section, TensorEntry
from ckpttool.errors import Refused
from ckpttool.names import Names
from ckpttool.naming.optimizers.classes import class_of
from ckpttool.naming.optimizers.forms import read
from ckpttool.naming.optimizers.ids import Parameters, assign, resolve
from ckpttool.naming.optimizers.moves import different
from ckpttool.optimizer_state import (
    FQN,
    GROUPS,
    ID,
    PARAMS,
    STATE,
    OptimizerState,
    Param,
    ParamGroup,
    numbered,
    renamed,
)
from ckpttool.queries.diff.keys import Values
from ckpttool.queries.diff.result import HARMLESS, Entry
from ckpttool.words import plural

Found = tuple[tuple[Entry, ...], tuple[str, ...]]  # the entries of a diff, and the notes on them


def optimizer_section(checkpoint: Checkpoint) -> Section | None:
    """The checkpoint's optimizer, if it has just one."""
    found = [section for section in checkpoint.sections if section.kind == "optimizer"]
    return found[0] if len(found) == 1 else None


def optimizer_alone(checkpoint: Checkpoint) -> Section | None:
    """The checkpoint's optimizer, if it is all that there is to compare."""
    alone = all(section.kind != "state_dict" for section in checkpoint.sections)
    return optimizer_section(checkpoint) if alone else None


def differing_optimizers(left: Checkpoint, right: Checkpoint, names: Names | None) -> tuple[str, ...]:
    """Notes on the optimizers that both checkpoints have, for a diff that is about their models."""
    notes = []
    theirs = {section.path: section for section in right.sections if section.kind == "optimizer" and section.mapping}
    for section in left.sections:
        if section.kind != "optimizer" or section.path not in theirs or not section.mapping:
            continue
        entries, _ = compare_optimizers(section, theirs[section.path], names)
        count = sum(entry.status not in HARMLESS for entry in entries)
        if count:
            sides = " ".join(f"{one.source}::{section.path}" for one in (left, right))
            notes.append(f"{section.path}: {plural(count, 'difference')} (ckpttool diff {sides})")
    return tuple(notes)


def compare_optimizers(
    left: Section, right: Section, names: Names | None = None, values: Values | None = None
) -> Found:
    """Two saved optimizers.

    Parameters are compared by name where both sides have names (with a model: any names), else by id. Raises
    `CkptError` where a side is no optimizer's state dict.
    """
    mine, theirs = read(left), read(right)
    forms = mine.form, theirs.form
    named = names is not None or forms != (ID, ID)
    notes: list[str] = []
    if named:
        mine = _named(mine, names, "left", notes)
        theirs = _named(theirs, names, "right", notes)
    elif _all_named(mine) and _all_named(theirs):
        mine, theirs = _named(mine, None, "left", notes), _named(theirs, None, "right", notes)
    else:
        notes.append("parameters are compared by their ids: pass --model MODEL to compare them by name")
    if (mine.form == ID) != (theirs.form == ID):
        mine, theirs = numbered(mine), numbered(theirs)
        notes.append("parameters are compared by their places in the param groups")
    entries = [*_forms(*forms), *_groups(mine, theirs), *_states(mine, theirs, values)]
    notes += _classes(class_of(mine), class_of(theirs))
    return tuple(entries), tuple(notes)


def compare_with_optimizer(section: Section, names: Names) -> Found:
    """A saved optimizer (left) against the one that is to load it (right), whose groups `names` hold.

    Its state is not compared: a new optimizer has none.
    """
    mine, theirs = read(section), _expected(names)
    notes: list[str] = []
    named = _named(mine, names, "left", notes)
    if named.form == ID:
        named, theirs = mine, numbered(theirs)
    entries = _groups(named, theirs)
    notes += _classes(class_of(mine), class_of(theirs) or names.optimizer_class)
    return tuple(entries), tuple(notes)


def _expected(names: Names) -> OptimizerState:
    """The optimizer that `names` describe, before its first step."""
    members = Parameters(names).groups
    options = [*names.optimizer_groups, *[{}] * (len(members) - len(names.optimizer_groups))]
    return OptimizerState(FQN, tuple(ParamGroup(tuple(own), o) for own, o in zip(members, options)), {})


def _named(state: OptimizerState, names: Names | None, side: str, notes: list[str]) -> OptimizerState:
    """The state with its parameters under their names, or as it is where nothing says them: then with a note."""
    try:
        if state.form == ID:
            return renamed(state, assign(state, names, side).names) if state.params else replace(state, form=FQN)
        own = {param: str(param) for param in state.params}
        return renamed(state, own if names is None else resolve(state, names, side).names)
    except Refused as error:
        notes.append(f"{error.message}: {error.problems[0]}" if error.problems else f"{error.message} ({error.hint})")
    return state


def _all_named(state: OptimizerState) -> bool:
    return all(group.param_names is not None for group in state.groups if group.params)


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


# Param groups


def _groups(left: OptimizerState, right: OptimizerState) -> list[Entry]:
    """Hyperparameters and parameters, group by group."""
    pairs = _pairs(left, right)
    entries: list[Entry] = []
    for index, group in enumerate(left.groups):
        other = pairs.get(index)
        if other is None:
            entries.append(Entry("unexpected", (f"{GROUPS}.{index}",), (), "only left has this param group"))
        else:
            entries += _options(index, other, group.hyperparameters, right.groups[other].hyperparameters)
    taken = set(pairs.values())
    entries += [
        Entry("missing", (), (f"{GROUPS}.{index}",), "only right has this param group")
        for index in range(len(right.groups))
        if index not in taken
    ]
    return entries + _members(pairs, _homes(left), _homes(right))


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


def _members(pairs: Mapping[int, int], left: Mapping[Param, int], right: Mapping[Param, int]) -> list[Entry]:
    """Every parameter of the groups: in the same group on both sides, in another one, or on one side only."""
    entries = []
    for param, index in left.items():
        key = (f"{GROUPS}.{index}.{PARAMS}.{param}",)
        if param not in right:
            entries.append(Entry("unexpected", key, (), f"only left has this parameter, in param group {index}"))
            continue
        other = right[param]
        theirs = (f"{GROUPS}.{other}.{PARAMS}.{param}",)
        if pairs.get(index) == other:
            entries.append(Entry("same", key, theirs))
        else:
            entries.append(Entry("renamed", key, theirs, f"in param group {index} on the left, {other} on the right"))
    entries += [
        Entry("missing", (), (f"{GROUPS}.{other}.{PARAMS}.{param}",), f"only right has it, in param group {other}")
        for param, other in right.items()
        if param not in left
    ]
    return entries


# State


class _Value(NamedTuple):
    param: Param
    name: str
    value: Any


def _states(left: OptimizerState, right: OptimizerState, values: Values | None) -> list[Entry]:
    """The state of every parameter, name by name."""
    mine, theirs = _flat(left), _flat(right)
    entries = [_pair(key, mine[key].value, theirs[key].value, values) for key in mine if key in theirs]
    entries += [
        Entry("unexpected", (key,), (), _lacking(value, right, "right"))
        for key, value in mine.items()
        if key not in theirs
    ]
    entries += [
        Entry("missing", (), (key,), _lacking(value, left, "left")) for key, value in theirs.items() if key not in mine
    ]
    return entries


def _flat(state: OptimizerState) -> dict[str, _Value]:
    return {
        f"{STATE}.{param}.{name}": _Value(param, str(name), value)
        for param, own in state.state.items()
        for name, value in own.items()
    }


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
    if left.shape != right.shape:
        return Entry("shape", *keys, "another shape", None, f"{list(left.shape)} instead of {list(right.shape)}")
    if left.dtype != right.dtype:
        return Entry("dtype", *keys, f"{left.dtype} instead of {right.dtype}")
    found = None if values is None else values(left, right)
    return Entry("same", *keys) if found is None else Entry("value", *keys, "other values", None, found)
