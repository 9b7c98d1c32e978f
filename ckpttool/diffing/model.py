"""Compare a checkpoint with what a model and its optimizer load."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from ckpttool.core.checkpoint import Checkpoint, Section
from ckpttool.core.errors import CkptError, Problem, Refused
from ckpttool.core.expression import is_opaque, refs
from ckpttool.core.names import ON_PLACE, SERIALIZED, Names, OptimizerParam
from ckpttool.core.optimizer_state import FLAT, FQN, GROUPS, ID, PARAMS, STATE, OptimizerState, Param, numbered
from ckpttool.core.text import Info, Note, code_of, plural, shell, some
from ckpttool.core.values import dataclass
from ckpttool.diffing.causes import Cause, Code
from ckpttool.diffing.checkpoints import adapter_notes
from ckpttool.diffing.names import compare_load, compare_names, loads
from ckpttool.diffing.optimizer import (
    UNKNOWN_CLASS,
    Misassigned,
    SavedOptimizer,
    group_entries,
    optimizer_section,
    refusal,
)
from ckpttool.diffing.result import HARMLESS, Diff, Entry, Remedy, names_outlines, only_right, outlines
from ckpttool.diffing.sections import explain_computed
from ckpttool.formats.rank_files import one_rank
from ckpttool.formats.registry import MEMORY
from ckpttool.formats.torch.legacy_file import UNREADABLE, refused_by_torch
from ckpttool.formats.torch.tensors import is_dense, kind
from ckpttool.naming.convert import other_versions
from ckpttool.naming.convert import read as read_keys
from ckpttool.naming.evidence import Tensor, exchangeable
from ckpttool.naming.match import NameTables
from ckpttool.operands.checkpoint import model_section, saved_state_dicts, split
from ckpttool.operands.model import ModelOperand, as_read, same_model
from ckpttool.operands.output import outputs
from ckpttool.optimizers.forms import class_of, lacking, read
from ckpttool.optimizers.identify import Parameters, ParamMap, own_names, owners, saved_order
from ckpttool.optimizers.transform import arranged, carry, identity

if TYPE_CHECKING:
    from ckpttool.tracing.build_optimizer import OptimizerVerdict
    from ckpttool.tracing.loading import Verdict

FQN_MODIFIERS = Note(
    "torch.distributed.checkpoint's get_model_state_dict raises an AttributeError for keys that hooks rename, unless "
    "the module has a method `_fqn_modifiers` (pytorch#146557)",
    "fqn-modifiers",
)
FROM_PRETRAINED = Note(
    "the keys are in the form of save_pretrained and from_pretrained, which load_state_dict() does not accept: "
    "`--model hf:FOLDER` compares with what from_pretrained loads",
    "pretrained-keys",
)
_PASS_CODE = "pass the model's code: --model package.module:attr, or file.py:attr"


def names_alone(model: ModelOperand) -> Diff:
    """Compare a model's serialized keys with its runtime names."""
    names = model.names()
    entries = compare_names(names)
    lost = any(e.status == "not_serialized" and not e.has(Code.NON_PERSISTENT) for e in entries)
    lossy = [Note(f"does not load what it saves: {problem}", "roundtrip") for problem in names.roundtrip_problems]
    renamed = any(entry.hook is not None and entry.status in ("renamed", "transformed") for entry in entries)
    return Diff(
        f"{names.model} (serialized)",
        f"{names.model} (runtime)",
        identical=not lost and all(entry.status in HARMLESS for entry in entries),
        entries=entries,
        notes=(*lossy, *names.notes, *([FQN_MODIFIERS] if renamed else [])),
        other_failure="does not load what it saves" if lost else "",
        compared=dict.fromkeys(("keys", "shapes", "dtypes"), True) | {"values": False, "aliases": True},
        outlines=names_outlines(names),
    )


def load(model: ModelOperand, checkpoint: Checkpoint, ignore_dtype: bool) -> Diff:
    """Compare a checkpoint with what the model loads; for a model's code the answer is torch's own."""
    section = model_section(checkpoint)
    model = as_read(model, section, checkpoint.source) if model.is_folder else model
    names = model.names()
    verdict = _verdict(model, checkpoint, section) if model.is_definition else None
    entries = explain_computed(compare_load(names, section, verdict))
    if verdict is None and loads(entries):
        _check_names_suffice(model, names, checkpoint, section)
    unreadable = _unreadable(checkpoint)
    fits = not unreadable and (loads(entries) if verdict is None else verdict.ok)
    converts = any(e.status == "dtype" for e in entries) if verdict is None else bool(verdict.dtype_changes)
    loses = any(entry.status == "value" for entry in entries)
    identical = fits and not loses and (ignore_dtype or not converts)
    converted = [] if verdict is None or ignore_dtype else _conversions(verdict, entries)

    # What torch says in addition to the two lists of keys and the shapes that are listed
    shown = {f"size mismatch for {key}:" for entry in entries if entry.status == "shape" for key in entry.right}
    errors = () if verdict is None else verdict.errors
    torch_says = [
        Note(f"torch: {text}", "torch-error") for text in errors if text.partition(": ")[0] + ":" not in shown
    ]
    notes = [*unreadable, *torch_says]
    if verdict is not None and verdict.assigns:
        text = "load_state_dict(..., assign=True) loads it: the file's tensors then replace the model's"
        notes.append(Note(text, "assign"))
    notes += [*converted, *one_rank(checkpoint)]
    if not any(entry.status in ("same", "renamed", "dtype", "shape") and entry.left for entry in entries):
        text = f"0 of {len(section.tensors)} tensors matched: loading with strict=False would load nothing"
        notes.insert(0, Note(text, "nothing-matched"))
    if not identical:
        notes += adapter_notes(section.by_key(), [key.key for key in names.serialized], ("the checkpoint", "the model"))
        notes += [note for note in names.notes if code_of(note) == ON_PLACE]
        if not model.pretrained and _has_pretrained_keys(model, checkpoint, section):
            notes.append(FROM_PRETRAINED)
    notes += _order_notes(names, checkpoint)
    for other in same_model(checkpoint, section, names):
        part = checkpoint.part(other.path)
        command = shell("ckpttool", "diff", *model.words, part)
        if checkpoint.format == MEMORY.name:
            command = f"ckpttool.diff({part}, model=...)"
        text = f"{other.path} holds the same model as {section.title}, and was not compared: {command}"
        notes.append(Note(text, "not-compared"))

    # What stops the load if no entry shows it as a difference
    failure = ""
    if not identical:
        differing = any(entry.status not in HARMLESS for entry in entries)
        one_sided = any(entry.status in HARMLESS and not (entry.left and entry.right) for entry in entries)
        if unreadable or converted or one_sided or not differing or torch_says:
            failure = "loads, and converts" if fits else "does not load"
    return Diff(
        checkpoint.source,
        f"{model.title} (what {'from_pretrained' if model.pretrained else 'it'} loads)",
        identical=identical,
        entries=entries,
        notes=tuple(notes),
        exchangeable=exchangeable(_distinct(names)),
        harmless=HARMLESS | ({"dtype"} if ignore_dtype else set()),
        other_failure=failure,
        compared=_compared(checkpoint, ignore_dtype) | ({"optimizers": False} if checkpoint.optimizers else {}),
        outlines=(outlines(section), names_outlines(names)[0]),
    )


def _verdict(model: ModelOperand, checkpoint: Checkpoint, section: Section) -> Verdict:
    """Return the answer of torch. Raises `CkptError` if torch cannot load it, with a hint for the part of one rank."""
    from ckpttool.tracing.loading import load_verdict

    try:
        return load_verdict(model.definition(), section)
    except CkptError as error:
        error.hint = "; ".join(one_rank(checkpoint)) or error.hint
        raise


def _check_names_suffice(model: ModelOperand, names: Names, checkpoint: Checkpoint, section: Section) -> None:
    """Raise `CkptError` if loading depends on kinds of tensors or module versions, which names do not describe."""
    strange = [Problem(f"a tensor of another kind ({kind(e)})", e.key) for e in section.tensors if not is_dense(e)]
    if strange:
        raise CkptError(
            f"names cannot tell if {model.title} loads it: {plural(len(strange), 'tensor')} of another kind",
            hint="; ".join(one_rank(checkpoint)) or _PASS_CODE,
            problems=strange,
        )
    others = other_versions(names, section, read_keys(NameTables(names), section, SERIALIZED))
    if others:
        raise CkptError(
            f"names cannot tell if {model.title} loads it: {plural(len(others), 'module')} of another version",
            hint=_PASS_CODE,
            problems=others,
        )


def _unreadable(checkpoint: Checkpoint) -> list[str]:
    """Return a note if torch.load fails for the file, with the command that writes one that it loads."""
    if not refused_by_torch(checkpoint):
        return []
    path = split(checkpoint.source)[0]
    command = shell("ckpttool", "remap", path, "-o", next(outputs(path, "zip")))
    return [Note(f"{UNREADABLE}: {command}", "unreadable")]


def _compared(checkpoint: Checkpoint, ignore_dtype: bool) -> dict[str, bool]:
    """Return what loading the model compares: no values, and nothing else in the file."""
    kinds = [section.kind for section in checkpoint.sections]
    compared = {"keys": True, "shapes": True, "dtypes": not ignore_dtype}
    compared |= dict.fromkeys(("values", "aliases", "metadata"), False)
    if len(kinds) - kinds.count("optimizer") > 1:
        compared["other_sections"] = False
    if checkpoint.others:
        compared["objects"] = False
    return compared


def _has_pretrained_keys(model: ModelOperand, checkpoint: Checkpoint, section: Section) -> bool:
    """Return True if save_pretrained writes every key."""
    other = as_read(model, section, checkpoint.source)
    return other.pretrained and set(section.by_key()) <= {key.key for key in other.names().serialized}


def _conversions(verdict: Verdict, entries: Iterable[Entry]) -> list[str]:
    """Return a note on tensors that loading converts although the file has the dtype that the model saves."""
    shown = {key for entry in entries if entry.status == "dtype" for key in (*entry.left, *entry.right)}
    sources = {fqn: set(refs(value)) for fqn, value in verdict.reads.items() if value is not None}
    changes = [one for one in verdict.dtype_changes if shown.isdisjoint((one.fqn, one.key, *sources.get(one.fqn, ())))]
    if not changes:
        return []
    what = some([f"{one.fqn} ({one.source} to {one.target})" for one in changes])
    text = f"loading converts {plural(len(changes), 'tensor')} (--ignore-dtype allows it): {what}"
    return [Note(text, "converts")]


def _distinct(names: Names) -> Iterator[Tensor]:
    """Yield the tensors that the model loads, those with several keys once."""
    seen = set[object]()
    for key in names.serialized:
        if key.shape is not None and key.source not in seen:
            yield Tensor(key.key, key.dtype, key.shape)
        if key.source is not None and not is_opaque(key.source):
            seen.add(key.source)


def _order_notes(names: Names, checkpoint: Checkpoint) -> list[str]:
    """Return a note if optimizers in the file were saved by a model with another order of parameters."""
    paths = [section.path for section in checkpoint.optimizers]
    order = saved_order(saved_state_dicts(checkpoint), names, set(Parameters(names).shapes)) if paths else None
    if not order:
        return []
    text = (
        "the model that saved this file registers its parameters in another order, which decides whose state torch "
        f"loads: {', '.join(paths)} is not compared without --optimizer"
    )
    return [Note(text, "optimizer-order")]


# A saved optimizer and the optimizer that loads it


@dataclass(frozen=True, slots=True)
class OptimizerFit:
    """`fits`: torch loads the state, and every parameter gets its own; `remedy` may fix it if not."""

    entries: tuple[Entry, ...]
    notes: tuple[str, ...]
    fits: bool
    remedy: Remedy | None = None


def optimizer(model: ModelOperand, checkpoint: Checkpoint, ignore_dtype: bool) -> Diff:
    """Compare a saved optimizer, and the model in the same file, with the optimizer and model that load them."""
    names, section = model.names(), optimizer_section(checkpoint)
    if section is None:
        raise _no_single_optimizer(model, checkpoint)
    if not names.optimizer:
        names = in_model_order(names, section)
    verdict = None
    if model.optimizer is not None:
        from ckpttool.tracing.build_optimizer import load_optimizer, optimizer_verdict

        verdict = optimizer_verdict(model.definition(), load_optimizer(model.optimizer), section)
    fit = compare_with_optimizer(SavedOptimizer.of(checkpoint, section), names, verdict)
    notes = [*fit.notes]
    if checkpoint.state_dicts:
        model_loads = False
        command = shell("ckpttool", "diff", *model.words, checkpoint.source)
        try:
            model_loads = load(replace(model, optimizer=None), checkpoint, ignore_dtype).identical
            if not model_loads:
                notes.append(Note(f"the model in this file does not load as it is ({command})", "other-sections"))
        except CkptError as error:
            text = f"the model in this file was not compared: {error.message} ({error.hint})"
            notes.append(Note(text, "not-compared"))
    else:
        unreadable = _unreadable(checkpoint)
        notes += unreadable
        model_loads = not unreadable
    state = read(section)
    without = [str(param) for param in state.params if not state.state.get(param)]
    if 0 < len(without) < len(state.params):
        text = f"{plural(len(without), 'parameter')} without state in the checkpoint: {some(without)}"
        notes.append(Note(text, "no-optimizer-state"))
    title = model.optimizer if isinstance(model.optimizer, str) else names.optimizer_class or "model.parameters()"
    identical = fit.fits and model_loads
    return Diff(
        checkpoint.source,
        f"{title} (of {names.model})",
        identical=identical,
        entries=fit.entries,
        notes=tuple(notes),
        other_failure="" if identical else "does not load",
        remedy=fit.remedy,
        compared=_compared(checkpoint, ignore_dtype) | {"optimizers": True},
    )


def _no_single_optimizer(model: ModelOperand, checkpoint: Checkpoint) -> CkptError:
    paths = [section.path for section in checkpoint.optimizers]
    if paths:
        several = ", ".join(path or "(root)" for path in paths)
        hint = f"pick one: {checkpoint.part(paths[0])}"
        return CkptError(f"{checkpoint.source} has several optimizers: {several}", hint=hint)
    command = shell("ckpttool", "diff", *model.words, checkpoint.source)
    if checkpoint.format == MEMORY.name:
        command = "ckpttool.diff(ckpt, model=...)"
    return CkptError(
        f"{checkpoint.source} has no optimizer: an optimizer that resumes from it starts from scratch",
        hint=f"compare the model only: {command}",
    )


def in_model_order(names: Names, section: Section) -> Names:
    """Return `names` with an optimizer of as many of the model's parameters as the file has, in their order.

    Raises `CkptError` unless that is one group, of all parameters or of all trainable ones.
    """
    state, parameters = read(section), Parameters(names)
    chosen = [own for own in (tuple(parameters.shapes), parameters.trainable) if len(own) == len(state.params)]
    if len(state.groups) != 1 or not chosen:
        counts = f"{plural(len(state.params), 'parameter')} in {plural(len(state.groups), 'param group')}"
        raise CkptError(
            f"{counts}: unclear which optimizer of {names.model} loads them",
            hint="pass --optimizer file.py:make, the function that makes the optimizer of the model",
        )
    fqn_of = {t.canonical: t.fqn for t in reversed(names.runtime)}
    params = tuple(OptimizerParam(place, fqn_of[name], 0) for place, name in enumerate(chosen[0]))
    return replace(names, optimizer=params, optimizer_groups=(state.groups[0].hyperparameters,))


def compare_with_optimizer(
    saved: SavedOptimizer, names: Names, verdict: OptimizerVerdict | None = None
) -> OptimizerFit:
    """Compare a saved optimizer (left) with the optimizer in `names` that loads it (right).

    `verdict` is what torch does with the state, if that could be tried; without it position decides, as in
    ``Optimizer.load_state_dict`` (``set_optimizer_state_dict`` uses the names in the keys). Values are not compared: a
    new optimizer has none, and takes its hyperparameters from the file.
    """
    state, target = read(saved.section), Parameters(names)
    known, notes = _owners(state, names, saved)
    if known is None:  # compare by the names in the file, else by ids
        own, fresh = own_names(state, saved.models), target.fresh_optimizer
        entries = group_entries(state, numbered(fresh)) if own is None else group_entries(own.state, fresh)
        if own is not None:
            notes.append(Info(f"left: its parameters are named by {own.evidence}", "optimizer-names"))
        return _with_old_model(OptimizerFit(tuple(entries), tuple(notes), False), state, target, saved)
    mine = known.state
    if state.form == FLAT and _has_same_parameters(mine, target):
        try:  # it has no groups: torch reads it into the groups of the optimizer
            groups = arranged(mine, identity(mine.params), target.groups, target.names.optimizer_groups)
            mine = replace(mine, groups=groups)
        except Refused:
            pass  # torch rejects it too
    stepped = verdict is not None and verdict.stepped and verdict.error is None
    needs: list[str] = []
    if not stepped:
        needs = lacking(mine, target.names.optimizer_groups, target.first_step)
    entries = [
        *group_entries(mine, target.fresh_optimizer, _misassigned(known, target, verdict)),
        *(only_right(key, Cause(Code.NOT_STEPPABLE)) for key in needs if not _is_hyperparameter(key)),
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
    differing = bool(needs) or not all(map(_is_hyperparameter, keys))
    failed = verdict is not None and verdict.error is not None
    if verdict is not None and failed:
        notes.append(Note(f"torch: {verdict.error}", "torch-error"))
    if needs:
        classes = [class_of(one) or UNKNOWN_CLASS for one in (mine, target.fresh_optimizer)]
        text = (
            f"the state is from {classes[0]}, the optimizer is {classes[1]}: torch loads it and fails at the next "
            "step. No remap converts it; the optimizer must start from scratch"
        )
        notes.append(Note(text, "optimizer-class"))
    if not (differing or failed or known.doubt):
        if known.saved.form == FQN and mine.params != target.fresh_optimizer.params:
            text = (
                "left: set_optimizer_state_dict loads it by name; Optimizer.load_state_dict loads by position, and "
                "would give state to other parameters (remap --optimizer-keys id puts it in order)"
            )
            notes.append(Note(text, "optimizer-order"))
        elif known.evidence not in ("param_names", "names"):
            notes.append(Info(known.rests_on("left"), "optimizer-names"))
        return OptimizerFit(tuple(entries), tuple(notes), True)
    is_foreign = bool(needs) or (failed and not differing and state.form == ID)
    remedy = Remedy("drop_state") if is_foreign else _remedy(known, mine, target, notes)
    fit = OptimizerFit(tuple(entries), tuple(notes), False, remedy)
    return _with_old_model(fit, state, target, saved) if remedy.way == "old_model" else fit


def _with_old_model(
    fit: OptimizerFit, state: OptimizerState, target: Parameters, saved: SavedOptimizer
) -> OptimizerFit:
    """Return the fit with the remedy that names the model that saved the file."""
    sizes = [len(group.params) for group in state.groups]
    same_groups: bool | None = sizes == [len(group) for group in target.groups]
    if not same_groups and (state.form != ID or len(sizes) == 1 or all(group.param_names for group in state.groups)):
        same_groups = None
    matches = [read_keys(NameTables(target.names), section).match for section in saved.models]
    foreign = tuple(dict.fromkeys(key for match in matches for key in match.unmatched))
    if foreign and all(match.missing for match in matches):
        text = (
            f"{foreign[0]} is not in {target.names.model}, and {matches[0].missing[0]} is not in the file: if they are "
            "one tensor, rename it first, for model and optimizer: remap --rule 'FROM => TO' --optimizer-keys fqn"
        )
        return replace(fit, remedy=None, notes=(*fit.notes, Note(text, "optimizer-names")))
    return replace(fit, remedy=Remedy("old_model", None, same_groups, foreign))


def _owners(state: OptimizerState, names: Names, saved: SavedOptimizer) -> tuple[ParamMap | None, list[str]]:
    """Return the parameters that the state belongs to, None if they are unknown, and notes.

    State with other groups than the optimizer's was saved by another optimizer: its ids are in the model's order.
    """
    notes = list[str]()
    try:
        param_map = owners(state, names, "left", saved.models)
    except Refused as error:
        notes.append(refusal(error))
        if state.form != ID:
            return None, notes
        try:
            without_optimizer = replace(names, optimizer=(), optimizer_class=None, optimizer_groups=())
            param_map = owners(state, without_optimizer, "left", saved.models)
        except Refused:
            return None, notes
        notes = list[str]()
    if param_map.doubt is not None:
        notes.append(Note(f"left: {param_map.doubt.message}: {param_map.doubt.problems[0]}", "doubtful-ids"))
    return param_map, notes


def _has_same_parameters(state: OptimizerState, target: Parameters) -> bool:
    return {str(param) for param in state.params} == {name for group in target.groups for name in group}


def _misassigned(known: ParamMap, target: Parameters, verdict: OptimizerVerdict | None) -> Misassigned | None:
    """Return the parameters that would not get their own state, and why."""
    state = known.saved
    if known.doubt is not None:
        names = {str(param): name for param, name in known.names.items()}
        details = {names.get(problem.key, problem.key): problem.problem for problem in known.doubt.problems}
        return Misassigned(Cause(Code.DOUBT, (known.doubt.message,)), details)
    if state.form != ID or [len(group.params) for group in state.groups] != [len(group) for group in target.groups]:
        return None
    landed: Mapping[Param, Param] = dict(zip(target.fresh_optimizer.params, state.params))
    if verdict is not None and verdict.error is None:
        landed = {**landed, **{target.canonical[fqn]: param for fqn, param in verdict.landed.items()}}
    saved_group = {known.names[param]: index for index, group in enumerate(state.groups) for param in group.params}
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


def _is_hyperparameter(key: str) -> bool:
    return key.startswith(f"{GROUPS}.") and key.count(".") >= 2 and f".{PARAMS}." not in key


def _remedy(known: ParamMap, mine: OptimizerState, target: Parameters, notes: list[str]) -> Remedy:
    if known.doubt is not None:
        return Remedy("old_model")
    try:
        groups = arranged(mine, identity(mine.params), target.groups, target.names.optimizer_groups)
        have = set(mine.params)
        carry(mine, identity([p for group in groups for p in group.params if p in have]), target.shapes, "left")
    except Refused as error:
        text = f"no remap arranges it in the new order and param groups: {error.message}: {error.problems[0]}"
        notes.append(Note(text, "no-fix"))
        return Remedy("drop_state")
    by_name = known.evidence in ("param_names", "names") and _has_same_parameters(mine, target)
    return Remedy("by_name", known.saved.form) if by_name else Remedy("regroup")
