"""Compare a saved optimizer with the optimizer that loads it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from ckpttool.containers.rank_shards import is_of_ranks, ranks_agree
from ckpttool.core.checkpoint import Checkpoint, Section
from ckpttool.core.errors import CkptError, Refused
from ckpttool.core.names import Names, OptimizerParam
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
from ckpttool.core.text import Info, Note, plural, shell, some
from ckpttool.core.values import dataclass
from ckpttool.diffing.causes import SIDES, Cause, Code
from ckpttool.diffing.model import compared_by_loading, load, unreadable_note
from ckpttool.diffing.result import HARMLESS, Diff, Entry, Remedy, only_right
from ckpttool.diffing.saved_optimizers import (
    UNKNOWN_CLASS,
    Misassigned,
    SavedOptimizer,
    group_entries,
    optimizer_section,
    refusal,
    rests_on,
)
from ckpttool.formats.folders import optimizers_in
from ckpttool.formats.registry import format_of
from ckpttool.io.files import names_in
from ckpttool.io.paths import join
from ckpttool.naming.convert import read as read_keys
from ckpttool.naming.match import NameTables
from ckpttool.operands.checkpoint import is_folder
from ckpttool.operands.model import ModelOperand
from ckpttool.optimizers.forms import class_of, lacking, read, with_new_options
from ckpttool.optimizers.groups import arranged
from ckpttool.optimizers.identify import (
    Parameters,
    ParamMap,
    in_file,
    own_names,
    owners,
    saved_order,
)
from ckpttool.optimizers.transform import carry, identity

if TYPE_CHECKING:
    from ckpttool.tracing.build_optimizer import OptimizerVerdict


@dataclass(frozen=True, slots=True)
class OptimizerFit:
    """`fits`: torch loads the state, and every parameter gets its own; `remedy` may fix it if
    not.
    """

    entries: tuple[Entry, ...]
    notes: tuple[str, ...]
    fits: bool
    remedy: Remedy | None = None


def optimizer(model: ModelOperand, checkpoint: Checkpoint, ignore_dtype: bool) -> Diff:
    """Compare a saved optimizer, and the model in the same file, with the optimizer and model that
    load them.
    """
    names, section = model.names(), optimizer_section(checkpoint)
    if section is None:
        raise _no_single_optimizer(model, checkpoint)
    if not names.optimizer:
        names = in_model_order(names, section)
    verdict = None
    by_dcp = format_of(checkpoint).holds_each_option(checkpoint, section.path)
    if model.optimizer is not None:
        from ckpttool.tracing.build_optimizer import load_optimizer, optimizer_verdict

        builder = load_optimizer(model.optimizer)
        verdict = optimizer_verdict(model.definition(), builder, section, by_dcp)
    fit = compare_with_optimizer(SavedOptimizer.of(checkpoint, section), names, verdict, by_dcp)
    fit = _with_copies_of_ranks(fit, section)
    misplaced = _misplaced(checkpoint, section)
    about_model = _model_in_file(model, checkpoint, ignore_dtype)
    notes = [*misplaced, *fit.notes, *about_model.notes]
    if verdict is not None and verdict.converted and not ignore_dtype:
        text = (
            f"loading converts {plural(len(verdict.converted), 'tensor')} of the state to the"
            f" parameter's dtype: {some(verdict.converted)}"
        )
        notes.append(Note(text, "converts"))
    notes += _note_on_stateless(section)
    if isinstance(model.optimizer, str):
        title = model.optimizer
    else:
        title = names.optimizer_class or "model.parameters()"
    identical = fit.fits and about_model.loads and not misplaced
    failure = f"does not load into {title}"
    if fit.fits and about_model.problem and not misplaced:
        failure = f"loads into {title}, but the model in the file {about_model.problem}"
    return Diff(
        checkpoint.source,
        f"{title} (of {names.model})",
        identical=identical,
        entries=fit.entries,
        notes=tuple(notes),
        harmless=HARMLESS | {Code.OPTION.code},  # loading takes the file's
        other_failure="" if identical else failure,
        asks="optimizer",
        names=(checkpoint.source, title),
        remedy=fit.remedy,
        compared=compared_by_loading(checkpoint, ignore_dtype) | {"optimizers": True},
    )


class _ModelInFile(NamedTuple):
    """Whether the model next to the optimizer loads; `problem` says why not, after "the model in
    the file".
    """

    loads: bool
    problem: str
    notes: tuple[str, ...]


def _model_in_file(model: ModelOperand, checkpoint: Checkpoint, ignore_dtype: bool) -> _ModelInFile:
    """Return whether the model in the same file loads; a file without one does not matter."""
    if not checkpoint.state_dicts:
        unreadable = tuple(unreadable_note(checkpoint))
        return _ModelInFile(not unreadable, "", unreadable)
    try:
        loaded = load(replace(model, optimizer=None), checkpoint, ignore_dtype)
    except CkptError as error:
        text = f"the model in this file was not compared: {error.message} ({error.hint})"
        return _ModelInFile(False, "was not compared", (Note(text, "not-compared"),))
    if loaded.identical:
        return _ModelInFile(True, "", ())
    failing = [entry for entry in loaded.entries if loaded.is_difference(entry)]
    why = ""
    if failing and all(entry.status == "dtype" for entry in failing):
        why = f": {min(entry.why() for entry in failing)}"
    command = shell("ckpttool", "diff", *model.words, checkpoint.source)
    problem = "does not load as it is"
    text = f"the model in this file {problem} ({command}){why}"
    return _ModelInFile(False, problem, (Note(text, "other-sections"),))


def _note_on_stateless(section: Section) -> list[Note]:
    """Return a note on the parameters without state, if others have some."""
    state = read(section)
    without = [str(param) for param in state.params if not state.state.get(param)]
    if not without or len(without) == len(state.params):
        return []
    count = plural(len(without), "parameter")
    text = f"{count} without state in the checkpoint: {some(without)}"
    return [Note(text, "no-optimizer-state")]


def _with_copies_of_ranks(fit: OptimizerFit, section: Section) -> OptimizerFit:
    """Return the fit; state of which the ranks hold different copies does not fit."""
    entries = []
    for entry in section.tensors:
        if is_of_ranks(entry) and not ranks_agree(entry):
            key = (entry.key,)
            entries.append(Entry("value", key, key, Cause(Code.RANK_VALUE)))
    if not entries:
        return fit
    return replace(fit, entries=(*fit.entries, *entries), fits=False, remedy=None)


def _misplaced(checkpoint: Checkpoint, section: Section) -> list[str]:
    """Return a note if the optimizer's state is the entry of the scheduler, and the optimizer's
    entry is another.
    """
    is_scheduler = "sched" in section.path.rpartition(".")[2].lower()
    others = []
    for path in checkpoint.others:
        if path.rpartition(".")[2].lower().startswith("optim"):
            others.append(path)
    if not is_scheduler or not others:
        return []
    text = (
        f"the state of the optimizer is in `{section.path}`, and `{others[0]}` has no param"
        " groups: the two entries may be swapped"
    )
    return [Note(text, "misplaced")]


def _no_single_optimizer(model: ModelOperand, checkpoint: Checkpoint) -> CkptError:
    paths = [section.path for section in checkpoint.optimizers]
    if paths:
        several = ", ".join(path or "(root)" for path in paths)
        hint = f"pick one: {checkpoint.part(paths[0])}"
        return CkptError(f"{checkpoint.source} has several optimizers: {several}", hint=hint)
    words, source = model.words, checkpoint.source
    files = optimizers_in(names_in(source)) if is_folder(source) else []
    if files:
        path = join(source, files[0])
        hint = f"name the file: {path}"
        if isinstance(model.optimizer, str):
            line = shell("ckpttool", "diff", path, *words, "--optimizer", model.optimizer)
            hint = f"name the file: {line}"
        text = f"{source} has its optimizer in a separate file, {files[0]}"
        return CkptError(text, hint=hint)
    command = shell("ckpttool", "diff", *words, source)
    if checkpoint.in_memory:
        command = "ckpttool.diff(ckpt, model=...)"
    return CkptError(
        f"{checkpoint.source} has no optimizer: an optimizer that resumes from it starts from"
        " scratch",
        hint=f"compare the model only: {command}",
    )


def in_model_order(names: Names, section: Section) -> Names:
    """Return `names` with an optimizer of as many of the model's parameters as the file has, in
    their order.

    Raises `CkptError` unless that is one group, of all parameters or of all trainable ones.
    """
    state, parameters = read(section), Parameters(names)
    count = len(state.params)
    all_names, trainable = tuple(parameters.shapes), parameters.trainable
    chosen = next((some for some in (all_names, trainable) if len(some) == count), None)
    if len(state.groups) != 1 or chosen is None:
        groups = plural(len(state.groups), "param group")
        raise CkptError(
            f"{plural(count, 'parameter')} in {groups}: unclear which optimizer of {names.model}"
            " loads them",
            hint="pass --optimizer file.py:make, the function that makes the optimizer of the"
            " model",
        )
    fqn_of: dict[str, str] = {}
    for tensor in names.runtime:
        fqn_of.setdefault(tensor.canonical, tensor.fqn)
    params = tuple(OptimizerParam(place, fqn_of[name], 0) for place, name in enumerate(chosen))
    return replace(names, optimizer=params, optimizer_groups=(state.groups[0].hyperparameters,))


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
    named = _in_groups(param_map.state, state.form, target)
    failed = verdict is not None and verdict.error is not None
    stepped = verdict is not None and verdict.stepped and not failed
    needs: list[str] = []
    if not stepped:
        needs = lacking(named, target.names.optimizer_groups, target.first_step)
    required = _required_options(named, target, needs, failed and (by_dcp or state.form == FLAT))
    if required and all(_option_of(key) in required for key in needs):
        needs = []
    misassigned = _misassigned(param_map, target, verdict)
    entries = []
    for entry in group_entries(named, target.fresh_optimizer, misassigned):
        entries.append(_as_required(entry, required))
    for key in needs:
        if not _is_hyperparameter(key):
            entries.append(only_right(key, Cause(Code.NOT_STEPPABLE)))
    if state.form != ID and not stepped and named.state:
        entries += _without_state(named, target)
    # Loading takes all hyperparameters of the file.
    differing = bool(needs or required)
    for entry in entries:
        if entry.status not in HARMLESS and not _is_hyperparameter((*entry.left, *entry.right)[0]):
            differing = True
    if verdict is not None and failed and not needs:
        note = Info if differing else Note  # the entries say why
        notes.append(note(f"torch: {verdict.error}", "torch-error"))
    if needs:
        saved_class = class_of(named) or UNKNOWN_CLASS
        new_class = class_of(target.fresh_optimizer) or UNKNOWN_CLASS
        text = (
            f"the state is from {saved_class}, the optimizer is {new_class}: torch loads it and"
            " fails at the next step"
        )
        notes.append(Note(text, "optimizer-class"))
    if not (differing or failed or param_map.doubt):
        notes += _notes_on_fit(param_map, named, target)
        return OptimizerFit(tuple(entries), tuple(notes), True)
    is_foreign = bool(needs) or (failed and not differing and state.form == ID)
    remedy = Remedy("drop_state") if is_foreign else _remedy(param_map, named, target, notes)
    if required and remedy.way == "by_name":
        remedy = Remedy("regroup")  # --to-optimizer adds the options
    if remedy.way in ("by_name", "regroup") and any(e.has(Code.NO_STATE) for e in entries):
        remedy = Remedy("create_state", state.form)
    fit = OptimizerFit(tuple(entries), tuple(notes), False, remedy)
    return _with_old_model(fit, state, target, saved) if remedy.way == "old_model" else fit


def _without_owners(
    state: OptimizerState, target: Parameters, saved: SavedOptimizer, notes: list[str]
) -> OptimizerFit:
    """Compare a state whose parameters are unknown: by the names in the file, else by ids."""
    by_file, fresh = own_names(state, saved.models), target.fresh_optimizer
    if by_file is None:
        entries = group_entries(state, numbered(fresh))
    else:
        entries = group_entries(by_file.state, fresh)
        words = "{left}: its parameters are named by {}"
        notes.append(Info.about(words, "optimizer-names", by_file.evidence))
    return _with_old_model(OptimizerFit(tuple(entries), tuple(notes), False), state, target, saved)


def _in_groups(named: OptimizerState, form: str, target: Parameters) -> OptimizerState:
    """Return a flattened state in the groups of the optimizer that loads it, as torch reads it: it
    has no groups itself.
    """
    if form != FLAT or not _has_same_parameters(named, target):
        return named
    same, defaults = identity(named.params), target.names.optimizer_groups
    try:
        groups = arranged(named, same, target.groups, defaults, by_parameter=True)
    except Refused:  # torch rejects it too
        return named
    return replace(named, groups=groups)


def _without_state(named: OptimizerState, target: Parameters) -> Iterator[Entry]:
    """Yield the trainable parameters of the optimizer for which the file has no state."""
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
    elif param_map.evidence not in ("param_names", "names"):
        yield rests_on(param_map, SIDES[0])


def _with_old_model(
    fit: OptimizerFit, state: OptimizerState, target: Parameters, saved: SavedOptimizer
) -> OptimizerFit:
    """Return the fit with the remedy that names the model that saved the file, or the optimizer if
    it is this model.
    """
    sizes = [len(group.params) for group in state.groups]
    same_groups: bool | None = sizes == [len(group) for group in target.groups]
    has_names = state.form != ID or all(group.param_names for group in state.groups)
    if not same_groups and (has_names or len(sizes) == 1):
        same_groups = None
    matches = [read_keys(NameTables(target.names), section).match for section in saved.models]
    foreign = tuple(dict.fromkeys(key for match in matches for key in match.unmatched))
    if foreign and all(match.missing for match in matches):
        text = (
            f"{foreign[0]} is not in {target.names.model}, and {matches[0].missing[0]} is not in"
            " the file: if they are one tensor, rename it first, for model and optimizer: remap"
            " --rule 'FROM => TO' --optimizer-keys fqn"
        )
        return replace(fit, remedy=None, notes=(*fit.notes, Note(text, "optimizer-names")))
    # else one of them has frozen parameters
    same_count = len(state.params) == sum(map(len, target.groups))
    by_ids = state.form == ID and in_file(state)[0] is None
    may_be_this_model = same_count and by_ids and not foreign
    # `()`: the file's order is known, and is the model's
    if may_be_this_model and saved_order(saved.models, target.names, target.shapes) == ():
        return replace(fit, remedy=Remedy("old_optimizer"))
    return replace(fit, remedy=Remedy("old_model", None, same_groups, foreign))


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
        param_map = owners(state, names, "left", saved.models)
    except Refused as error:
        notes.append(refusal(error, SIDES[0]))
    if state.form == ID and (param_map is None or param_map.doubt is not None):
        no_optimizer = replace(names, optimizer=(), optimizer_class=None, optimizer_groups=())
        with suppress(Refused):
            other = owners(state, no_optimizer, "left", saved.models)
            if param_map is None or (other.doubt is None and not other.assumed):
                param_map, notes = other, []
    if param_map is not None and param_map.doubt is not None:
        text = f"{param_map.doubt.message}: {param_map.doubt.problems[0]}"
        notes.append(Note.about("{left}: {}", "doubtful-ids", text))
    return param_map, notes


def _has_same_parameters(state: OptimizerState, target: Parameters) -> bool:
    return set(map(str, state.params)) == set(chain.from_iterable(target.groups))


def _misassigned(
    param_map: ParamMap, target: Parameters, verdict: OptimizerVerdict | None
) -> Misassigned | None:
    """Return the parameters that would not get their own state, and why."""
    state, name_of = param_map.saved, param_map.names
    if param_map.doubt is not None:
        names = {str(param): name for param, name in name_of.items()}
        details = {}
        for problem in param_map.doubt.problems:
            details[names.get(problem.key, problem.key)] = problem.problem
        return Misassigned(Cause(Code.DOUBT, (param_map.doubt.message,)), details)
    sizes = [len(group.params) for group in state.groups]
    if state.form != ID or sizes != [len(group) for group in target.groups]:
        return None
    landed: dict[Param, Param] = dict(zip(target.fresh_optimizer.params, state.params))
    if verdict is not None and verdict.error is None:
        for fqn, param in verdict.landed.items():
            landed[target.canonical[fqn]] = param
    saved_group: dict[str, int] = {}
    for index, saved in enumerate(state.groups):
        saved_group.update(dict.fromkeys((name_of[param] for param in saved.params), index))
    new_group: dict[str, int] = {}
    for index, group in enumerate(target.groups):
        new_group.update(dict.fromkeys(group, index))
    with_state = {name_of[param] for param, slots in state.state.items() if slots}
    details = {}
    for param, saved_param in landed.items():
        name, other = str(param), name_of[saved_param]
        # For parameters without state only the group matters.
        moved = saved_group.get(name) != new_group[name]
        if other != name and (moved or not with_state.isdisjoint((name, other))):
            details[name] = f"gets the state of {other}"
    return Misassigned(Cause(Code.MISASSIGNED), details)


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
    param_map: ParamMap, named: OptimizerState, target: Parameters, notes: list[str]
) -> Remedy:
    """Return how the state could be fixed: by name if only its order differs, else by groups."""
    if param_map.doubt is not None:
        return Remedy("old_model")
    form, params = param_map.saved.form, set(named.params)
    same, defaults = identity(named.params), target.names.optimizer_groups
    try:
        groups = arranged(named, same, target.groups, defaults, by_parameter=form == FLAT)
        kept = [param for group in groups for param in group.params if param in params]
        carry(named, identity(kept), target.shapes, "left")
    except Refused as error:
        text = (
            f"no remap arranges it in the new order and param groups: {error.message}:"
            f" {error.problems[0]}"
        )
        notes.append(Note(text, "no-fix"))
        return Remedy("drop_state")
    saved_groups = {frozenset(map(str, group.params)) for group in named.groups}
    if saved_groups != set(map(frozenset, target.groups)):
        return Remedy("regroup")
    is_named = param_map.evidence in ("param_names", "names")
    return Remedy("by_name", form) if is_named else Remedy("regroup")
