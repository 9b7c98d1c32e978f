"""A model against itself, or a checkpoint against what a model and its optimizer load."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ckpttool.checkpoint import Checkpoint, Section
from ckpttool.errors import CkptError, Problem
from ckpttool.expression import is_opaque, refs
from ckpttool.formats.ranks.files import one_rank
from ckpttool.formats.torch.legacy_file import UNREADABLE, refused_by_torch
from ckpttool.formats.torch.tensors import is_dense, kind
from ckpttool.names import AS_A_PART, SERIALIZED, Names
from ckpttool.naming.forms import read
from ckpttool.naming.inference.alike import exchangeable
from ckpttool.naming.inference.values import Tensor
from ckpttool.naming.name_tables import NameTables
from ckpttool.naming.optimizers.forms import read as read_optimizer
from ckpttool.naming.optimizers.parameters import Parameters
from ckpttool.naming.optimizers.saved_order import saved_order
from ckpttool.naming.versions import other_versions
from ckpttool.operands.checkpoint import model_section, saved_state_dicts, split
from ckpttool.operands.model import ModelOperand, as_read
from ckpttool.operands.printed import outputs
from ckpttool.operands.sections import same_model
from ckpttool.queries.diff import computed
from ckpttool.queries.diff.adapters import adapter_notes
from ckpttool.queries.diff.names import NON_PERSISTENT, compare_load, compare_names, loads
from ckpttool.queries.diff.optimizer import SavedOptimizer, optimizer_section
from ckpttool.queries.diff.optimizer_load import compare_with_optimizer, in_model_order
from ckpttool.queries.diff.result import HARMLESS, Diff, Entry, names_outlines, outlines
from ckpttool.words import plural, shell, some

if TYPE_CHECKING:
    from ckpttool.tracing.loading import Verdict
    from ckpttool.tracing.optimizer_loading import OptimizerVerdict


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
    entries = computed.explained(compare_load(names, section, verdict))
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
    return [
        f"{other.path} holds the same model as {section.title}, and was not compared: "
        + shell("ckpttool", "diff", *model.words, f"{checkpoint.source}::{other.path}")
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
    others = other_versions(names, section, read(NameTables(names), section, SERIALIZED))
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
    state = read_optimizer(section)
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
        hint = f"pick one: {checkpoint.source}::{paths[0]}"
        return CkptError(f"{checkpoint.source} holds several optimizers: {several}", hint=hint)
    words = shell("ckpttool", "diff", *model.words, checkpoint.source)
    return CkptError(
        f"{checkpoint.source} holds no optimizer: one that resumes from it starts afresh", hint=f"its model: {words}"
    )


def _tried(model: ModelOperand, section: Section) -> OptimizerVerdict | None:
    """What torch does with the state; None if it cannot be tried."""
    if model.optimizer is None:
        return None
    from ckpttool.tracing.load_optimizer import load_optimizer
    from ckpttool.tracing.optimizer_loading import optimizer_verdict

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
