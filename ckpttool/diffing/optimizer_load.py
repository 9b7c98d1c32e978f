"""Compare a saved optimizer with the optimizer that loads it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import field, replace
from itertools import chain
from typing import TYPE_CHECKING

from ckpttool.core.checkpoint import Section
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
from ckpttool.core.text import Info, Note, plural, shell, some
from ckpttool.core.values import dataclass
from ckpttool.diffing.causes import SIDES, Cause, Code
from ckpttool.diffing.result import HARMLESS, Entry, Remedy, only_right
from ckpttool.diffing.saved_optimizers import (
    UNKNOWN_CLASS,
    Misassigned,
    SavedOptimizer,
    group_entries,
    group_of_params,
    refusal,
    rests_on,
)
from ckpttool.naming.convert import read_keys
from ckpttool.naming.match import NameTables
from ckpttool.optimizers.classes import class_of, missing_for_step, with_new_options
from ckpttool.optimizers.forms import read
from ckpttool.optimizers.groups import fill_layout
from ckpttool.optimizers.identify import (
    Doubt,
    ParamMap,
    identify_params,
    listed_names,
    names_without_model,
)
from ckpttool.optimizers.key_order import compare_key_order
from ckpttool.optimizers.parameters import Parameters
from ckpttool.optimizers.transform import identity, move_state

if TYPE_CHECKING:
    from ckpttool.tracing.build_optimizer import OptimizerVerdict


@dataclass(frozen=True, slots=True)
class OptimizerFit:
    """`fits`: torch loads the state, and every parameter gets its own; `remedy` may fix it if
    not. `names` are the parameters' names, as far as they are known without doubt.
    """

    entries: tuple[Entry, ...]
    notes: tuple[str, ...]
    fits: bool
    remedy: Remedy | None = None
    names: Mapping[Param, str] = field(default_factory=dict)


def compare_with_optimizer(
    saved: SavedOptimizer,
    names: Names,
    verdict: OptimizerVerdict | None = None,
    by_dcp: bool = False,
) -> OptimizerFit:
    """Compare a saved optimizer (left) with the optimizer in `names` that loads it (right).

    `verdict` is what torch does with the state, if that could be tried; without it position
    decides, as in ``Optimizer.load_state_dict`` (``set_optimizer_state_dict`` uses the names in the
    keys). `by_dcp` says that ``dcp.load`` reads each hyperparameter by its own key. Values are not
    compared: a new optimizer has none, and takes its hyperparameters from the file.
    """
    state, target = read(saved.section), Parameters(names)
    param_map, notes = _owners(state, names, saved)
    if param_map is None:
        return _without_owners(state, target, saved, notes)
    named_state = _in_groups(param_map.state, state.form, target)
    error = None if verdict is None else verdict.error
    has_stepped = verdict is not None and verdict.stepped and error is None
    needs: Sequence[str] = ()  # what a step needs and the state does not have
    if not has_stepped:
        needs = missing_for_step(named_state, names.optimizer_groups, target.first_step)
    loads_each_option = error is not None and (by_dcp or state.form == FLAT)
    required = _required_options(named_state, target, needs, loads_each_option)
    if required.issuperset(map(_option_of, needs)):
        needs = ()  # --to-optimizer adds all of it
    misassigned = _misassigned(param_map, target, verdict)
    entries = _load_entries(named_state, target, misassigned, required, needs)
    if state.form != ID and not has_stepped:
        entries += _without_state(named_state, target)
    differs = bool(needs or required) or any(map(_is_difference, entries))
    if needs:
        notes.append(_note_on_classes(named_state, target))
    elif error is not None:
        note = Info if differs else Note  # the entries say why
        notes.append(note(f"torch: {error}", "torch-error"))
    if not differs and error is None and param_map.doubt is None:
        notes += _notes_on_fit(param_map, named_state, target)
        return OptimizerFit(tuple(entries), tuple(notes), True, names=param_map.names)
    fails_without_reason = error is not None and not differs
    if needs or (fails_without_reason and state.form == ID):
        remedy = Remedy("drop_state")  # it is the state of another optimizer
        return OptimizerFit(tuple(entries), tuple(notes), False, remedy)
    if param_map.doubt is not None:
        fit = OptimizerFit(tuple(entries), tuple(notes), False)
        return _with_old_model(fit, state, target, saved)
    remedy = _remedy(param_map, named_state, target, entries, notes)
    if remedy.way == "by_name" and required:
        remedy = Remedy("regroup")  # --to-optimizer adds the options
    return OptimizerFit(tuple(entries), tuple(notes), False, remedy)


def _load_entries(
    named_state: OptimizerState,
    target: Parameters,
    misassigned: Misassigned | None,
    required: frozenset[str],
    needs: Sequence[str],
) -> list[Entry]:
    """Return the entries of the param groups, and of the state that a step needs and that is not
    there.
    """
    entries = []
    for entry in group_entries(named_state, target.fresh_optimizer, misassigned):
        entries.append(_as_required(entry, required))
    for key in needs:
        if not _is_hyperparameter(key):
            entries.append(only_right(key, Cause(Code.NOT_STEPPABLE)))
    return entries


def _is_difference(entry: Entry) -> bool:
    """Return True unless it is about a hyperparameter: loading takes the file's."""
    return entry.status not in HARMLESS and not _is_hyperparameter((*entry.left, *entry.right)[0])


def _note_on_classes(named: OptimizerState, target: Parameters) -> Note:
    saved_class = class_of(named) or UNKNOWN_CLASS
    new_class = class_of(target.fresh_optimizer) or UNKNOWN_CLASS
    text = (
        f"the state is from {saved_class}, the optimizer is {new_class}: torch loads it and"
        " fails at the next step"
    )
    return Note(text, "optimizer-class")


def _without_owners(
    state: OptimizerState, target: Parameters, saved: SavedOptimizer, notes: list[str]
) -> OptimizerFit:
    """Compare a state whose parameters are unknown: by the names in the file, else by ids."""
    by_file, fresh = names_without_model(state, saved.models), target.fresh_optimizer
    if by_file is None:
        entries = group_entries(state, numbered(fresh), _by_position(state, target))
    else:
        entries = group_entries(by_file.state, fresh)
        words = "{left}: its parameters are named by {}"
        notes.append(Info.about(words, "optimizer-names", by_file.evidence))
    fit = OptimizerFit(tuple(entries), tuple(notes), False)
    return _with_old_model(fit, state, target, saved)


def _by_position(state: OptimizerState, target: Parameters) -> Misassigned:
    """Return all ids, with the parameters to which torch gives their state: nothing says that it is
    theirs.
    """
    details = {}
    for param, name in zip(state.params, target.fresh_optimizer.params):
        shape = target.shapes.get(str(name))
        where = f"the optimizer has {name} {list(shape or ())} at this position"
        shapes = list(filter(None, state.shapes(param).values()))
        details[param] = f"state of shape {list(shapes[0])}; {where}" if shapes else where
    return Misassigned(Cause(Code.DOUBT, ("nothing says which parameter the id is",)), details)


def _in_groups(named: OptimizerState, form: str, target: Parameters) -> OptimizerState:
    """Return a flattened state in the groups of the optimizer that loads it, as torch reads it: it
    has no groups itself.
    """
    if form != FLAT or set(map(str, named.params)) != set(chain.from_iterable(target.groups)):
        return named
    same, defaults = identity(named.params), target.names.optimizer_groups
    try:
        groups = fill_layout(named, same, target.groups, defaults, by_parameter=True)
    except Refused:  # torch rejects it too
        return named
    return replace(named, groups=groups)


def _without_state(named: OptimizerState, target: Parameters) -> Iterator[Entry]:
    """Yield the trainable parameters of the optimizer for which the file has no state, if it has
    some.
    """
    if not named.state:
        return
    in_groups = set(chain.from_iterable(target.groups))
    for name in target.trainable:
        if name in in_groups and name not in named.state:
            yield only_right(f"{STATE}.{name}", Cause(Code.NO_STATE))


def _notes_on_fit(param_map: ParamMap, named: OptimizerState, target: Parameters) -> Iterator[Note]:
    """Yield what the answer rests on if the state fits."""
    if param_map.saved.form == FQN and named.params != target.fresh_optimizer.params:
        words = (
            "{left}: set_optimizer_state_dict loads it by name; Optimizer.load_state_dict loads"
            " by position, and would give state to other parameters (remap --optimizer-keys id"
            " puts it in order)"
        )
        yield Note.about(words, "optimizer-order")
    elif not param_map.is_named_by_file:
        yield rests_on(param_map, SIDES[0])


def note_on_stateless(section: Section, fit: OptimizerFit) -> list[Note]:
    """Return a note on the parameters without state, if others have some."""
    state = read(section)
    without = []
    for param in state.params:
        if not state.state.get(param):
            without.append(fit.names.get(param, str(param)))
    if not without or len(without) == len(state.params):
        return []
    count = plural(len(without), "parameter")
    text = f"{count} without state in the checkpoint: {some(without)}"
    return [Note(text, "no-optimizer-state")]


def _with_old_model(
    fit: OptimizerFit, state: OptimizerState, target: Parameters, saved: SavedOptimizer
) -> OptimizerFit:
    """Return the fit with the remedy that names the model that saved the file, or the optimizer if
    it is this model.
    """
    # keys of the file that the model does not have, and of each state dict the keys that it lacks
    foreign: dict[str, None] = {}
    missing = []
    tables = NameTables(target.names)
    for section in saved.models:
        match = read_keys(tables, section).match
        foreign.update(dict.fromkeys(match.unmatched))
        missing.append(match.missing)
    if foreign and all(missing):
        text = (
            f"{next(iter(foreign))} is not in {target.names.model}, and {missing[0][0]} is not in"
            " the file: if they are one tensor, name the old code and the rename: ckpttool remap"
            f" CKPT --model OLD --rule 'FROM => TO' {shell('--to-model', target.names.model)}"
            " --to-optimizer OPTIMIZER -o OUT"
        )
        return replace(fit, remedy=None, notes=(*fit.notes, Note(text, "optimizer-names")))
    # else one of them has frozen parameters
    same_count = len(state.params) == sum(map(len, target.groups))
    by_ids = state.form == ID and listed_names(state) is None
    if same_count and by_ids and not foreign:
        key_order = compare_key_order(saved.models, target.names, target.shapes)
        if key_order.is_confirmed:
            return replace(fit, remedy=Remedy("old_optimizer"))
    same_groups = _has_same_groups(state, target)
    return replace(fit, remedy=Remedy("old_model", None, same_groups, tuple(foreign)))


def _has_same_groups(state: OptimizerState, target: Parameters) -> bool | None:
    """Return whether the groups have as many parameters as the optimizer's; None if they do not,
    and that says nothing: the state has names, or one group.

    One group counts as the same if the optimizer has one too, in another order than the model's.
    """
    sizes = [len(group.params) for group in state.groups]
    if sizes == [len(group) for group in target.groups]:
        return True
    has_names = state.form != ID or all(group.param_names for group in state.groups)
    if has_names:
        return None
    if len(sizes) != 1:
        return False
    if len(target.groups) == 1 and not _in_model_order(target.groups[0], target):
        return True
    return None


def _in_model_order(params: Sequence[str], target: Parameters) -> bool:
    rank = positions(target.shapes)
    places = [rank[name] for name in params]
    return places == sorted(places)


def _owners(
    state: OptimizerState, names: Names, saved: SavedOptimizer
) -> tuple[ParamMap | None, list[str]]:
    """Return the parameters that the state belongs to, None if they are unknown, and notes.

    State with other groups than the optimizer's was saved by another optimizer: its ids are in the
    model's order. So is state with other shapes, if these and the file's state dict confirm the
    order.
    """
    notes: list[str] = []
    param_map: ParamMap | None = None
    try:
        param_map = identify_params(state, names, "left", saved.models)
    except Refused as error:
        notes.append(refusal(error, SIDES[0]))
    if state.form == ID and (param_map is None or param_map.doubt is not None):
        no_optimizer = replace(names, optimizer=(), optimizer_class=None, optimizer_groups=())
        with suppress(Refused):
            other = identify_params(state, no_optimizer, "left", saved.models)
            if param_map is None or (other.doubt is None and not other.is_assumed):
                param_map, notes = other, []
    if param_map is not None and param_map.doubt is not None:
        text = f"{param_map.doubt.message}: {param_map.doubt.problems[0]}"
        notes.append(Note.about("{left}: {}", "doubtful-ids", text))
    return param_map, notes


def _misassigned(
    param_map: ParamMap, target: Parameters, verdict: OptimizerVerdict | None
) -> Misassigned | None:
    """Return the parameters that would not get their own state, and why."""
    if param_map.doubt is not None:
        return _in_doubt(param_map.doubt, param_map.names)
    state, name_of = param_map.saved, param_map.names
    if state.form != ID or not _has_same_groups(state, target):
        return None
    fresh = target.fresh_optimizer
    landed: dict[Param, Param] = dict(zip(fresh.params, state.params))
    if verdict is not None and verdict.error is None:
        for fqn, param in verdict.landed.items():
            landed[target.canonical[fqn]] = param
    saved_group, new_group = group_of_params(param_map.state), group_of_params(fresh)
    with_state = {name_of[param] for param, slots in state.state.items() if slots}
    details: dict[str, str | None] = {}
    for param, saved_param in landed.items():
        name, other = str(param), name_of[saved_param]
        # For parameters without state only the group matters.
        matters = name in with_state or other in with_state
        moved = saved_group.get(name) != new_group[name]
        if other != name and (moved or matters):
            details[name] = f"gets the state of {other}"
    return Misassigned(Cause(Code.MISASSIGNED), details)


def _in_doubt(doubt: Doubt, name_of: Mapping[Param, str]) -> Misassigned:
    """Return the parameters that the doubt is about, under their names."""
    names = {str(param): name for param, name in name_of.items()}
    details: dict[str, str | None] = {}
    for problem in doubt.problems:
        details[names.get(problem.key, problem.key)] = problem.problem
    return Misassigned(Cause(Code.DOUBT, (doubt.message,)), details)


def _required_options(
    state: OptimizerState, target: Parameters, needs: Sequence[str], loads_each: bool
) -> frozenset[str]:
    """Return the options that the state lacks, that loading or a step needs, and that
    ``--to-optimizer`` adds.

    `needs` are what a step needs; `loads_each`: loading needs every option of the optimizer.
    """
    new_groups = with_new_options(state.groups, target.fresh_optimizer, target.first_step, state)
    added: set[str] = set()
    for old, new in zip(state.groups, new_groups):
        added.update(new.options.keys() - old.options.keys())
    if not loads_each:
        added &= {_option_of(key) for key in needs if _is_hyperparameter(key)}
    return frozenset(added)


def _as_required(entry: Entry, required: frozenset[str]) -> Entry:
    """Return the entry with another code if it is about a missing option that is `required`."""
    cause = entry.cause
    if cause is None or cause.code is not Code.OPTION_MISSING or cause.args[0] not in required:
        return entry
    return replace(entry, cause=replace(cause, code=Code.OPTION_REQUIRED))


def _is_hyperparameter(key: str) -> bool:
    return key.startswith(f"{GROUPS}.") and key.count(".") >= 2 and f".{PARAMS}." not in key


def _option_of(key: str) -> str:
    return key.rpartition(".")[2]


def _remedy(
    param_map: ParamMap,
    named: OptimizerState,
    target: Parameters,
    entries: Iterable[Entry],
    notes: list[str],
) -> Remedy:
    """Return how the state could be fixed: by name if only its order differs, else by groups."""
    form, params = param_map.saved.form, set(named.params)
    same, defaults = identity(named.params), target.names.optimizer_groups
    try:
        groups = fill_layout(named, same, target.groups, defaults, by_parameter=form == FLAT)
        kept: list[Param] = []
        for group in groups:
            kept += [param for param in group.params if param in params]
        move_state(named, identity(kept), target.shapes, "left")
    except Refused as error:
        reason = f"{error.message}: {error.problems[0]}"
        text = f"no remap arranges it in the new order and param groups: {reason}"
        notes.append(Note(text, "no-fix"))
        return Remedy("drop_state")
    if any(entry.has(Code.NO_STATE) for entry in entries):
        return Remedy("create_state", form)
    saved_groups = {frozenset(map(str, group.params)) for group in named.groups}
    if param_map.is_named_by_file and saved_groups == set(map(frozenset, target.groups)):
        return Remedy("by_name", form)
    return Remedy("regroup")
