"""A saved optimizer against the one that is to load it: does torch leave every state with its own parameter?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from ckpttool.checkpoint import Section
from ckpttool.errors import CkptError, Refused
from ckpttool.names import Names, OptimizerParam
from ckpttool.naming.forms import read as read_keys
from ckpttool.naming.name_tables import NameTables
from ckpttool.naming.optimizers.classes import class_of, lacking
from ckpttool.naming.optimizers.forms import read
from ckpttool.naming.optimizers.ids import Owners, own_names, owners
from ckpttool.naming.optimizers.moves import arranged, carry, identity
from ckpttool.naming.optimizers.parameters import Parameters
from ckpttool.optimizer_state import FLAT, FQN, GROUPS, ID, PARAMS, STATE, OptimizerState, Param, numbered
from ckpttool.queries.diff.optimizer import SavedOptimizer, said
from ckpttool.queries.diff.optimizer_entries import Astray, group_entries
from ckpttool.queries.diff.result import HARMLESS, Entry, Remedy, only_right
from ckpttool.values import dataclass
from ckpttool.words import plural

if TYPE_CHECKING:
    from ckpttool.tracing.optimizer_loading import OptimizerVerdict

_LACKS = "the optimizer's step needs it, and the file's state has none"
_OF_ANOTHER = "torch gives state to parameters by position: this one would get another's"


@dataclass(frozen=True, slots=True)
class OptimizerFit:
    """`fits`: torch loads the state, and every parameter has its own; `remedy` is what should mend it."""

    entries: tuple[Entry, ...]
    notes: tuple[str, ...]
    fits: bool
    remedy: Remedy | None = None


def in_model_order(names: Names, section: Section) -> Names:
    """`names` with the optimizer that takes as many of the model's parameters as the file has, in their order.

    Raises `CkptError` where that is not one group, of all parameters or of all that are trainable.
    """
    state, parameters = read(section), Parameters(names)
    chosen = [own for own in (tuple(parameters.shapes), parameters.trainable) if len(own) == len(state.params)]
    if len(state.groups) != 1 or not chosen:
        counts = f"{plural(len(state.params), 'parameter')} in {plural(len(state.groups), 'param group')}"
        raise CkptError(
            f"{counts}: nothing says which optimizer of {names.model} is to load them",
            hint="pass --optimizer file.py:make, the function that makes the optimizer of the model",
        )
    fqn_of = {t.canonical: t.fqn for t in reversed(names.runtime)}
    params = tuple(OptimizerParam(place, fqn_of[name], 0) for place, name in enumerate(chosen[0]))
    return replace(names, optimizer=params, optimizer_groups=(state.groups[0].hyperparameters,))


def compare_with_optimizer(
    saved: SavedOptimizer, names: Names, verdict: OptimizerVerdict | None = None
) -> OptimizerFit:
    """A saved optimizer (left) against the one that is to load it (right), whose groups `names` hold.

    `verdict` is what torch does with the state, where that could be tried; without it position decides, which is how
    ``Optimizer.load_state_dict`` goes about it (``set_optimizer_state_dict`` goes by the names that are its keys).
    Values are not compared: a new optimizer has none, and its hyperparameters give way to those of the file.
    """
    state, target = read(saved.section), Parameters(names)
    known, notes = _owners(state, names, saved)
    if known is None:
        return _unknown(state, target, saved, notes)
    mine = known.state
    if state.form == FLAT:
        mine = _in_groups(mine, target)
    needs, more = _needs(mine, target, verdict)
    entries = [
        *group_entries(mine, target.fresh_optimizer, _astray(known, target, verdict)),
        *(only_right(key, _LACKS) for key in needs if not _is_hyperparameter(key)),
        *([] if state.form == ID or _steps(verdict) else _stateless(mine, target)),
    ]
    # Loading takes the file's hyperparameters, whatever they are.
    weighing = (next(iter((*e.left, *e.right))) for e in entries if e.status not in HARMLESS)
    differing = bool(needs) or not all(map(_is_hyperparameter, weighing))
    failed = verdict is not None and verdict.error is not None
    fits = not (differing or failed or known.doubt)
    notes += more
    if fits:
        notes += _grounds(known, mine, target)
    foreign = bool(needs) or (failed and not differing and state.form == ID)
    remedy = None if fits else _remedy(known, mine, target, foreign, notes)
    fit = OptimizerFit(tuple(entries), tuple(notes), fits, remedy)
    return _by_old_model(fit, state, target, saved) if remedy is not None and remedy.way == "old_model" else fit


def _unknown(state: OptimizerState, target: Parameters, saved: SavedOptimizer, notes: list[str]) -> OptimizerFit:
    """Where nothing says which of the model's parameters they are: by what the file itself calls them, else by ids."""
    own = own_names(state, saved.beside)
    fresh = target.fresh_optimizer
    entries = group_entries(state, numbered(fresh)) if own is None else group_entries(own.state, fresh)
    if own is not None:
        notes = [*notes, f"left: its parameters are named by {own.evidence}"]
    fit = OptimizerFit(tuple(entries), tuple(notes), False)
    return _by_old_model(fit, state, target, saved)


def _by_old_model(fit: OptimizerFit, state: OptimizerState, target: Parameters, saved: SavedOptimizer) -> OptimizerFit:
    groups = [len(group.params) for group in state.groups]
    same: bool | None = groups == [len(group) for group in target.groups]
    if not same and (state.form != ID or len(groups) == 1 or all(group.param_names for group in state.groups)):
        same = None
    matches = [read_keys(NameTables(target.names), section).match for section in saved.beside]
    foreign = tuple(dict.fromkeys(key for match in matches for key in match.unmatched))
    if foreign and all(match.missing for match in matches):
        note = (
            f"{target.names.model} has no {foreign[0]}, and the file no {matches[0].missing[0]}: what is one "
            "tensor under another name has to be renamed first, for model and optimizer: "
            "remap --rule 'FROM => TO' --optimizer-keys fqn"
        )
        return replace(fit, remedy=None, notes=(*fit.notes, note))
    return replace(fit, remedy=Remedy("old_model", None, same, foreign))


def _owners(state: OptimizerState, names: Names, saved: SavedOptimizer) -> tuple[Owners | None, list[str]]:
    """Whose state it is, and notes; None where nothing says it.

    What has other groups than the one that is to load it was saved by another: its ids are in the model's order.
    """
    try:
        found = owners(state, names, "left", saved.beside)
    except Refused as error:
        notes = [said(error)]
        if state.form != ID:
            return None, notes
        try:
            bare = replace(names, optimizer=(), optimizer_class=None, optimizer_groups=())
            found = owners(state, bare, "left", saved.beside)
        except Refused:
            return None, notes
    if found.doubt is None:
        return found, []
    return found, [f"left: {found.doubt.message}: {found.doubt.problems[0]}"]


def _in_groups(state: OptimizerState, target: Parameters) -> OptimizerState:
    """A flattened state, which has no groups of its own, in those of the optimizer, as torch reads it."""
    if not _same_parameters(state, target):
        return state
    try:
        groups = arranged(state, identity(state.params), target.groups, target.names.optimizer_groups)
    except Refused:  # torch refuses it too
        return state
    return replace(state, groups=groups)


def _same_parameters(state: OptimizerState, target: Parameters) -> bool:
    return {str(param) for param in state.params} == {name for group in target.groups for name in group}


def _astray(known: Owners, target: Parameters, verdict: OptimizerVerdict | None) -> Astray:
    """The parameters that would not get their own state, and why."""
    state = known.saved
    if known.doubt is not None:
        names = {str(param): name for param, name in known.names.items()}
        told = {problem.key: problem.problem for problem in known.doubt.problems}
        return Astray(known.doubt.message, {names.get(key, key): text for key, text in told.items()})
    if state.form != ID or [len(group.params) for group in state.groups] != [len(group) for group in target.groups]:
        return Astray("", {})
    landed: Mapping[Param, Param] = dict(zip(target.fresh_optimizer.params, state.params))
    if verdict is not None and verdict.error is None:
        landed = {**landed, **{target.canonical[fqn]: param for fqn, param in verdict.landed.items()}}
    owner = {str(name): known.names[param] for name, param in landed.items()}
    saved = {known.names[param]: index for index, group in enumerate(state.groups) for param in group.params}
    wanted = {name: index for index, group in enumerate(target.groups) for name in group}
    held = {known.names[param] for param, own in state.state.items() if own}

    def matters(name: str, other: str) -> bool:
        """Of parameters without state, only the group does."""
        return other != name and (not held.isdisjoint((name, other)) or saved.get(name) != wanted[name])

    told = {name: f"here stands {other}" for name, other in owner.items() if matters(name, other)}
    return Astray(_OF_ANOTHER, told)


def _steps(verdict: OptimizerVerdict | None) -> bool:
    """Whether torch has loaded the state and taken steps."""
    return verdict is not None and verdict.stepped and verdict.error is None


def _needs(mine: OptimizerState, target: Parameters, verdict: OptimizerVerdict | None) -> tuple[list[str], list[str]]:
    """The keys that a step needs and the state lacks, if it is that of another class; what torch says of it."""
    notes = [] if verdict is None or verdict.error is None else [f"torch: {verdict.error}"]
    if _steps(verdict):
        return [], notes
    keys = lacking(mine, target.names.optimizer_groups, target.first_step)
    if keys:
        classes = [class_of(state) or "an optimizer that is not torch's" for state in (mine, target.fresh_optimizer)]
        notes.append(
            f"the state is that of {classes[0]}, the optimizer {classes[1]}: torch loads it, and fails at the next "
            "step. No remap makes it the other's; the optimizer can only start afresh"
        )
    return keys, notes


def _stateless(mine: OptimizerState, target: Parameters) -> list[Entry]:
    """Parameters that torch's ``set_optimizer_state_dict`` asks a state for, and that have none in the file."""
    reason = "no state for a trainable parameter: set_optimizer_state_dict refuses that"
    trained = {name for group in target.groups for name in group}.intersection(target.trainable)
    without = [name for name in target.trainable if name in trained and name not in mine.state] if mine.state else []
    return [only_right(f"{STATE}.{name}", reason) for name in without]


def _grounds(known: Owners, mine: OptimizerState, target: Parameters) -> list[str]:
    """On what it rests that the state fits: on names that are there, or on positions."""
    if known.saved.form == FQN and mine.params != target.fresh_optimizer.params:
        return [
            "left: set_optimizer_state_dict, which goes by name, loads it; Optimizer.load_state_dict goes by position, "
            "and would give state to other parameters (remap --optimizer-keys id puts it in order)"
        ]
    return [] if known.evidence in ("param_names", "names") else [known.rests_on("left")]


def _is_hyperparameter(key: str) -> bool:
    return key.startswith(f"{GROUPS}.") and key.count(".") >= 2 and f".{PARAMS}." not in key


def _remedy(known: Owners, mine: OptimizerState, target: Parameters, foreign: bool, notes: list[str]) -> Remedy:
    if foreign:
        return Remedy("afresh")
    if known.doubt is not None:
        return Remedy("old_model")
    try:
        groups = arranged(mine, identity(mine.params), target.groups, target.names.optimizer_groups)
        have = set(mine.params)
        carry(mine, identity([p for group in groups for p in group.params if p in have]), target.shapes, "left")
    except Refused as error:
        notes.append(f"no remap puts it into the new order and param groups: {error.message}: {error.problems[0]}")
        return Remedy("afresh")
    by_name = known.evidence in ("param_names", "names") and _same_parameters(mine, target)
    return Remedy("by_name", known.saved.form) if by_name else Remedy("regroup")
