"""Compare a checkpoint with what a model and its optimizer load."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ckpttool.core.checkpoint import Checkpoint, Section
from ckpttool.core.errors import CkptError, Problem, Refused
from ckpttool.core.expression import is_opaque, refs
from ckpttool.core.names import AS_A_PART, SERIALIZED, Names, OptimizerParam
from ckpttool.core.optimizer_state import FLAT, FQN, GROUPS, ID, PARAMS, STATE, OptimizerState, Param, numbered
from ckpttool.core.text import plural, shell, some
from ckpttool.core.values import dataclass
from ckpttool.diffing import sections
from ckpttool.diffing.checkpoints import adapter_notes
from ckpttool.diffing.names import NON_PERSISTENT, compare_load, compare_names, loads
from ckpttool.diffing.optimizer import Misassigned, SavedOptimizer, group_entries, optimizer_section, said
from ckpttool.diffing.result import HARMLESS, Diff, Entry, Remedy, names_outlines, only_right, outlines
from ckpttool.formats.ranks.files import one_rank
from ckpttool.formats.registry import MEMORY
from ckpttool.formats.torch.legacy_file import UNREADABLE, refused_by_torch
from ckpttool.formats.torch.tensors import is_dense, kind
from ckpttool.naming.convert import other_versions
from ckpttool.naming.convert import read as read_keys
from ckpttool.naming.match import NameTables
from ckpttool.naming.pairing.evidence import exchangeable
from ckpttool.naming.pairing.values import Tensor
from ckpttool.operands.checkpoint import model_section, saved_state_dicts, split
from ckpttool.operands.model import ModelOperand, as_read
from ckpttool.operands.output import outputs
from ckpttool.operands.sections import same_model
from ckpttool.optimizers.classes import class_of, lacking
from ckpttool.optimizers.forms import read
from ckpttool.optimizers.identify import Parameters, ParamMap, own_names, owners, saved_order
from ckpttool.optimizers.transform import arranged, carry, identity

if TYPE_CHECKING:
    from ckpttool.tracing.build_optimizer import OptimizerVerdict
    from ckpttool.tracing.loading import Verdict


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


def _owners(state: OptimizerState, names: Names, saved: SavedOptimizer) -> tuple[ParamMap | None, list[str]]:
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


def _astray(known: ParamMap, target: Parameters, verdict: OptimizerVerdict | None) -> Misassigned:
    """The parameters that would not get their own state, and why."""
    state = known.saved
    if known.doubt is not None:
        names = {str(param): name for param, name in known.names.items()}
        told = {problem.key: problem.problem for problem in known.doubt.problems}
        return Misassigned(known.doubt.message, {names.get(key, key): text for key, text in told.items()})
    if state.form != ID or [len(group.params) for group in state.groups] != [len(group) for group in target.groups]:
        return Misassigned("", {})
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
    return Misassigned(_OF_ANOTHER, told)


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


def _grounds(known: ParamMap, mine: OptimizerState, target: Parameters) -> list[str]:
    """On what it rests that the state fits: on names that are there, or on positions."""
    if known.saved.form == FQN and mine.params != target.fresh_optimizer.params:
        return [
            "left: set_optimizer_state_dict, which goes by name, loads it; Optimizer.load_state_dict goes by position, "
            "and would give state to other parameters (remap --optimizer-keys id puts it in order)"
        ]
    return [] if known.evidence in ("param_names", "names") else [known.rests_on("left")]


def _is_hyperparameter(key: str) -> bool:
    return key.startswith(f"{GROUPS}.") and key.count(".") >= 2 and f".{PARAMS}." not in key


def _remedy(known: ParamMap, mine: OptimizerState, target: Parameters, foreign: bool, notes: list[str]) -> Remedy:
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


FQN_MODIFIERS = (
    "torch.distributed.checkpoint's get_model_state_dict raises an AttributeError for keys that hooks rename, unless "
    "the module has a method `_fqn_modifiers` (pytorch#146557)"
)
FROM_PRETRAINED = (
    "its keys are those that save_pretrained writes and from_pretrained reads, which load_state_dict() does not take; "
    "`--model hf:FOLDER` asks what from_pretrained loads"
)


def names_alone(model: ModelOperand) -> Diff:
    """A model alone: its serialized keys against its runtime names."""
    names = model.names()
    entries = compare_names(names)
    lost = any(e.status == "not_serialized" and e.reason != NON_PERSISTENT for e in entries)
    identical = not lost and all(entry.status in HARMLESS for entry in entries)
    lossy = [f"does not load what it saves: {problem}" for problem in names.roundtrip_problems]
    renamed = any(entry.hook is not None and entry.status in ("renamed", "transformed") for entry in entries)
    notes = (*lossy, *names.notes, *([FQN_MODIFIERS] if renamed else []))
    sides = f"{names.model} (serialized)", f"{names.model} (runtime)"
    beyond = "does not load what it saves" if lost else ""
    compared = dict.fromkeys(("keys", "shapes", "dtypes"), True) | {"values": False, "aliases": True}
    shown = Diff(*sides, identical, entries, notes=notes, beyond=beyond, outlines=names_outlines(names))
    return replace(shown, compared=compared)


def load(model: ModelOperand, checkpoint: Checkpoint, ignore_dtype: bool) -> Diff:
    """A checkpoint against what the model loads; for a model's code the answer is torch's own."""
    section = model_section(checkpoint)
    model = as_read(model, section, checkpoint.source) if model.is_folder else model
    names = model.names()
    verdict = _verdict(model, checkpoint, section) if model.is_definition else None
    entries = sections.explain_computed(compare_load(names, section, verdict))
    if verdict is None and loads(entries):
        _of_known_kinds(model, checkpoint, section)
        _of_known_versions(model, names, section)
    unread = _unread(checkpoint)
    fits = not unread and (loads(entries) if verdict is None else verdict.ok)
    converts = any(e.status == "dtype" for e in entries) if verdict is None else bool(verdict.dtype_changes)
    lost = any(entry.status == "value" for entry in entries)
    identical = fits and not lost and (ignore_dtype or not converts)
    converted = [] if verdict is None or ignore_dtype else _converted(verdict, entries)
    notes = [*unread, *_said(verdict, entries), *converted, *one_rank(checkpoint)]
    found = sum(entry.status in ("same", "renamed", "dtype", "shape") and bool(entry.left) for entry in entries)
    if not found:
        notes.insert(0, f"0 of {len(section.tensors)} tensors matched: loading with strict=False would load nothing")
    if not identical:
        notes += adapter_notes(section.by_key(), [key.key for key in names.serialized], ("the checkpoint", "the model"))
        notes += [note for note in names.notes if note.startswith(AS_A_PART)]
        notes += [FROM_PRETRAINED] if not model.pretrained and _is_pretrained(model, checkpoint, section) else []
    notes += [*_of_other_order(names, checkpoint), *_more_of_it(model, names, checkpoint, section)]
    alike = exchangeable(_distinct(names))
    right = f"{model.title} (what {'from_pretrained' if model.pretrained else 'it'} loads)"
    harmless = HARMLESS | ({"dtype"} if ignore_dtype else set())
    beyond = not identical and (bool(unread or converted) or _is_beyond(verdict, entries))
    says = "loads, and converts" if fits else "does not load"
    sides = outlines(section), names_outlines(names)[0]
    shown = Diff(checkpoint.source, right, identical, entries, notes=tuple(notes), exchangeable=alike, outlines=sides)
    compared = _compared(checkpoint, ignore_dtype) | ({"optimizers": False} if checkpoint.optimizers else {})
    return replace(shown, harmless=harmless, beyond=says if beyond else "", compared=compared)


def _unread(checkpoint: Checkpoint) -> list[str]:
    """A note where torch.load raises for the file, with the command that writes one that it loads."""
    if not refused_by_torch(checkpoint):
        return []
    whole = split(checkpoint.source)[0]
    command = shell("ckpttool", "remap", whole, "-o", next(outputs(whole, "zip")))
    return [f"{UNREADABLE}: {command}"]


def _compared(checkpoint: Checkpoint, ignore_dtype: bool) -> dict[str, bool]:
    """What a load of the checkpoint's model tells: nothing of its values, nor of what else the file holds."""
    kinds = [section.kind for section in checkpoint.sections]
    others = {"other_sections": len(kinds) - kinds.count("optimizer") > 1, "objects": bool(checkpoint.others)}
    return {
        "keys": True,
        "shapes": True,
        "dtypes": not ignore_dtype,
        "values": False,
        "aliases": False,
        "metadata": False,
        **{aspect: False for aspect, there in others.items() if there},
    }


def _is_pretrained(model: ModelOperand, checkpoint: Checkpoint, section: Section) -> bool:
    """Return whether every key is one that save_pretrained writes."""
    other = as_read(model, section, checkpoint.source)
    return other.pretrained and set(section.by_key()) <= {key.key for key in other.names().serialized}


def _is_beyond(verdict: Verdict | None, entries: Sequence[Entry]) -> bool:
    """Whether something stands against loading that none of the entries shows as a difference."""
    if any(entry.status in HARMLESS and not (entry.left and entry.right) for entry in entries):
        return True
    shown = any(entry.status not in HARMLESS for entry in entries)
    return not shown or (verdict is not None and bool(_torch_says(verdict, entries)))


def _more_of_it(model: ModelOperand, names: Names, checkpoint: Checkpoint, section: Section) -> list[str]:
    """A note on each other section that holds the same model; the answer is on one."""
    in_memory = checkpoint.format == MEMORY.name
    return [
        f"{other.path} holds the same model as {section.title}, and was not compared: "
        + (
            f"ckpttool.diff({checkpoint.part(other.path)}, model=...)"
            if in_memory
            else shell("ckpttool", "diff", *model.words, checkpoint.part(other.path))
        )
        for other in same_model(checkpoint, section, names)
    ]


def _verdict(model: ModelOperand, checkpoint: Checkpoint, section: Section) -> Verdict:
    """What torch says. Raises `CkptError` where it cannot be asked: of one rank's part, with what makes it whole."""
    from ckpttool.tracing.loading import load_verdict

    try:
        return load_verdict(model.definition(), section)
    except CkptError as error:
        error.hint = "; ".join(one_rank(checkpoint)) or error.hint
        raise


def _of_known_kinds(model: ModelOperand, checkpoint: Checkpoint, section: Section) -> None:
    """Raises `CkptError` where the model's code would have to say whether it loads such tensors: names do not."""
    strange = [Problem(f"a tensor of another kind ({kind(e)})", e.key) for e in section.tensors if not is_dense(e)]
    if strange:
        raise CkptError(
            f"whether {model.title} loads it depends on {plural(len(strange), 'tensor')} that names do not tell of",
            hint="; ".join(one_rank(checkpoint)) or "its code can tell: --model package.module:attr, or file.py:attr",
            problems=strange,
        )


def _of_known_versions(model: ModelOperand, names: Names, section: Section) -> None:
    """The same for versions of modules, of which names tell the model's own only."""
    others = other_versions(names, section, read_keys(NameTables(names), section, SERIALIZED))
    if others:
        raise CkptError(
            f"whether {model.title} loads it depends on versions of {plural(len(others), 'module')}, and names tell of "
            "other ones",
            hint="its code can tell: --model package.module:attr, or file.py:attr",
            problems=others,
        )


def _said(verdict: Verdict | None, entries: Iterable[Entry]) -> list[str]:
    """What torch says of loading beside the two lists of keys and the shapes that are listed."""
    if verdict is None:
        return []
    assigns = "load_state_dict(..., assign=True) loads it: the file's tensors then take the place of the model's"
    return [*_torch_says(verdict, entries), *([assigns] if verdict.assigns else [])]


def _torch_says(verdict: Verdict, entries: Iterable[Entry]) -> list[str]:
    shown = {f"size mismatch for {key}:" for entry in entries if entry.status == "shape" for key in entry.right}
    return [f"torch: {text}" for text in verdict.errors if text.partition(": ")[0] + ":" not in shown]


def _converted(verdict: Verdict, entries: Iterable[Entry]) -> list[str]:
    """What loading converts though the file has the dtype that the model saves."""
    shown = {key for entry in entries if entry.status == "dtype" for key in (*entry.left, *entry.right)}
    made_of = {fqn: set(refs(value)) for fqn, value in verdict.reads.items() if value is not None}
    changes = [one for one in verdict.dtype_changes if shown.isdisjoint((one.fqn, one.key, *made_of.get(one.fqn, ())))]
    what = some([f"{one.fqn} ({one.source} to {one.target})" for one in changes])
    return [f"loading converts {plural(len(changes), 'tensor')} (--ignore-dtype allows it): {what}"] if changes else []


def _distinct(names: Names) -> Iterator[Tensor]:
    """The tensors that the model loads, those with several keys once."""
    seen = set[object]()
    for key in names.serialized:
        if key.shape is not None and key.source not in seen:
            yield Tensor(key.key, key.dtype, key.shape)
        if key.source is not None and not is_opaque(key.source):
            seen.add(key.source)


def _of_other_order(names: Names, checkpoint: Checkpoint) -> list[str]:
    """A note on optimizers beside the model that were saved by another definition of it."""
    paths = [section.path for section in checkpoint.optimizers]
    order = saved_order(saved_state_dicts(checkpoint), names, set(Parameters(names).shapes)) if paths else None
    if order is None or not order.differing:
        return []
    return [
        "the model that saved this file registers its parameters in another order, by which torch gives optimizers' "
        f"state to them: {', '.join(paths)} is not compared without --optimizer"
    ]


def optimizer(model: ModelOperand, checkpoint: Checkpoint, ignore_dtype: bool) -> Diff:
    """A saved optimizer, and the model beside it, against those that are to load them."""
    names, section = model.names(), optimizer_section(checkpoint)
    if section is None:
        raise _no_optimizer(model, checkpoint)
    if not names.optimizer:
        names = in_model_order(names, section)
    fit = compare_with_optimizer(SavedOptimizer.of(checkpoint, section), names, _tried(model, section))
    notes, loads = _beside(model, checkpoint, ignore_dtype)
    unread = () if checkpoint.state_dicts else tuple(_unread(checkpoint))
    notes, loads = (*unread, *notes), loads and not unread
    state = read(section)
    without = [str(param) for param in state.params if not state.state.get(param)]
    if 0 < len(without) < len(state.params):
        notes = (*notes, f"{plural(len(without), 'parameter')} without state in the checkpoint: {some(without)}")
    made = model.optimizer if isinstance(model.optimizer, str) else names.optimizer_class or "model.parameters()"
    right = f"{made} (of {names.model})"
    identical = fit.fits and loads
    notes = (*fit.notes, *notes)
    beyond = "" if identical else "does not load"
    compared = _compared(checkpoint, ignore_dtype) | {"optimizers": True}
    shown = Diff(checkpoint.source, right, identical, fit.entries, (), notes, beyond=beyond, remedy=fit.remedy)
    return replace(shown, compared=compared)


def _no_optimizer(model: ModelOperand, checkpoint: Checkpoint) -> CkptError:
    paths = [section.path for section in checkpoint.optimizers]
    if paths:
        several = ", ".join(path or "(root)" for path in paths)
        hint = f"pick one: {checkpoint.part(paths[0])}"
        return CkptError(f"{checkpoint.source} holds several optimizers: {several}", hint=hint)
    words = shell("ckpttool", "diff", *model.words, checkpoint.source)
    if checkpoint.format == MEMORY.name:
        words = "ckpttool.diff(ckpt, model=...)"
    return CkptError(
        f"{checkpoint.source} holds no optimizer: one that resumes from it starts afresh", hint=f"its model: {words}"
    )


def _tried(model: ModelOperand, section: Section) -> OptimizerVerdict | None:
    """What torch does with the state; None if it cannot be tried."""
    if model.optimizer is None:
        return None
    from ckpttool.tracing.build_optimizer import load_optimizer, optimizer_verdict

    return optimizer_verdict(model.definition(), load_optimizer(model.optimizer), section)


def _beside(model: ModelOperand, checkpoint: Checkpoint, ignore_dtype: bool) -> tuple[tuple[str, ...], bool]:
    """Whether the model loads from the same file, with a note where it does not; true where there is none in it."""
    if not checkpoint.state_dicts:
        return (), True
    words = shell("ckpttool", "diff", *model.words, checkpoint.source)
    try:
        found = load(replace(model, optimizer=None), checkpoint, ignore_dtype)
    except CkptError as error:
        return (f"the model in this file was not compared: {error.message} ({error.hint})",), False
    return (() if found.identical else (f"the model in this file does not load as it is ({words})",)), found.identical
