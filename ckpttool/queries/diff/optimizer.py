"""What differs between two optimizers: their class, the parameters and hyperparameters of their groups, their state.

Says what torch's "parameter group that doesn't match the size" and ``KeyError: 'betas'`` do not, and what torch does
without a word: it gives state to parameters by position, whatever names the file has for them (pytorch#1489).
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from ckpttool.checkpoint import Checkpoint, Section
from ckpttool.errors import Refused
from ckpttool.names import Names
from ckpttool.naming.optimizers.classes import class_of
from ckpttool.naming.optimizers.forms import read
from ckpttool.naming.optimizers.ids import Owners, owners
from ckpttool.naming.optimizers.saved_order import same_key_order
from ckpttool.operands.checkpoint import saved_state_dicts
from ckpttool.optimizer_state import FQN, ID, STATE, OptimizerState, numbered
from ckpttool.queries.diff.keys import Values
from ckpttool.queries.diff.optimizer_entries import Astray, group_entries, state_entries, tensors_of
from ckpttool.queries.diff.result import HARMLESS, Entry, Outlines
from ckpttool.values import dataclass
from ckpttool.words import Info


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
    owners: Owners | None

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


def _by_key_order(left: SavedOptimizer, right: SavedOptimizer, state: OptimizerState) -> Astray | None:
    """Ids that nothing names, of models that were registered in different orders: none is known to be the same."""
    if same_key_order(left.beside, right.beside) is not False:
        return None
    reason = "the models' keys stand in different orders in the two files, so equal ids need not be one parameter"
    return Astray(reason, dict.fromkeys(state.params))


def _elsewhere(mine: _Side, theirs: _Side) -> Astray | None:
    """Parameters that both sides have under one name and in different places."""
    if mine.state.is_stateless and theirs.state.is_stateless:
        return None
    place = {param: at for at, param in enumerate(theirs.state.params)}
    details = {
        param: f"number {at} on the left, {place[param]} on the right"
        for at, param in enumerate(mine.state.params)
        if place.get(param, at) != at
    }
    return Astray("one parameter in different places: loaded by position, its state would reach another", details)


def _doubted(side: _Side, notes: list[str], where: str) -> Astray | None:
    """What speaks against the owners of one side: none of its ids is known then."""
    doubt = None if side.owners is None else side.owners.doubt
    if doubt is None:
        return None
    notes.append(f"{where}: {doubt.message}: {doubt.problems[0]} ({doubt.hint})")
    return Astray(doubt.message, dict.fromkeys(side.state.params))


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
