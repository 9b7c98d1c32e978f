"""Compare two optimizers: class, groups, hyperparameters and state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from ckpttool.core.checkpoint import Checkpoint, ExtraEntry, Section, TensorEntry
from ckpttool.core.errors import Refused
from ckpttool.core.names import Names
from ckpttool.core.optimizer_state import FQN, GROUPS, ID, PARAMS, STATE, OptimizerState, Param, numbered
from ckpttool.core.text import Info, Note, free
from ckpttool.core.values import dataclass
from ckpttool.diffing.causes import SIDES, Cause, Code, Sides
from ckpttool.diffing.result import HARMLESS, Entry, Outlines, only_left, only_right
from ckpttool.diffing.sections import Values, compare_pair
from ckpttool.operands.checkpoint import saved_state_dicts
from ckpttool.optimizers.forms import class_of, read, same_option
from ckpttool.optimizers.identify import ParamMap, owners, same_key_order
from ckpttool.optimizers.transform import different

_ENTRIES = (TensorEntry, ExtraEntry)
_CONTAINERS = (*_ENTRIES, Mapping, list, tuple)
UNKNOWN_CLASS = "an optimizer that is not part of torch"


@dataclass(frozen=True, slots=True)
class Misassigned:
    """Parameters whose state loading would give to another parameter, each with its own detail, and why."""

    cause: Cause
    details: Mapping[Any, str | None]


# Param groups


def group_entries(left: OptimizerState, right: OptimizerState, misassigned: Misassigned | None = None) -> list[Entry]:
    """Compare hyperparameters and parameters group by group; misassigned parameters have the status ``order``."""
    home, other_home = (
        {param: index for index, group in enumerate(state.groups) for param in group.params} for state in (left, right)
    )
    pairs = _paired_groups(left, right, other_home)
    entries: list[Entry] = []
    for index, group in enumerate(left.groups):
        other = pairs.get(index)
        if other is None:
            entries.append(only_left(f"{GROUPS}.{index}", Cause(Code.GROUP_UNEXPECTED)))
            continue
        mine, theirs = group.hyperparameters, right.groups[other].hyperparameters
        differing = different(mine, theirs)
        for name in dict.fromkeys((*mine, *theirs)):
            key, other_key = f"{GROUPS}.{index}.{name}", f"{GROUPS}.{other}.{name}"
            if name not in differing:
                entries.append(Entry("same", (key,), (other_key,)))
            elif name not in theirs:
                entries.append(only_left(key, Cause(Code.OPTION_UNEXPECTED, (name,))))
            elif name not in mine:
                entries.append(only_right(other_key, Cause(Code.OPTION_MISSING, (name,))))
            else:
                detail = "{} instead of {}".format(*differing[name])
                entries.append(Entry("value", (key,), (other_key,), Cause(Code.OPTION, (name,)), None, detail))
    paired = set(pairs.values())
    for index in range(len(right.groups)):
        if index not in paired:
            entries.append(only_right(f"{GROUPS}.{index}", Cause(Code.GROUP_MISSING)))

    # Every parameter: in the same group on both sides, at another place, or on one side only.
    details = {} if misassigned is None else misassigned.details
    for param, index in home.items():
        key = f"{GROUPS}.{index}.{PARAMS}.{param}"
        if param not in other_home:
            entries.append(only_left(key, Cause(Code.PARAM_UNEXPECTED, (index,))))
            continue
        other = other_home[param]
        keys = (key,), (f"{GROUPS}.{other}.{PARAMS}.{param}",)
        if misassigned is not None and param in details:
            entries.append(Entry("order", *keys, misassigned.cause, None, details[param]))
        elif pairs.get(index) == other:
            entries.append(Entry("same", *keys))
        else:
            entries.append(Entry("renamed", *keys, Cause(Code.OTHER_GROUP, (index, other))))
    for param, other in other_home.items():
        if param not in home:
            entries.append(only_right(f"{GROUPS}.{other}.{PARAMS}.{param}", Cause(Code.PARAM_MISSING, (other,))))
    return entries


def _paired_groups(left: OptimizerState, right: OptimizerState, home: Mapping[Param, int]) -> dict[int, int]:
    """Pair the groups that share most parameters, and the rest by position. `home`: the group of right's parameters."""
    taken, pairs = set[int](), dict[int, int]()
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


# State


class _Value(NamedTuple):
    """A part of the state that contains no other parts; `param` is None if it belongs to no parameter."""

    key: str
    param: Param | None
    name: str
    value: Any


_Path = tuple[Any, ...]


def state_entries(left: OptimizerState, right: OptimizerState, values: Values | None) -> list[Entry]:
    """Compare the state of every parameter, name by name, and what belongs to no parameter."""
    mine, theirs = _flat(left), _flat(right)
    entries = []
    for path in mine:
        if path not in theirs:
            continue
        keys, one, other = ((mine[path].key,), (theirs[path].key,)), mine[path].value, theirs[path].value
        if isinstance(one, _ENTRIES) and isinstance(other, _ENTRIES):
            entries.append(replace(compare_pair(one, other, values), left=keys[0], right=keys[1]))
        elif isinstance(one, TensorEntry) or isinstance(other, TensorEntry):
            entries.append(Entry("dtype", *keys, Cause(Code.PYTHON_VALUE)))
        elif same_option(one, other):
            entries.append(Entry("same", *keys))
        else:
            entries.append(Entry("value", *keys, Cause(Code.OTHER_VALUE)))
    in_right = (Code.UNEXPECTED, Code.NO_VALUE_RIGHT, Code.NO_STATE_RIGHT)
    in_left = (Code.MISSING, Code.NO_VALUE_LEFT, Code.NO_STATE_LEFT)
    entries += [only_left(one.key, _lacking(one, right, *in_right)) for path, one in mine.items() if path not in theirs]
    entries += [only_right(one.key, _lacking(one, left, *in_left)) for path, one in theirs.items() if path not in mine]
    return entries


def _lacking(value: _Value, state: OptimizerState, loose: Code, no_value: Code, no_state: Code) -> Cause:
    """Return why `state` does not have the value."""
    if value.param is None:
        return Cause(loose)
    return Cause(no_value, (value.name,)) if state.state.get(value.param) else Cause(no_state)


def _flat(state: OptimizerState) -> dict[_Path, _Value]:
    """Return every part of the state by its path. Names may hold dots, so keys are made unique."""
    roots: list[tuple[Param | None, _Path, Any]] = [
        (param, (STATE, param, name), value) for param, own in state.state.items() for name, value in own.items()
    ]
    roots += [(None, (STATE, name), value) for name, value in state.loose.items()]
    roots += [(None, (name,), value) for name, value in state.rest.items()]
    flat: dict[_Path, _Value] = {}
    taken: set[str] = set()
    for param, root, whole in roots:
        for path, value in _parts(whole, root):
            words = [*map(str, path)]
            flat[path] = _Value(free(".".join(words), taken), param, ".".join(words[len(root) - 1 :]), value)
            taken.add(flat[path].key)
    return flat


def _parts(value: Any, path: _Path) -> Iterator[tuple[_Path, Any]]:
    """Yield the parts of dicts, and of lists that hold more than plain values."""
    parts: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        parts = value.items()
    elif isinstance(value, (list, tuple)) and any(isinstance(part, _CONTAINERS) for part in value):
        parts = enumerate(value)
    is_leaf = True
    for name, part in parts:
        is_leaf = False
        yield from _parts(part, (*path, name))
    if is_leaf:
        yield path, value


def tensors_of(state: OptimizerState) -> dict[str, TensorEntry]:
    """Return the tensors of the state by the keys that entries have for them."""
    return {part.key: part.value for part in _flat(state).values() if isinstance(part.value, TensorEntry)}


# Two saved optimizers


class OptimizerDiff(NamedTuple):
    """The entries of two saved optimizers, notes, and the tensors of each side by the keys of the entries.

    `classes` are the optimizer classes, None if it is not one of torch's; `by_id`: neither side has names.
    """

    entries: tuple[Entry, ...]
    notes: tuple[str, ...]
    outlines: tuple[Outlines, Outlines]
    classes: tuple[str | None, str | None]
    by_id: bool


@dataclass(frozen=True, slots=True)
class SavedOptimizer:
    """An optimizer in a file. `models` are the file's state dicts whose keys are in the saved order."""

    section: Section
    models: tuple[Section, ...] = ()

    @staticmethod
    def of(checkpoint: Checkpoint, section: Section) -> SavedOptimizer:
        """Return the optimizer in `section` of `checkpoint`."""
        return SavedOptimizer(section, saved_state_dicts(checkpoint))


def optimizer_section(checkpoint: Checkpoint) -> Section | None:
    """Return the checkpoint's optimizer, if it has exactly one."""
    return checkpoint.optimizers[0] if len(checkpoint.optimizers) == 1 else None


def optimizer_alone(checkpoint: Checkpoint) -> Section | None:
    """Return the checkpoint's optimizer, if there is exactly one and no state dict."""
    return None if checkpoint.state_dicts else optimizer_section(checkpoint)


@dataclass(frozen=True, slots=True)
class _Side:
    """A saved optimizer; in `state` its parameters have names if `owners` or the file gives them."""

    state: OptimizerState
    saved: OptimizerState
    owners: ParamMap | None

    @property
    def is_named(self) -> bool:
        return self.state.form != ID


def compare_optimizers(
    left: SavedOptimizer,
    right: SavedOptimizer,
    names: Names | None = None,
    values: Values | None = None,
    sides: Sides = SIDES,
) -> OptimizerDiff:
    """Compare two saved optimizers.

    Parameters are compared by name if both sides have names, else by id. If torch loads both by position, equal names
    at different positions are differences too. Raises `CkptError` if a side is not the state of an optimizer.
    """
    notes: list[str] = []
    mine, theirs = (_side(saved, names, side, notes) for saved, side in zip((left, right), sides))
    forms = mine.saved.form, theirs.saved.form
    other_order = same_key_order(left.models, right.models) is False
    # Ids without names, of models that were registered in different orders: no id is known to be the same parameter.
    unknown_ids = Misassigned(Cause(Code.KEY_ORDER), dict.fromkeys(mine.saved.params)) if other_order else None
    misassigned, by_id = None, False
    if forms == (ID, ID) and not (mine.is_named and theirs.is_named):
        mine, theirs = (replace(side, state=side.saved, owners=None) for side in (mine, theirs))
        misassigned = unknown_ids
        by_id = misassigned is None
    elif forms == (ID, ID):
        if not all(side.owners is None or side.owners.evidence == "param_names" for side in (mine, theirs)):
            misassigned = unknown_ids and replace(unknown_ids, details=dict.fromkeys(mine.state.params))
        misassigned = misassigned or _at_other_positions(mine.state, theirs.state, sides)
    if mine.is_named != theirs.is_named:
        mine, theirs = (replace(side, state=numbered(side.state)) for side in (mine, theirs))
        notes.append(Info("parameters are compared by position in the param groups", "compared-by"))
    doubts = [_doubted(one, notes, side) for one, side in zip((mine, theirs), sides)]
    if forms != (ID, ID) or not same_key_order(left.models, right.models):  # else one model saved both
        misassigned = next((doubt for doubt in doubts if doubt is not None), misassigned)
    entries = [*group_entries(mine.state, theirs.state, misassigned), *state_entries(mine.state, theirs.state, values)]
    if forms[0] != forms[1]:
        called = {ID: "id, as torch.optim does", FQN: "name", "flat": "name, in flat keys"}
        cause = Cause(Code.FORM, (called[forms[0]], called[forms[1]]))
        entries.insert(0, Entry("renamed", (STATE,), (STATE,), cause))
    if {entry.status for entry in entries} - HARMLESS == {"order"} and mine.is_named:
        notes.append(Info("compared by parameter name, only the positions differ", "compared-by"))
    tensors = tensors_of(mine.state), tensors_of(theirs.state)
    classes = class_of(mine.state), class_of(theirs.state)
    return OptimizerDiff(tuple(entries), tuple(notes), tensors, classes, by_id)


def _side(saved: SavedOptimizer, names: Names | None, side: str, notes: list[str]) -> _Side:
    """Return the state with parameters under their names, or as it is if nothing gives them: then with a note."""
    state = read(saved.section)
    if not state.params:
        return _Side(replace(state, form=FQN), state, None)
    try:
        param_map = owners(state, names, side, saved.models)
    except Refused as error:
        if names is not None:  # without names, a note says that ids are compared
            notes.append(refusal(error))
        return _Side(state, state, None)
    if param_map.assumed:
        notes.append(Info(param_map.rests_on(side), "optimizer-names"))
    return _Side(param_map.state, state, param_map)


def is_named(saved: SavedOptimizer) -> bool:
    """Return True if the file itself names the parameters of the state."""
    return _side(saved, None, "", []).is_named


def refusal(error: Refused) -> Note:
    """Return a refusal as a note."""
    text = f"{error.message}: {error.problems[0]}" if error.problems else f"{error.message} ({error.hint})"
    return Note(text, "optimizer-names")


def _at_other_positions(left: OptimizerState, right: OptimizerState, sides: Sides) -> Misassigned | None:
    """Return the parameters that have another position on the other side."""
    if left.is_stateless and right.is_stateless:
        return None
    position = {param: at for at, param in enumerate(right.params)}
    details = {
        param: f"number {at} in {sides[0]}, {position[param]} in {sides[1]}"
        for at, param in enumerate(left.params)
        if position.get(param, at) != at
    }
    return Misassigned(Cause(Code.POSITION), details)


def _doubted(side: _Side, notes: list[str], name: str) -> Misassigned | None:
    """Return all parameters if something in the file contradicts their names."""
    doubt = None if side.owners is None else side.owners.doubt
    if doubt is None:
        return None
    notes.append(Note(f"{name}: {doubt.message}: {doubt.problems[0]} ({doubt.hint})", "doubtful-ids"))
    return Misassigned(Cause(Code.DOUBT, (doubt.message,)), dict.fromkeys(side.state.params))
