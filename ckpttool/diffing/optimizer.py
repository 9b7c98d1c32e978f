"""Compare a saved optimizer with another one, or with the optimizer that loads it: class, groups
and state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpttool.core.checkpoint import Checkpoint, ExtraEntry, Section, TensorEntry
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
from ckpttool.core.text import Info, Note, free, plural, shell, some
from ckpttool.core.values import dataclass
from ckpttool.diffing.causes import SIDES, Cause, Code
from ckpttool.diffing.model import compared_by_loading, load, unreadable_note
from ckpttool.diffing.result import HARMLESS, Diff, Entry, Outlines, Remedy, only_left, only_right
from ckpttool.diffing.sections import Values, compare_pair
from ckpttool.formats.folders import optimizers_in
from ckpttool.formats.registry import format_of
from ckpttool.io.files import names_in
from ckpttool.io.paths import join
from ckpttool.naming.convert import read as read_keys
from ckpttool.naming.match import NameTables
from ckpttool.operands.checkpoint import is_folder, saved_state_dicts
from ckpttool.operands.model import ModelOperand
from ckpttool.optimizers.forms import class_of, lacking, read, same_option, with_new_options
from ckpttool.optimizers.identify import (
    Parameters,
    ParamMap,
    in_file,
    own_names,
    owners,
    same_key_order,
    saved_order,
)
from ckpttool.optimizers.transform import arranged, carry, different, identity

if TYPE_CHECKING:
    from ckpttool.tracing.build_optimizer import OptimizerVerdict

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
    home, other_home = (
        {param: index for index, group in enumerate(state.groups) for param in group.params}
        for state in (left, right)
    )
    pairs = _paired_groups(left, right, other_home)
    entries: list[Entry] = []
    for index, group in enumerate(left.groups):
        other = pairs.get(index)
        if other is None:
            entries.append(only_left(f"{GROUPS}.{index}", Cause(Code.GROUP_UNEXPECTED)))
            continue
        entries += _option_entries(
            (f"{GROUPS}.{index}", group.hyperparameters),
            (f"{GROUPS}.{other}", right.groups[other].hyperparameters),
        )
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
            entries.append(
                only_right(
                    f"{GROUPS}.{other}.{PARAMS}.{param}", Cause(Code.PARAM_MISSING, (other,))
                )
            )
    return entries


def _option_entries(
    left: tuple[str, Mapping[str, Any]], right: tuple[str, Mapping[str, Any]]
) -> Iterator[Entry]:
    """Compare the hyperparameters of two groups, each with the path of its group."""
    (left_path, left_options), (right_path, right_options) = left, right
    differing = different(left_options, right_options)
    for name in dict.fromkeys((*left_options, *right_options)):
        key, other_key = f"{left_path}.{name}", f"{right_path}.{name}"
        if name not in differing:
            yield Entry("same", (key,), (other_key,))
        elif name not in right_options:
            yield only_left(key, Cause(Code.OPTION_UNEXPECTED, (name,)))
        elif name not in left_options:
            yield only_right(other_key, Cause(Code.OPTION_MISSING, (name,)))
        else:
            detail = "{} instead of {}".format(*differing[name])
            cause = Cause(Code.OPTION, (name,))
            yield Entry("value", (key,), (other_key,), cause, None, detail)


def _paired_groups(
    left: OptimizerState, right: OptimizerState, home: Mapping[Param, int]
) -> dict[int, int]:
    """Pair the groups that share most parameters, and the rest by position. `home`: the group of
    right's parameters.

    One group that is split keeps its position.
    """
    taken, pairs = set[int](), dict[int, int]()
    for index, group in enumerate(left.groups if len(left.groups) > 1 else ()):
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
    mine, theirs = _flat(left), _flat(right)
    entries = []
    for path in mine:
        if path not in theirs:
            continue
        keys, one, other = (
            ((mine[path].key,), (theirs[path].key,)),
            mine[path].value,
            theirs[path].value,
        )
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
    entries += [
        only_left(one.key, _lacking(one, right, *in_right))
        for path, one in mine.items()
        if path not in theirs
    ]
    entries += [
        only_right(one.key, _lacking(one, left, *in_left))
        for path, one in theirs.items()
        if path not in mine
    ]
    return entries


def _lacking(
    value: _Value, state: OptimizerState, loose: Code, no_value: Code, no_state: Code
) -> Cause:
    """Return why `state` does not have the value."""
    if value.param is None:
        return Cause(loose)
    return Cause(no_value, (value.name,)) if state.state.get(value.param) else Cause(no_state)


def _flat(state: OptimizerState) -> dict[_Path, _Value]:
    """Return every part of the state by its path. Names may hold dots, so keys are made unique."""
    roots: list[tuple[Param | None, _Path, Any]] = [
        (param, (STATE, param, name), value)
        for param, own in state.state.items()
        for name, value in own.items()
    ]
    roots += [(None, (STATE, name), value) for name, value in state.loose.items()]
    roots += [(None, (name,), value) for name, value in state.rest.items()]
    flat: dict[_Path, _Value] = {}
    taken: set[str] = set()
    for param, root, whole in roots:
        for path, value in _parts(whole, root):
            words = [*map(str, path)]
            flat[path] = _Value(
                free(".".join(words), taken), param, ".".join(words[len(root) - 1 :]), value
            )
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
    return {
        part.key: part.value
        for part in _flat(state).values()
        if isinstance(part.value, TensorEntry)
    }


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
class _Side:
    """A saved optimizer; in `state` its parameters have names if `owners` or the file gives
    them.
    """

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
) -> OptimizerDiff:
    """Compare two saved optimizers.

    Parameters are compared by name if both sides have names, else by id. If torch loads both by
    position, equal names at different positions are differences too. Raises `CkptError` if a side
    is not the state of an optimizer.
    """
    notes: list[str] = []
    mine, theirs = (_side(saved, names, side, notes) for saved, side in zip((left, right), SIDES))
    forms = mine.saved.form, theirs.saved.form
    other_order = same_key_order(left.models, right.models) is False
    # Ids without names, of models that were registered in different orders: no id is known to be
    # the same parameter.
    unknown_ids = (
        Misassigned(Cause(Code.KEY_ORDER), dict.fromkeys(mine.saved.params))
        if other_order
        else None
    )
    misassigned, by_id = None, False
    if forms == (ID, ID) and not (mine.is_named and theirs.is_named):
        mine, theirs = (replace(side, state=side.saved, owners=None) for side in (mine, theirs))
        misassigned = unknown_ids
        by_id = misassigned is None
    elif forms == (ID, ID):
        if not all(
            side.owners is None or side.owners.evidence == "param_names" for side in (mine, theirs)
        ):
            misassigned = unknown_ids and replace(
                unknown_ids, details=dict.fromkeys(mine.state.params)
            )
        misassigned = misassigned or _at_other_positions(mine.state, theirs.state)
    if mine.is_named != theirs.is_named:
        mine, theirs = (replace(side, state=numbered(side.state)) for side in (mine, theirs))
        notes.append(Info("parameters are compared by position in the param groups", "compared-by"))
    doubts = [_doubted(one, notes, side) for one, side in zip((mine, theirs), SIDES)]
    # else one model saved both
    if forms != (ID, ID) or not same_key_order(left.models, right.models):
        misassigned = next((doubt for doubt in doubts if doubt is not None), misassigned)
    entries = [
        *group_entries(mine.state, theirs.state, misassigned),
        *state_entries(mine.state, theirs.state, values),
    ]
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
    """Return the state with parameters under their names, or as it is if nothing gives them: then
    with a note.
    """
    state = read(saved.section)
    if not state.params:
        return _Side(replace(state, form=FQN), state, None)
    try:
        param_map = owners(state, names, side, saved.models)
    except Refused as error:
        if names is not None:  # without names, a note says that ids are compared
            notes.append(refusal(error, side))
        return _Side(state, state, None)
    if param_map.assumed:
        notes.append(_rests_on(param_map, side))
    return _Side(param_map.state, state, param_map)


def is_named(saved: SavedOptimizer) -> bool:
    """Return True if the file itself names the parameters of the state."""
    return _side(saved, None, "", []).is_named


def refusal(error: Refused, side: str) -> Note:
    """Return a refusal as a note; its message begins with the name of the `side`."""
    words = error.message.removeprefix(side)
    start = f"{{{side}}}" if words != error.message else ""
    more = f": {error.problems[0]}" if error.problems else f" ({error.hint})"
    return Note.about(f"{start}{{}}{{}}", "optimizer-names", words, more)


def _rests_on(param_map: ParamMap, side: str) -> Info:
    """Return a note on what the answer rests on, if the file does not name the parameters."""
    words = param_map.rests_on(side).removeprefix(side)
    return Info.about(f"{{{side}}}{{}}", "optimizer-names", words)


def _at_other_positions(left: OptimizerState, right: OptimizerState) -> Misassigned | None:
    """Return the parameters that have another position on the other side."""
    if left.is_stateless and right.is_stateless:
        return None
    position = {param: at for at, param in enumerate(right.params)}
    details = {
        param: f"number {at} in left, {position[param]} in right"
        for at, param in enumerate(left.params)
        if position.get(param, at) != at
    }
    return Misassigned(Cause(Code.POSITION), details)


def _doubted(side: _Side, notes: list[str], name: str) -> Misassigned | None:
    """Return all parameters if something in the file contradicts their names."""
    doubt = None if side.owners is None else side.owners.doubt
    if doubt is None:
        return None
    text = f"{doubt.message}: {doubt.problems[0]} ({doubt.hint})"
    notes.append(Note.about(f"{{{name}}}: {{}}", "doubtful-ids", text))
    return Misassigned(Cause(Code.DOUBT, (doubt.message,)), dict.fromkeys(side.state.params))


# A saved optimizer and the optimizer that loads it


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

        verdict = optimizer_verdict(
            model.definition(), load_optimizer(model.optimizer), section, by_dcp
        )
    fit = compare_with_optimizer(SavedOptimizer.of(checkpoint, section), names, verdict, by_dcp)
    notes = [*fit.notes]
    of_model = ""  # what stops the model in the file
    if checkpoint.state_dicts:
        model_loads = False
        command = shell("ckpttool", "diff", *model.words, checkpoint.source)
        try:
            loaded = load(replace(model, optimizer=None), checkpoint, ignore_dtype)
            model_loads = loaded.identical
            if not model_loads:
                of_model = "does not load as it is"
                failing = [entry for entry in loaded.entries if loaded.is_difference(entry)]
                dtypes = {entry.why() for entry in failing if entry.status == "dtype"}
                why = (
                    f": {min(dtypes)}"
                    if dtypes and all(entry.status == "dtype" for entry in failing)
                    else ""
                )
                text = f"the model in this file does not load as it is ({command}){why}"
                notes.append(Note(text, "other-sections"))
        except CkptError as error:
            of_model = "was not compared"
            text = f"the model in this file was not compared: {error.message} ({error.hint})"
            notes.append(Note(text, "not-compared"))
    else:
        unreadable = unreadable_note(checkpoint)
        notes += unreadable
        model_loads = not unreadable
    if verdict is not None and verdict.converted and not ignore_dtype:
        what = plural(len(verdict.converted), "tensor")
        text = (
            f"loading converts {what} of the state to the parameter's dtype:"
            f" {some(verdict.converted)}"
        )
        notes.append(Note(text, "converts"))
    state = read(section)
    without = [str(param) for param in state.params if not state.state.get(param)]
    if 0 < len(without) < len(state.params):
        text = (
            f"{plural(len(without), 'parameter')} without state in the checkpoint: {some(without)}"
        )
        notes.append(Note(text, "no-optimizer-state"))
    title = (
        model.optimizer
        if isinstance(model.optimizer, str)
        else names.optimizer_class or "model.parameters()"
    )
    misplaced = _misplaced(checkpoint, section)
    notes = [*misplaced, *notes]
    identical = fit.fits and model_loads and not misplaced
    failure = f"does not load into {title}"
    if fit.fits and of_model and not misplaced:
        failure = f"loads into {title}, but the model in the file {of_model}"
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


def _misplaced(checkpoint: Checkpoint, section: Section) -> list[str]:
    """Return a note if the optimizer's state is the entry of the scheduler, and the optimizer's
    entry is another.
    """
    is_scheduler = "sched" in section.path.rpartition(".")[2].lower()
    others = [
        path for path in checkpoint.others if path.rpartition(".")[2].lower().startswith("optim")
    ]
    if not is_scheduler or not others:
        return []
    text = (
        f"the state of the optimizer is in `{section.path}`, and `{others[0]}` has no param"
        " groups: the two "
        "entries may be swapped"
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
        is_named = isinstance(model.optimizer, str)
        again = (
            shell("ckpttool", "diff", path, *words, "--optimizer", model.optimizer)
            if is_named
            else path
        )
        return CkptError(
            f"{source} has its optimizer in a separate file, {files[0]}",
            hint=f"name the file: {again}",
        )
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
    chosen = [
        own
        for own in (tuple(parameters.shapes), parameters.trainable)
        if len(own) == len(state.params)
    ]
    if len(state.groups) != 1 or not chosen:
        counts = (
            f"{plural(len(state.params), 'parameter')} in"
            f" {plural(len(state.groups), 'param group')}"
        )
        raise CkptError(
            f"{counts}: unclear which optimizer of {names.model} loads them",
            hint="pass --optimizer file.py:make, the function that makes the optimizer of the"
            " model",
        )
    fqn_of = {t.canonical: t.fqn for t in reversed(names.runtime)}
    params = tuple(OptimizerParam(place, fqn_of[name], 0) for place, name in enumerate(chosen[0]))
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
    known, notes = _owners(state, names, saved)
    if known is None:  # compare by the names in the file, else by ids
        own, fresh = own_names(state, saved.models), target.fresh_optimizer
        entries = (
            group_entries(state, numbered(fresh))
            if own is None
            else group_entries(own.state, fresh)
        )
        if own is not None:
            notes.append(
                Info.about(
                    "{left}: its parameters are named by {}", "optimizer-names", own.evidence
                )
            )
        return _with_old_model(
            OptimizerFit(tuple(entries), tuple(notes), False), state, target, saved
        )
    mine = known.state
    if state.form == FLAT and _has_same_parameters(mine, target):
        try:  # it has no groups: torch reads it into the groups of the optimizer
            groups = arranged(
                mine,
                identity(mine.params),
                target.groups,
                target.names.optimizer_groups,
                by_parameter=True,
            )
            mine = replace(mine, groups=groups)
        except Refused:
            pass  # torch rejects it too
    stepped = verdict is not None and verdict.stepped and verdict.error is None
    needs: list[str] = []
    if not stepped:
        needs = lacking(mine, target.names.optimizer_groups, target.first_step)
    entries = group_entries(mine, target.fresh_optimizer, _misassigned(known, target, verdict))
    failed = verdict is not None and verdict.error is not None
    required = _required_options(mine, target, needs, failed and (by_dcp or state.form == FLAT))
    if required and all(key.rpartition(".")[2] in required for key in needs):
        needs = []
    entries = [
        *(_as_required(entry, required) for entry in entries),
        *(
            only_right(key, Cause(Code.NOT_STEPPABLE))
            for key in needs
            if not _is_hyperparameter(key)
        ),
    ]
    if state.form != ID and not stepped and mine.state:
        in_groups = {name for group in target.groups for name in group}
        entries += [
            only_right(f"{STATE}.{name}", Cause(Code.NO_STATE))
            for name in target.trainable
            if name in in_groups and name not in mine.state
        ]
    # Loading takes all hyperparameters of the file.
    keys = (next(iter((*e.left, *e.right))) for e in entries if e.status not in HARMLESS)
    differing = bool(needs or required) or not all(map(_is_hyperparameter, keys))
    if verdict is not None and failed:
        notes.append(Note(f"torch: {verdict.error}", "torch-error"))
    if needs:
        classes = [class_of(one) or UNKNOWN_CLASS for one in (mine, target.fresh_optimizer)]
        text = (
            f"the state is from {classes[0]}, the optimizer is {classes[1]}: torch loads it and"
            " fails at the next "
            "step. No remap converts it; the optimizer must start from scratch"
        )
        notes.append(Note(text, "optimizer-class"))
    if not (differing or failed or known.doubt):
        if known.saved.form == FQN and mine.params != target.fresh_optimizer.params:
            words = (
                "{left}: set_optimizer_state_dict loads it by name; Optimizer.load_state_dict loads"
                " by position, and would give state to other parameters (remap --optimizer-keys id"
                " puts it in order)"
            )
            notes.append(Note.about(words, "optimizer-order"))
        elif known.evidence not in ("param_names", "names"):
            notes.append(_rests_on(known, SIDES[0]))
        return OptimizerFit(tuple(entries), tuple(notes), True)
    is_foreign = bool(needs) or (failed and not differing and state.form == ID)
    remedy = Remedy("drop_state") if is_foreign else _remedy(known, mine, target, notes)
    if required and remedy.way == "by_name":
        remedy = Remedy("regroup")  # --to-optimizer adds the options
    fit = OptimizerFit(tuple(entries), tuple(notes), False, remedy)
    return _with_old_model(fit, state, target, saved) if remedy.way == "old_model" else fit


def _with_old_model(
    fit: OptimizerFit, state: OptimizerState, target: Parameters, saved: SavedOptimizer
) -> OptimizerFit:
    """Return the fit with the remedy that names the model that saved the file, or the optimizer if
    it is this model.
    """
    sizes = [len(group.params) for group in state.groups]
    same_groups: bool | None = sizes == [len(group) for group in target.groups]
    if not same_groups and (
        state.form != ID or len(sizes) == 1 or all(group.param_names for group in state.groups)
    ):
        same_groups = None
    matches = [read_keys(NameTables(target.names), section).match for section in saved.models]
    foreign = tuple(dict.fromkeys(key for match in matches for key in match.unmatched))
    if foreign and all(match.missing for match in matches):
        text = (
            f"{foreign[0]} is not in {target.names.model}, and {matches[0].missing[0]} is not in"
            " the file: if they are "
            "one tensor, rename it first, for model and optimizer: remap --rule 'FROM => TO'"
            " --optimizer-keys fqn"
        )
        return replace(fit, remedy=None, notes=(*fit.notes, Note(text, "optimizer-names")))
    # else one of them has frozen parameters
    same_count = len(state.params) == sum(map(len, target.groups))
    by_ids = state.form == ID and in_file(state)[0] is None
    if (
        same_count
        and by_ids
        and not foreign
        and saved_order(saved.models, target.names, target.shapes) == ()
    ):
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
    notes = list[str]()
    known: ParamMap | None = None
    try:
        known = owners(state, names, "left", saved.models)
    except Refused as error:
        notes.append(refusal(error, SIDES[0]))
    if state.form == ID and (known is None or known.doubt is not None):
        with suppress(Refused):
            without_optimizer = replace(
                names, optimizer=(), optimizer_class=None, optimizer_groups=()
            )
            other = owners(state, without_optimizer, "left", saved.models)
            if known is None or (other.doubt is None and not other.assumed):
                known, notes = other, []
    if known is not None and known.doubt is not None:
        text = f"{known.doubt.message}: {known.doubt.problems[0]}"
        notes.append(Note.about("{left}: {}", "doubtful-ids", text))
    return known, notes


def _has_same_parameters(state: OptimizerState, target: Parameters) -> bool:
    return {str(param) for param in state.params} == {
        name for group in target.groups for name in group
    }


def _misassigned(
    known: ParamMap, target: Parameters, verdict: OptimizerVerdict | None
) -> Misassigned | None:
    """Return the parameters that would not get their own state, and why."""
    state = known.saved
    if known.doubt is not None:
        names = {str(param): name for param, name in known.names.items()}
        details = {
            names.get(problem.key, problem.key): problem.problem for problem in known.doubt.problems
        }
        return Misassigned(Cause(Code.DOUBT, (known.doubt.message,)), details)
    if state.form != ID or [len(group.params) for group in state.groups] != [
        len(group) for group in target.groups
    ]:
        return None
    landed: Mapping[Param, Param] = dict(zip(target.fresh_optimizer.params, state.params))
    if verdict is not None and verdict.error is None:
        landed = {
            **landed,
            **{target.canonical[fqn]: param for fqn, param in verdict.landed.items()},
        }
    saved_group = {
        known.names[param]: index
        for index, group in enumerate(state.groups)
        for param in group.params
    }
    new_group = {name: index for index, group in enumerate(target.groups) for name in group}
    with_state = {known.names[param] for param, own in state.state.items() if own}
    details = {}
    for param, saved_param in landed.items():
        name, other = str(param), known.names[saved_param]
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
    fresh = target.fresh_optimizer
    added = set[str]()
    for old, new in zip(
        state.groups, with_new_options(state.groups, fresh, target.first_step, state)
    ):
        added.update(new.options.keys() - old.options.keys())
    if not loads_each:
        added &= {key.rpartition(".")[2] for key in needs if _is_hyperparameter(key)}
    return frozenset(added)


def _as_required(entry: Entry, required: frozenset[str]) -> Entry:
    """Return the entry with another code if it is about a missing option that is `required`."""
    cause = entry.cause
    if cause is None or cause.code is not Code.OPTION_MISSING or cause.args[0] not in required:
        return entry
    return replace(entry, cause=replace(cause, code=Code.OPTION_REQUIRED))


def _is_hyperparameter(key: str) -> bool:
    return key.startswith(f"{GROUPS}.") and key.count(".") >= 2 and f".{PARAMS}." not in key


def _remedy(known: ParamMap, mine: OptimizerState, target: Parameters, notes: list[str]) -> Remedy:
    if known.doubt is not None:
        return Remedy("old_model")
    try:
        is_flat = known.saved.form == FLAT
        defaults = target.names.optimizer_groups
        groups = arranged(
            mine, identity(mine.params), target.groups, defaults, by_parameter=is_flat
        )
        have = set(mine.params)
        carry(
            mine,
            identity([p for group in groups for p in group.params if p in have]),
            target.shapes,
            "left",
        )
    except Refused as error:
        text = (
            f"no remap arranges it in the new order and param groups: {error.message}:"
            f" {error.problems[0]}"
        )
        notes.append(Note(text, "no-fix"))
        return Remedy("drop_state")
    has_same_groups = {frozenset(group.params) for group in mine.groups} == set(
        map(frozenset, target.groups)
    )
    by_name = known.evidence in ("param_names", "names") and has_same_groups
    return Remedy("by_name", known.saved.form) if by_name else Remedy("regroup")
