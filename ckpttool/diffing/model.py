"""Compare a checkpoint with what a model loads, and the names that a model saves with its runtime
names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ckpttool.containers.tensors import is_dense, kind
from ckpttool.core.checkpoint import Checkpoint, Section
from ckpttool.core.errors import CkptError, Problem
from ckpttool.core.expression import is_opaque, refs
from ckpttool.core.names import ON_PLACE, SERIALIZED, SPECIAL, Names
from ckpttool.core.text import Info, Note, code_of, plural, shell, some
from ckpttool.diffing.adapter import adapter_alone
from ckpttool.diffing.adapter import load as load_adapter
from ckpttool.diffing.causes import Code
from ckpttool.diffing.loading import compare_load, loads
from ckpttool.diffing.names import compare_names
from ckpttool.diffing.result import HARMLESS, Diff, Entry, kinds_by_side, names_outlines, outlines
from ckpttool.diffing.sections import (
    adapter_notes,
    compare,
    explain_computed,
    explain_quantized,
    with_copies_of_ranks,
    without_dtypes,
)
from ckpttool.formats.registry import format_of
from ckpttool.formats.remarks import one_rank
from ckpttool.kinds.adapters import adapter_in, adapter_of
from ckpttool.kinds.lists import parameters_of
from ckpttool.naming.convert import other_versions
from ckpttool.naming.convert import read as read_keys
from ckpttool.naming.evidence import Tensor, exchangeable
from ckpttool.naming.match import NameTables
from ckpttool.operands.checkpoint import model_section, saved_state_dicts, split
from ckpttool.operands.model import ModelOperand, as_read, same_model, untied_keys
from ckpttool.operands.output import outputs
from ckpttool.optimizers.identify import Parameters, saved_order

if TYPE_CHECKING:
    from ckpttool.tracing.loading import Verdict

FQN_MODIFIERS = Note(
    "torch.distributed.checkpoint's get_model_state_dict raises an AttributeError for keys that"
    " hooks rename, unless "
    "the module has a method `_fqn_modifiers` (pytorch#146557)",
    "fqn-modifiers",
)
FROM_PRETRAINED = Note(
    "the keys are in the form of save_pretrained and from_pretrained, which load_state_dict() does"
    " not accept: "
    "`--model hf:FOLDER` compares with what from_pretrained loads",
    "pretrained-keys",
)
_PASS_CODE = "pass the model's code: --model package.module:attr, or file.py:attr"


def names_alone(model: ModelOperand) -> Diff:
    """Compare a model's serialized keys with its runtime names."""
    names = model.names()
    entries = compare_names(names)
    lost = any(e.status == "not_serialized" and not e.has(Code.NON_PERSISTENT) for e in entries)
    lossy = [
        Note(f"does not load what it saves: {problem}", "roundtrip")
        for problem in names.roundtrip_problems
    ]
    renamed = any(
        entry.hook is not None and entry.status in ("renamed", "transformed") for entry in entries
    )
    return Diff(
        f"{names.model} (serialized)",
        f"{names.model} (runtime)",
        identical=not lost and all(entry.status in HARMLESS for entry in entries),
        entries=entries,
        notes=(*lossy, *names.notes, *([FQN_MODIFIERS] if renamed else [])),
        other_failure="does not load what it saves" if lost else "",
        asks="names",
        names=(names.model, names.model),
        compared=dict.fromkeys(("keys", "shapes", "dtypes"), True)
        | {"values": False, "aliases": True},
        outlines=names_outlines(names),
    )


def load(model: ModelOperand, checkpoint: Checkpoint, ignore_dtype: bool) -> Diff:
    """Compare a checkpoint with what the model loads; for a model's code the answer is torch's
    own.
    """
    section = model_section(checkpoint, model.tables)
    adapter = adapter_alone(checkpoint, section)
    about_adapter = None if adapter is None else load_adapter(model, checkpoint, section, adapter)
    if about_adapter is not None:
        return about_adapter
    if section.is_list:
        return load_list(model, checkpoint, section, ignore_dtype)
    return _load_section(model, checkpoint, section, ignore_dtype)


class _LoadedSection(NamedTuple):
    """A section, the model that loads it, and what differs. `verdict` is torch's own answer; None
    without the model's code, for which the `entries` decide.
    """

    model: ModelOperand
    checkpoint: Checkpoint
    section: Section
    names: Names
    verdict: Verdict | None
    entries: Sequence[Entry]
    ignore_dtype: bool
    # why the file cannot be read as the model reads it, and notes on the index of its shards
    unreadable: Sequence[str]
    of_shards: Sequence[str]

    @property
    def fits(self) -> bool:
        """Whether the model gets a value for each key, perhaps a converted one."""
        if self.unreadable:
            return False
        return loads(self.entries) if self.verdict is None else self.verdict.ok

    @property
    def converts(self) -> bool:
        """Whether loading changes a dtype, which counts."""
        if self.ignore_dtype:
            return False
        if self.verdict is None:
            return any(entry.status == "dtype" for entry in self.entries)
        return bool(self.verdict.dtype_changes)

    @property
    def identical(self) -> bool:
        loses = any(entry.status == "value" for entry in self.entries)
        return self.fits and not loses and not self.converts


def _load_section(
    model: ModelOperand, checkpoint: Checkpoint, section: Section, ignore_dtype: bool
) -> Diff:
    untied: Sequence[tuple[str, str]] = ()
    if model.is_folder:
        untied = untied_keys(model.tables, section)
        model = as_read(model, section, checkpoint.source)
    verdict = _verdict(model, checkpoint, section) if model.is_definition else None
    if model.is_folder and verdict is not None and not verdict.ok:
        model, verdict = _by_from_pretrained(model, checkpoint, section, verdict)
    names = model.names()
    entries = explain_computed(compare_load(names, section, verdict, model.pretrained))
    entries = with_copies_of_ranks(explain_quantized(entries, section), section)
    entries = without_dtypes(entries) if ignore_dtype else entries
    if verdict is None and loads(entries):
        _check_names_suffice(model, names, checkpoint, section)
    unreadable, of_shards = _notes_on_reading(model, checkpoint)
    about = (model, checkpoint, section, names)
    loading = _LoadedSection(*about, verdict, entries, ignore_dtype, unreadable, of_shards)
    torch_says = [] if verdict is None else _torch_says(verdict, entries)
    converted = [] if verdict is None or ignore_dtype else _conversions(verdict, entries)
    notes = [
        *_notes_on_loading(loading, untied, torch_says),
        *converted,
        *([] if loading.identical else _notes_on_names(model, checkpoint, section, names)),
        *_order_notes(names, checkpoint),
        *_not_compared(model, checkpoint, section, names),
    ]
    failure = ""
    says_more = bool(unreadable or converted or torch_says)
    if not loading.identical and (says_more or not _show_failure(entries)):
        failure = f"does not load into {model.called}"
        if loading.fits:
            failure = f"loads into {model.called}, which converts its dtypes"
    compared = compared_by_loading(checkpoint, ignore_dtype)
    if checkpoint.optimizers:
        compared["optimizers"] = False
    return Diff(
        checkpoint.source,
        f"{model.title} (what {'from_pretrained' if model.pretrained else 'it'} loads)",
        identical=loading.identical,
        entries=entries,
        notes=tuple(notes),
        exchangeable=exchangeable(_distinct(names)),
        harmless=HARMLESS | {Code.LOAD_HOOK.code} | ({"dtype"} if ignore_dtype else set()),
        other_failure=failure,
        compared=compared,
        outlines=(outlines(section), names_outlines(names)[0]),
        kinds=kinds_by_side(left=checkpoint.kinds_of(section)),
        section=section.path,
        asks="load",
        names=(checkpoint.source, model.called),
    )


def _notes_on_reading(
    model: ModelOperand, checkpoint: Checkpoint
) -> tuple[Sequence[str], Sequence[str]]:
    """Return why the file cannot be read as the model reads it, and the notes on its shards' index.

    from_pretrained needs the index.
    """
    of_shards = [note for note in checkpoint.notes if code_of(note) in ("shard-index", "no-index")]
    if model.pretrained and any(code_of(note) == "no-index" for note in of_shards):
        return of_shards, []
    return unreadable_note(checkpoint), of_shards


def _notes_on_loading(
    loading: _LoadedSection, untied: Sequence[tuple[str, str]], torch_says: Sequence[str]
) -> list[str]:
    """Return what the entries do not say about the load: why it fails, and how it goes."""
    verdict, section = loading.verdict, loading.section
    of_rank = one_rank(loading.checkpoint)
    notes = [*loading.unreadable, *loading.of_shards, *of_rank]
    if verdict is not None and not verdict.ok:
        notes += _lost_versions(loading.model, section)
    notes += torch_says
    if loading.fits and untied and loading.model.pretrained:
        pairs = some([f"{key} and {twin}" for twin, key in untied])
        text = (
            f"the model ties {pairs}, and the file has different values for them:"
            " from_pretrained loads both, untied"
        )
        notes.append(Note(text, "untied"))
    if verdict is not None and verdict.assigns and not of_rank:
        text = (
            "load_state_dict(..., assign=True) loads it: the file's tensors then replace the"
            " model's"
        )
        notes.append(Note(text, "assign"))
    matched = ("same", "renamed", "transformed", "value", "dtype", "shape")
    is_matched = any(entry.status in matched and entry.left for entry in loading.entries)
    if not loading.identical and not is_matched:
        text = (
            f"0 of {len(section.tensors)} tensors matched: loading with strict=False would load"
            " nothing"
        )
        notes.insert(0, Note(text, "nothing-matched"))
    return notes


def _torch_says(verdict: Verdict, entries: Sequence[Entry]) -> list[Note]:
    """Return what torch says in addition to the lists of keys and the shapes that differ."""
    shown = set[str]()
    for entry in entries:
        if entry.status == "shape":
            shown.update(f"size mismatch for {key}:" for key in entry.right)
    others = [text for text in verdict.errors if text.partition(": ")[0] + ":" not in shown]
    return [Note(f"torch: {text}", "torch-error") for text in _grouped(others)]


def _notes_on_names(
    model: ModelOperand, checkpoint: Checkpoint, section: Section, names: Names
) -> list[str]:
    """Return notes that explain keys which do not fit."""
    keys = [key.key for key in names.serialized]
    adapters = adapter_in(section), adapter_of(keys)
    sides = "the checkpoint", "the model"
    notes = [*adapter_notes(adapters, (section.keys, keys), sides)]
    notes += [note for note in names.notes if code_of(note) == ON_PLACE]
    if not model.pretrained and _has_pretrained_keys(model, checkpoint, section):
        notes.append(FROM_PRETRAINED)
    return notes


def _not_compared(
    model: ModelOperand, checkpoint: Checkpoint, section: Section, names: Names
) -> Iterator[Note]:
    """Yield a note on each other section that holds the same model."""
    for other in same_model(checkpoint, section, names):
        part = checkpoint.part(other.path)
        command = shell("ckpttool", "diff", *model.words, part)
        if checkpoint.in_memory:
            command = f"ckpttool.diff({part}, model=...)"
        text = (
            f"{other.path} holds the same model as {section.title}, and was not compared: {command}"
        )
        yield Note(text, "not-compared")


def _show_failure(entries: Sequence[Entry]) -> bool:
    """Return whether the entries show why the load fails: some differ, and every harmless one is on
    both sides.
    """
    differs = False
    for entry in entries:
        if entry.status not in HARMLESS:
            differs = True
        elif not (entry.left and entry.right):
            return False
    return differs


def load_list(
    model: ModelOperand, checkpoint: Checkpoint, section: Section, ignore_dtype: bool
) -> Diff:
    """Compare a list of tensors with the model's parameters, in order."""
    names = model.names()
    params = Section("", "state_dict", tuple(parameters_of(names)))
    entries = compare(section, params)
    entries = without_dtypes(entries) if ignore_dtype else entries
    notes = list[str]()
    if len(section.tensors) != len(params.tensors):
        counts = (len(section.tensors), len(params.tensors))
        text = "{} tensors in the list, and {} parameters in the model".format(*counts)
        notes.append(Note(text, "list"))
    buffers = [t.fqn for t in names.runtime if t.kind == "buffer" and t.persistent]
    if buffers:
        text = f"not in the list: {plural(len(buffers), 'buffer')} of the model ({some(buffers)})"
        notes.append(Info(text, "list"))
    parameters = f"the parameters of {model.called}"
    return Diff(
        checkpoint.source,
        f"{parameters}, in order",
        identical=all(entry.status == "same" for entry in entries),
        entries=entries,
        notes=tuple(notes),
        compared=compared_by_loading(checkpoint, ignore_dtype) | {"keys": False},
        outlines=(outlines(section), outlines(params)),
        kinds=kinds_by_side(left=checkpoint.kinds_of(section)),
        section=section.path,
        names=(checkpoint.source, parameters),
    )


def _lost_versions(model: ModelOperand, section: Section) -> list[str]:
    """Return a note if the model loads the section only with module versions, which the file
    lost.
    """
    restored = model.with_needed_versions(section)
    if restored is section or not restored.modules:
        return []
    paths = some([path or "(root)" for path in restored.modules])
    text = (
        "the file lost its module versions (_metadata): torch takes it for an older version of the"
        " modules, and does "
        f"not load it ({paths})"
    )
    return [Note(text, "module-versions")]


def _grouped(errors: Iterable[str]) -> Iterator[str]:
    """Yield each error of copying a parameter once, with the names of all parameters that have
    it.
    """
    groups: dict[str, list[str]] = {}
    for text in errors:
        groups.setdefault(text.rpartition(", an exception occurred : ")[2], []).append(text)
    for first, *others in groups.values():
        names = [text.partition('"')[2].partition('"')[0] for text in others]
        yield f"{first} (the same for {some(names)})" if others else first


def _verdict(model: ModelOperand, checkpoint: Checkpoint, section: Section) -> Verdict:
    """Return the answer of torch. Raises `CkptError` if torch cannot load it, with a hint for the
    part of one rank.
    """
    try:
        return model.verdict(section)
    except CkptError as error:
        error.hint = "; ".join(one_rank(checkpoint)) or error.hint
        raise


def _by_from_pretrained(
    model: ModelOperand, checkpoint: Checkpoint, section: Section, verdict: Verdict
) -> tuple[ModelOperand, Verdict]:
    """Return the model of a folder as from_pretrained loads it, if that loads the section, which
    load_state_dict refuses: it accepts keys that it does not write.
    """
    from ckpttool.tracing.pretrained import is_pretrained

    if model.pretrained or not is_pretrained(model.definition()):
        return model, verdict
    answer = _verdict(model.by_pretrained, checkpoint, section)
    return (model.by_pretrained, answer) if answer.ok else (model, verdict)


def _check_names_suffice(
    model: ModelOperand, names: Names, checkpoint: Checkpoint, section: Section
) -> None:
    """Raise `CkptError` if loading depends on kinds of tensors or module versions, which names do
    not describe.
    """
    strange = [
        Problem(f"a tensor of another kind ({kind(e)})", e.key)
        for e in section.tensors
        if not is_dense(e)
    ]
    if strange:
        raise CkptError(
            f"names cannot tell if {model.title} loads it: {plural(len(strange), 'tensor')} of"
            " another kind",
            hint="; ".join(one_rank(checkpoint)) or _PASS_CODE,
            problems=strange,
        )
    special = [note for note in names.notes if code_of(note) == SPECIAL]
    if special:
        raise CkptError(
            f"names cannot tell if {model.title} loads it: its tensors are {special[0]}",
            hint=_PASS_CODE,
        )
    others = other_versions(names, section, read_keys(NameTables(names), section, SERIALIZED))
    if others:
        raise CkptError(
            f"names cannot tell if {model.title} loads it: {plural(len(others), 'module')} of"
            " another version",
            hint=_PASS_CODE,
            problems=others,
        )


def unreadable_note(checkpoint: Checkpoint) -> list[str]:
    """Return a note if the library that reads such files fails for this one, with the command that
    writes one that it loads.
    """
    refusal = format_of(checkpoint).refusal(checkpoint)
    if not refusal:
        return []
    path = split(checkpoint.source)[0]
    command = shell("ckpttool", "remap", path, "-o", next(outputs(path, "zip")))
    return [Note(f"{refusal}: {command}", "unreadable")]


def compared_by_loading(checkpoint: Checkpoint, ignore_dtype: bool) -> dict[str, bool]:
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
    return other.pretrained and set(section.by_key()) <= {
        key.key for key in other.names().serialized
    }


def _conversions(verdict: Verdict, entries: Iterable[Entry]) -> list[str]:
    """Return a note on tensors that loading converts although the file has the dtype that the model
    saves.
    """
    listed = [entry for entry in entries if entry.status == "dtype" or entry.has(Code.QUANTIZED)]
    shown = {key for entry in listed for key in (*entry.left, *entry.right)}
    sources = {fqn: set(refs(value)) for fqn, value in verdict.reads.items() if value is not None}
    changes = []
    for change in verdict.dtype_changes:
        if shown.isdisjoint((change.fqn, change.key, *sources.get(change.fqn, ()))):
            changes.append(f"{change.fqn} ({change.source} to {change.target})")
    if not changes:
        return []
    count = plural(len(changes), "tensor")
    text = f"loading converts {count} (--ignore-dtype allows it): {some(changes)}"
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
    """Return a note if optimizers in the file were saved by a model with another order of
    parameters.
    """
    paths = [section.path for section in checkpoint.optimizers]
    order = (
        saved_order(saved_state_dicts(checkpoint), names, set(Parameters(names).shapes))
        if paths
        else None
    )
    if not order:
        return []
    text = (
        "the model that saved this file registers its parameters in another order, which decides"
        " whose state torch "
        f"loads: {', '.join(paths)} is not compared without --optimizer"
    )
    return [Note(text, "optimizer-order")]
