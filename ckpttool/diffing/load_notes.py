"""Notes on loading a state dict into a model, besides the keys that differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ckpttool.core.checkpoint import Checkpoint, Section
from ckpttool.core.expression import refs
from ckpttool.core.names import ON_PLACE, RUNTIME, Names
from ckpttool.core.text import Note, notes_with, plural, shell, some, title_of
from ckpttool.diffing.causes import Code
from ckpttool.diffing.key_notes import adapter_notes
from ckpttool.diffing.loading import loads
from ckpttool.diffing.result import Entry, statuses_of
from ckpttool.formats.registry import format_of
from ckpttool.formats.remarks import one_rank
from ckpttool.kinds.adapters import adapter_in, adapter_of
from ckpttool.naming.convert import read_keys
from ckpttool.operands.checkpoint import saved_state_dicts, split
from ckpttool.operands.model import ModelOperand
from ckpttool.operands.output import outputs
from ckpttool.operands.reading import as_read
from ckpttool.operands.same_model import same_model
from ckpttool.optimizers.key_order import compare_key_order
from ckpttool.optimizers.parameters import Parameters

if TYPE_CHECKING:
    from ckpttool.tracing.loading import Verdict

FROM_PRETRAINED = Note(
    "the keys are in the form of save_pretrained and from_pretrained, which load_state_dict() does"
    " not accept: "
    "`--model hf:FOLDER` compares with what from_pretrained loads",
    "pretrained-keys",
)
# Statuses of keys that name a tensor of the model.
_MATCHED = frozenset({"same", "renamed", "transformed", "value", "dtype", "shape"})


class LoadedSection(NamedTuple):
    """A section, the model that loads it, and what differs.

    Attributes:
        verdict: Torch's own answer; None without the model's code, for which the `entries` decide.
        unreadable: Why the file cannot be read as the model reads it.
        of_shards: Notes on the index of its shards.
    """

    model: ModelOperand
    checkpoint: Checkpoint
    section: Section
    names: Names
    verdict: Verdict | None
    entries: Sequence[Entry]
    ignore_dtype: bool
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
            return "dtype" in statuses_of(self.entries)
        return bool(self.verdict.dtype_changes)

    @property
    def identical(self) -> bool:
        loses = "value" in statuses_of(self.entries)
        return self.fits and not loses and not self.converts


class LoadNotes(NamedTuple):
    """Notes next to the entries. `explain_failure`: they say why the model does not load it."""

    notes: list[str]
    explain_failure: bool


def notes_on_load(loading: LoadedSection, untied: Sequence[tuple[str, str]]) -> LoadNotes:
    """Return the notes on a load.

    `untied` are pairs of tied keys for which the file has different values.
    """
    torch_says, converted = _torch_says(loading), _conversions(loading)
    notes: list[str] = []
    matched = [entry for entry in loading.entries if entry.status in _MATCHED]
    is_matched = any(entry.left for entry in matched)
    if not loading.identical and not is_matched:
        text = (
            f"0 of {len(loading.section.tensors)} tensors matched: loading with strict=False would"
            " load nothing"
        )
        notes.append(Note(text, "nothing-matched"))
    of_rank = one_rank(loading.checkpoint)
    notes += [*loading.unreadable, *loading.of_shards, *of_rank]
    notes += [*_lost_versions(loading), *torch_says, *_of_untied(loading, untied)]
    if loading.verdict is not None and loading.verdict.assigns and not of_rank:
        text = (
            "load_state_dict(..., assign=True) loads it: the file's tensors then replace the"
            " model's"
        )
        notes.append(Note(text, "assign"))
    notes += [*_note_on_form(loading), *converted]
    if not loading.identical:
        notes += _notes_on_names(loading)
    notes += [*_order_notes(loading), *_not_compared(loading)]
    return LoadNotes(notes, bool(loading.unreadable or torch_says or converted))


def _note_on_form(loading: LoadedSection) -> list[Note]:
    """Return a warning if torch loads the model's runtime tensors as what the model saves, with
    other values.
    """
    tables = loading.model.tables
    if not loading.identical or tables.forms_agree:
        return []
    if read_keys(tables, loading.section).form != RUNTIME:
        return []
    text = (
        "the file has the runtime tensors, and load_state_dict() takes them for what state_dict()"
        " returns, with other values: `ckpttool remap --to serialized` converts them first"
    )
    return [Note(text, "other-form")]


def notes_on_reading(
    model: ModelOperand, checkpoint: Checkpoint
) -> tuple[Sequence[str], Sequence[str]]:
    """Return why the file cannot be read as the model reads it, and the notes on its shards' index.

    from_pretrained needs the index.
    """
    of_shards = notes_with(checkpoint.notes, "shard-index", "no-index")
    if model.pretrained and notes_with(of_shards, "no-index"):
        return of_shards, []
    return unreadable_note(checkpoint), of_shards


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


def _lost_versions(loading: LoadedSection) -> list[str]:
    """Return a note if the model loads the section only with module versions, which the file
    lost.
    """
    if loading.verdict is None or loading.verdict.ok:
        return []
    restored = loading.model.with_needed_versions(loading.section)
    if restored is loading.section or not restored.modules:
        return []
    paths = some([*map(title_of, restored.modules)])
    text = (
        "the file lost its module versions (_metadata): torch takes it for an older version of the"
        " modules, and does "
        f"not load it ({paths})"
    )
    return [Note(text, "module-versions")]


def _torch_says(loading: LoadedSection) -> list[Note]:
    """Return what torch says in addition to the lists of keys and the shapes that differ."""
    if loading.verdict is None:
        return []
    shown = set[str]()
    for entry in loading.entries:
        if entry.status == "shape":
            shown.update(f"size mismatch for {key}: " for key in entry.right)
    for key in loading.verdict.unknown:
        shown.add(f'While copying the parameter named "{key}"')
    # an error of copying that many parameters have is noted once
    groups: dict[str, list[str]] = {}
    for text in loading.verdict.errors:
        if not text.startswith(tuple(shown)):
            groups.setdefault(text.rpartition(", an exception occurred : ")[2], []).append(text)
    notes = []
    for first, *others in groups.values():
        text = f"torch: {first}"
        if others:
            names = [error.partition('"')[2].partition('"')[0] for error in others]
            text += f" (the same for {some(names)})"
        notes.append(Note(text, "torch-error"))
    return notes


def _of_untied(loading: LoadedSection, untied: Sequence[tuple[str, str]]) -> list[Note]:
    """Return a note on tied keys that from_pretrained loads untied."""
    if not untied or not loading.fits or not loading.model.pretrained:
        return []
    pairs = some([f"{key} and {twin}" for twin, key in untied])
    text = (
        f"the model ties {pairs}, and the file has different values for them:"
        " from_pretrained loads both, untied"
    )
    return [Note(text, "untied")]


def _conversions(loading: LoadedSection) -> list[Note]:
    """Return a note on tensors that loading converts although the file has the dtype that the model
    saves.
    """
    verdict = loading.verdict
    if verdict is None or loading.ignore_dtype:
        return []
    shown: set[str] = set()
    for entry in loading.entries:
        if entry.status == "dtype" or entry.has(Code.QUANTIZED):
            shown.update(entry.left, entry.right)
    changes = []
    for change in verdict.dtype_changes:
        value = verdict.reads.get(change.fqn)
        keys = () if value is None else refs(value)
        if shown.isdisjoint((change.fqn, change.key, *keys)):
            changes.append(f"{change.fqn} ({change.source} to {change.target})")
    if not changes:
        return []
    count = plural(len(changes), "tensor")
    text = f"loading converts {count} (--ignore-dtype allows it): {some(changes)}"
    return [Note(text, "converts")]


def _notes_on_names(loading: LoadedSection) -> list[str]:
    """Return notes that explain keys which do not fit."""
    section, names = loading.section, loading.names
    keys = [key.key for key in names.serialized]
    adapters = adapter_in(section), adapter_of(keys)
    sides = "the checkpoint", "the model"
    notes: list[str] = [*adapter_notes(adapters, (section.keys, keys), sides)]
    notes += notes_with(names.notes, ON_PLACE)
    if not loading.model.pretrained and _has_pretrained_keys(loading):
        notes.append(FROM_PRETRAINED)
    return notes


def _has_pretrained_keys(loading: LoadedSection) -> bool:
    """Return True if save_pretrained writes every key."""
    model = as_read(loading.model, loading.section, loading.checkpoint.source)
    if not model.pretrained:
        return False
    keys = {key.key for key in model.names().serialized}
    return set(loading.section.by_key()) <= keys


def _order_notes(loading: LoadedSection) -> list[Note]:
    """Return a note if optimizers in the file were saved by a model with another order of
    parameters.
    """
    checkpoint, names = loading.checkpoint, loading.names
    if not checkpoint.optimizers:
        return []
    shapes = Parameters(names).shapes
    if not compare_key_order(saved_state_dicts(checkpoint), names, set(shapes)).moved:
        return []
    paths = ", ".join(section.path for section in checkpoint.optimizers)
    text = (
        "the model that saved this file registers its parameters in another order, which decides"
        f" whose state torch loads: {paths} is not compared without --optimizer"
    )
    return [Note(text, "optimizer-order")]


def _not_compared(loading: LoadedSection) -> Iterator[Note]:
    """Yield a note on each other section that holds the same model."""
    checkpoint, section = loading.checkpoint, loading.section
    for other in same_model(checkpoint, section, loading.names):
        part = checkpoint.part(other.path)
        command = shell("ckpttool", "diff", *loading.model.words, part)
        if checkpoint.in_memory:
            command = f"ckpttool.diff({part}, model=...)"
        text = (
            f"{other.path} holds the same model as {section.title}, and was not compared: {command}"
        )
        yield Note(text, "not-compared")


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
