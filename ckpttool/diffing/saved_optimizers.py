"""Compare two saved optimizers: class, groups and state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from ckpttool.core.checkpoint import Checkpoint, ExtraEntry, Section, TensorEntry
from ckpttool.core.errors import Refused
from ckpttool.core.names import Names
from ckpttool.core.optimizer_state import (
    FLAT,
    FQN,
    GROUPS,
    ID,
    PARAMS,
    STATE,
    OptimizerState,
    Param,
    numbered,
)
from ckpttool.core.tables import positions
from ckpttool.core.text import Info, Note, free
from ckpttool.core.values import dataclass
from ckpttool.diffing.causes import SIDES, Cause, Code
from ckpttool.diffing.pairs import Values, compare_pair
from ckpttool.diffing.result import (
    HARMLESS,
    Entry,
    Outlines,
    Remedy,
    only_left,
    only_right,
    statuses_of,
)
from ckpttool.operands.checkpoint import saved_state_dicts
from ckpttool.optimizers.classes import class_of
from ckpttool.optimizers.forms import read
from ckpttool.optimizers.identify import Basis, ParamMap, identify_params
from ckpttool.optimizers.key_order import same_key_order
from ckpttool.optimizers.options import different, same_option

_ENTRIES = (TensorEntry, ExtraEntry)
_CONTAINERS = (*_ENTRIES, Mapping, list, tuple)
UNKNOWN_CLASS = "an optimizer that is not part of torch"


@dataclass(frozen=True, slots=True)
class Misassigned:
    """Parameters whose state loading would give to another parameter, each with its own detail, and
    why.
    """

    cause: Cause
    details: Mapping[Any, str | None]


# Param groups


def group_entries(
    left: OptimizerState, right: OptimizerState, misassigned: Misassigned | None = None
) -> list[Entry]:
    """Compare hyperparameters and parameters group by group; misassigned parameters have the status
    ``order``.
    """
    pairs = _paired_groups(left, right)
    entries: list[Entry] = []
    for index, group in enumerate(left.groups):
        path = f"{GROUPS}.{index}"
        if index not in pairs:
            entries.append(only_left(path, Cause(Code.GROUP_UNEXPECTED)))
            continue
        other = pairs[index]
        other_options = right.groups[other].hyperparameters
        entries += _option_entries(path, group.hyperparameters, f"{GROUPS}.{other}", other_options)
    paired = set(pairs.values())
    for index in range(len(right.groups)):
        if index not in paired:
            entries.append(only_right(f"{GROUPS}.{index}", Cause(Code.GROUP_MISSING)))
    entries += _param_entries(left, right, pairs, misassigned)
    return entries


def _param_entries(
    left: OptimizerState,
    right: OptimizerState,
    pairs: Mapping[int, int],
    misassigned: Misassigned | None,
) -> Iterator[Entry]:
    """Yield an entry for every parameter: in the same group on both sides, at another place, or on
    one side only.
    """
    group_of, other_group_of = group_of_params(left), group_of_params(right)
    details = {} if misassigned is None else misassigned.details
    for param, group in group_of.items():
        key = f"{GROUPS}.{group}.{PARAMS}.{param}"
        if param not in other_group_of:
            yield only_left(key, Cause(Code.PARAM_UNEXPECTED, (group,)))
            continue
        other = other_group_of[param]
        keys = (key,), (f"{GROUPS}.{other}.{PARAMS}.{param}",)
        if misassigned is not None and param in details:
            yield Entry("order", *keys, misassigned.cause, None, details[param])
        elif pairs.get(group) == other:
            yield Entry("same", *keys)
        else:
            yield Entry("renamed", *keys, Cause(Code.OTHER_GROUP, (group, other)))
    for param, other in other_group_of.items():
        if param not in group_of:
            key = f"{GROUPS}.{other}.{PARAMS}.{param}"
            yield only_right(key, Cause(Code.PARAM_MISSING, (other,)))


def group_of_params(state: OptimizerState) -> dict[Param, int]:
    """Return the number of each parameter's group."""
    home = {}
    for index, group in enumerate(state.groups):
        home.update(dict.fromkeys(group.params, index))
    return home


def _option_entries(
    path: str, options: Mapping[str, Any], other_path: str, other_options: Mapping[str, Any]
) -> Iterator[Entry]:
    """Compare the hyperparameters of two groups, each with the path of its group."""
    differing = different(options, other_options)
    for name in dict.fromkeys((*options, *other_options)):
        key, other_key = f"{path}.{name}", f"{other_path}.{name}"
        if name not in differing:
            yield Entry("same", (key,), (other_key,))
        elif name not in other_options:
            yield only_left(key, Cause(Code.OPTION_UNEXPECTED, (name,)))
        elif name not in options:
            yield only_right(other_key, Cause(Code.OPTION_MISSING, (name,)))
        else:
            detail = "{} instead of {}".format(*differing[name])
            yield Entry("value", (key,), (other_key,), Cause(Code.OPTION), None, detail)


def _paired_groups(left: OptimizerState, right: OptimizerState) -> dict[int, int]:
    """Pair the groups that share most parameters, and the rest by position.

    One group that is split keeps its position.
    """
    taken: set[int] = set()
    pairs: dict[int, int] = {}
    if len(left.groups) > 1:
        group_of = group_of_params(right)
        for index, group in enumerate(left.groups):
            shared = Counter(group_of[param] for param in group.params if param in group_of)
            others = [other for other, _ in shared.most_common() if other not in taken]
            if others:
                pairs[index] = others[0]
                taken.add(others[0])
    for index in range(min(len(left.groups), len(right.groups))):
        if index not in pairs and index not in taken:
            pairs[index] = index
            taken.add(index)
    return pairs


# State


class _StateValue(NamedTuple):
    """A part of the state that contains no other parts; `param` is None if it belongs to no
    parameter.
    """

    key: str
    param: Param | None
    name: str
    value: Any


_Path = tuple[Any, ...]


def state_entries(
    left: OptimizerState, right: OptimizerState, values: Values | None
) -> list[Entry]:
    """Compare the state of every parameter, name by name, and what belongs to no parameter."""
    left_parts, right_parts = _flat(left), _flat(right)
    entries = []
    for path, part in left_parts.items():
        if path in right_parts:
            entries.append(_compare_parts(part, right_parts[path], values))
    for path, part in left_parts.items():
        if path not in right_parts:
            codes = (Code.UNEXPECTED, Code.NO_VALUE_RIGHT, Code.NO_STATE_RIGHT)
            entries.append(only_left(part.key, _lacking(part, right, *codes)))
    for path, part in right_parts.items():
        if path not in left_parts:
            codes = (Code.MISSING, Code.NO_VALUE_LEFT, Code.NO_STATE_LEFT)
            entries.append(only_right(part.key, _lacking(part, left, *codes)))
    return entries


def _compare_parts(left: _StateValue, right: _StateValue, values: Values | None) -> Entry:
    keys = (left.key,), (right.key,)
    value, other = left.value, right.value
    if isinstance(value, _ENTRIES) and isinstance(other, _ENTRIES):
        entry = compare_pair(value, other, values)
        return replace(entry, left=keys[0], right=keys[1])
    if isinstance(value, TensorEntry) or isinstance(other, TensorEntry):
        return Entry("dtype", *keys, Cause(Code.PYTHON_VALUE))
    if same_option(value, other):
        return Entry("same", *keys)
    return Entry("value", *keys, Cause(Code.OTHER_VALUE))


def _lacking(
    value: _StateValue, state: OptimizerState, loose: Code, no_value: Code, no_state: Code
) -> Cause:
    """Return why `state` does not have the value."""
    if value.param is None:
        return Cause(loose)
    if state.state.get(value.param):
        return Cause(no_value, (value.name,))
    return Cause(no_state)


def _flat(state: OptimizerState) -> dict[_Path, _StateValue]:
    """Return every part of the state by its path. Names may hold dots, so keys are made unique."""
    flat: dict[_Path, _StateValue] = {}
    taken: set[str] = set()
    for param, root, whole in _roots(state):
        for path, value in _parts(whole, root):
            words = list(map(str, path))
            key = free(".".join(words), taken)
            taken.add(key)
            name = ".".join(words[len(root) - 1 :])
            flat[path] = _StateValue(key, param, name, value)
    return flat


def _roots(state: OptimizerState) -> Iterator[tuple[Param | None, _Path, Any]]:
    """Yield each value of the state with its parameter, if it belongs to one, and its path."""
    for param, slots in state.state.items():
        for name, value in slots.items():
            yield param, (STATE, param, name), value
    for name, value in state.loose.items():
        yield None, (STATE, name), value
    for name, value in state.rest.items():
        yield None, (name,), value


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
    tensors = {}
    for part in _flat(state).values():
        if isinstance(part.value, TensorEntry):
            tensors[part.key] = part.value
    return tensors


# Two saved optimizers


class OptimizerDiff(NamedTuple):
    """The entries of two saved optimizers, notes, and the tensors of each side by the keys of the
    entries.

    `classes` are the optimizer classes, None if it is not one of torch's; `by_id`: neither side has
    names.
    """

    entries: tuple[Entry, ...]
    notes: tuple[str, ...]
    outlines: tuple[Outlines, Outlines]
    classes: tuple[str | None, str | None]
    by_id: bool


@dataclass(frozen=True, slots=True)
class SavedOptimizer:
    """An optimizer in a file. `models` are the file's state dicts whose keys are in the saved
    order.
    """

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
class _SavedSide:
    """A saved optimizer; in `state` its parameters have names if `owners` or the file gives
    them.
    """

    state: OptimizerState
    saved: OptimizerState
    owners: ParamMap | None

    @property
    def is_named(self) -> bool:
        return self.state.form != ID

    @property
    def is_named_by_file(self) -> bool:
        """Whether nothing but the file's own names identified the parameters."""
        return self.owners is None or self.owners.basis is Basis.PARAM_NAMES

    @property
    def as_saved(self) -> _SavedSide:
        return replace(self, state=self.saved, owners=None)

    @property
    def by_position(self) -> _SavedSide:
        return replace(self, state=numbered(self.state))


def compare_optimizers(
    left: SavedOptimizer,
    right: SavedOptimizer,
    names: Names | None = None,
    values: Values | None = None,
) -> OptimizerDiff:
    """Compare two saved optimizers.

    Parameters are compared by name if both sides have names, else by id. If torch loads both by
    position, equal names at different positions are differences too. Raises `CkptError` if a side
    is not the state of an optimizer.
    """
    notes: list[str] = []
    left_side = _side(left, names, SIDES[0], notes)
    right_side = _side(right, names, SIDES[1], notes)
    forms = left_side.saved.form, right_side.saved.form
    same_order = same_key_order(left.models, right.models)
    misassigned, by_id = None, False
    if forms == (ID, ID):
        has_names = left_side.is_named and right_side.is_named
        if not has_names:
            left_side, right_side = left_side.as_saved, right_side.as_saved
        by_file = has_names and left_side.is_named_by_file and right_side.is_named_by_file
        # of models that were registered in different orders no id is known to be the same parameter
        if same_order is False and not by_file:
            misassigned = _all_misassigned(left_side, Cause(Code.KEY_ORDER))
        elif has_names:
            misassigned = _at_other_positions(left_side.state, right_side.state)
        by_id = not has_names and misassigned is None
    if left_side.is_named != right_side.is_named:
        left_side, right_side = left_side.by_position, right_side.by_position
        notes.append(Info("parameters are compared by position in the param groups", "compared-by"))
    doubt = _doubted(left_side, notes, SIDES[0])
    right_doubt = _doubted(right_side, notes, SIDES[1])
    # else one model saved both
    if forms != (ID, ID) or not same_order:
        misassigned = doubt or right_doubt or misassigned
    left_state, right_state = left_side.state, right_side.state
    entries = [
        *group_entries(left_state, right_state, misassigned),
        *state_entries(left_state, right_state, values),
    ]
    if forms[0] != forms[1]:
        cause = Cause(Code.FORM, (_FORMS[forms[0]], _FORMS[forms[1]]))
        entries.insert(0, Entry("renamed", (STATE,), (STATE,), cause))
    if statuses_of(entries) - HARMLESS == {"order"} and left_side.is_named:
        notes.append(Info("compared by parameter name, only the positions differ", "compared-by"))
    return OptimizerDiff(
        tuple(entries),
        tuple(notes),
        (tensors_of(left_state), tensors_of(right_state)),
        (class_of(left_state), class_of(right_state)),
        by_id,
    )


_FORMS = {ID: "id, as torch.optim does", FQN: "name", FLAT: "name, in flat keys"}


def _side(saved: SavedOptimizer, names: Names | None, side: str, notes: list[str]) -> _SavedSide:
    """Return the state with parameters under their names, or as it is if nothing gives them: then
    with a note.
    """
    state = read(saved.section)
    if not state.params:
        return _SavedSide(replace(state, form=FQN), state, None)
    try:
        param_map = identify_params(state, names, side, saved.models)
    except Refused as error:
        if names is not None:  # without names, a note says that ids are compared
            notes.append(refusal(error, side))
        return _SavedSide(state, state, None)
    if param_map.is_assumed:
        notes.append(rests_on(param_map, side))
    return _SavedSide(param_map.state, state, param_map)


def remedy_between(
    entries: Iterable[Entry], left: SavedOptimizer, right: SavedOptimizer, *, has_model: bool
) -> Remedy | None:
    """Return what brings the left optimizer into the form, the order and the groups of the right,
    whose `entries` these are.
    """
    form, other_form = read(left.section).form, read(right.section).form
    for entry in entries:
        is_in_other_group = entry.status == "renamed" and entry.right[0].startswith(GROUPS)
        if entry.status == "order" or is_in_other_group:
            return Remedy("like_right", None if form == other_form else other_form)
    if form == other_form:
        return None
    return Remedy("keys" if is_named(left) and not has_model else "keys_by_model", other_form)


def is_named(saved: SavedOptimizer) -> bool:
    """Return True if the file itself names the parameters of the state."""
    return _side(saved, None, "", []).is_named


def refusal(error: Refused, side: str) -> Note:
    """Return a refusal as a note; its message begins with the name of the `side`."""
    words = error.message.removeprefix(side)
    more = f" ({error.hint})"
    if error.problems:
        more = f": {error.problems[0]}"
    field = f"{{{side}}}" if words != error.message else ""
    return Note.about(f"{field}{{}}{{}}", "optimizer-names", words, more)


def rests_on(param_map: ParamMap, side: str) -> Info:
    """Return a note on what the answer rests on, if the file does not name the parameters."""
    words = param_map.rests_on(side).removeprefix(side)
    return Info.about(f"{{{side}}}{{}}", "optimizer-names", words)


def _at_other_positions(left: OptimizerState, right: OptimizerState) -> Misassigned | None:
    """Return the parameters that have another position on the other side."""
    if left.is_stateless and right.is_stateless:
        return None
    right_position = positions(right.params)
    details: dict[Param, str | None] = {}
    for position, param in enumerate(left.params):
        other = right_position.get(param, position)
        if other != position:
            details[param] = f"position {position} -> {other}"
    return Misassigned(Cause(Code.POSITION), details)


def _all_misassigned(side: _SavedSide, cause: Cause) -> Misassigned:
    return Misassigned(cause, dict.fromkeys(side.state.params))


def _doubted(side: _SavedSide, notes: list[str], name: str) -> Misassigned | None:
    """Return all parameters if something in the file contradicts their names."""
    if side.owners is None or side.owners.doubt is None:
        return None
    doubt = side.owners.doubt
    text = f"{doubt.message}: {doubt.problems[0]} ({doubt.hint})"
    notes.append(Note.about(f"{{{name}}}: {{}}", "doubtful-ids", text))
    return _all_misassigned(side, Cause(Code.DOUBT, (doubt.message,)))
