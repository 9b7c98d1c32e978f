"""Compare two checkpoints, with everything in them besides the model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from ckpttool.core.checkpoint import Checkpoint, ExtraEntry, Section, TensorEntry, Unreached
from ckpttool.core.dtypes import PLAIN
from ckpttool.core.errors import CkptError
from ckpttool.core.expression import Op, Ref, Special
from ckpttool.core.names import Names
from ckpttool.core.optimizer_state import GROUPS
from ckpttool.core.text import plural, shell, some
from ckpttool.core.values import dataclass
from ckpttool.diffing import sections
from ckpttool.diffing.names import compare_through, suggestions
from ckpttool.diffing.optimizer import SavedOptimizer, compare_optimizers, is_named, optimizer_alone
from ckpttool.diffing.result import (
    EITHER_WAY,
    NOT_UNDERSTOOD,
    ONLY_LEFT,
    ONLY_RIGHT,
    Diff,
    Entry,
    Remedy,
    hidden_segments,
    only_left,
    only_right,
    outlines,
)
from ckpttool.diffing.sections import Values, compare, compare_pair, explain_moved
from ckpttool.distributed.job import Question, answers, current, only_first
from ckpttool.evaluate.apply import entry_of
from ckpttool.evaluate.compare import Difference, content_of_storage, same_objects
from ckpttool.formats.ranks.files import one_rank
from ckpttool.naming.adapters import Adapter, adapter_of, missing_modules
from ckpttool.naming.convert import otherwise
from ckpttool.operands.checkpoint import model_section
from ckpttool.operands.model import ModelOperand, as_read
from ckpttool.optimizers.forms import form_of


def compare_outside(left: Checkpoint, right: Checkpoint, values: Values | None) -> tuple[Entry, ...]:
    """Entries outside of state dicts under one key on both sides, and all storages that are not understood."""
    entries = compare_loose(left, right, values)
    if left.format != right.format and "torchscript" in (left.format, right.format):
        return tuple(entries)  # the constants of its code: what is no TorchScript archive has no place for them
    return (*entries, *_storages(left.unreached, right.unreached))


def compare_loose(left: Checkpoint, right: Checkpoint, values: Values | None) -> list[Entry]:
    """Entries outside of state dicts under one key on both sides."""
    mine, theirs = loose(left), loose(right)
    return [compare_pair(mine[key], theirs[key], values) for key in mine if key in theirs]


def loose(checkpoint: Checkpoint) -> dict[str, TensorEntry | ExtraEntry]:
    """What stands outside of state dicts and optimizers, by the dotted way to it."""
    return {entry.key: entry for section in checkpoint.sections if section.kind == "other" for entry in section.entries}


def _storages(left: Iterable[Unreached], right: Iterable[Unreached]) -> list[Entry]:
    """Nothing but their bytes tells such storages apart, so these are compared always."""
    theirs: dict[bytes | None, list[Unreached]] = {}
    for storage in right:
        theirs.setdefault(_content(storage), []).append(storage)
    entries, alone = [], []
    for storage in left:
        content = _content(storage)
        same = theirs.get(content) if content is not None else None
        if same:
            entries.append(Entry("same", (storage.path,), (same.pop(0).path,)))
        else:
            alone.append(storage)
    entries += [only_left(storage.path, f"{NOT_UNDERSTOOD}: {ONLY_LEFT}") for storage in alone]
    left_over = [storage for storages in theirs.values() for storage in storages]
    return entries + [only_right(storage.path, f"{NOT_UNDERSTOOD}: {ONLY_RIGHT}") for storage in left_over]


def _content(storage: Unreached) -> bytes | None:
    try:
        return content_of_storage(storage.storage)
    except CkptError:
        return None


NOT_COMPARED = "not compared"


@dataclass(frozen=True, slots=True)
class Beside:
    """Two checkpoints without the models in them."""

    left: Checkpoint
    right: Checkpoint
    models: tuple[Section, Section]
    names: Names | None
    values: Values | None

    def compared(self) -> tuple[list[str], dict[str, bool]]:
        """Sentences on what is not the same or was not compared, and which aspects were compared completely."""
        sections = [*self.of_sections(), *self._one_sided()]
        notes = [*sections, *self._versions(), *self._objects()]
        skipped = any(note.startswith(NOT_COMPARED) for note in sections)
        code = any(side.format in ("pt2", "torchscript") for side in (self.left, self.right))
        return notes, {
            "values": self.values is not None,
            **dict.fromkeys(("aliases", "metadata"), False),
            **dict.fromkeys(("optimizers", "other_sections"), not skipped),
            "objects": self.values is not None,
            **({"code": False} if code else {}),
        }

    def of_sections(self) -> list[str]:
        """On each optimizer and state dict under one path on both sides; nothing else here asks for values."""
        mine, theirs = self._sections()
        return [note for path in mine if path in theirs for note in self._pair(mine[path], theirs[path])]

    def _sections(self) -> tuple[dict[str, Section], dict[str, Section]]:
        """The sections beside the models, by path; loose tensors are compared as the models are."""
        mine, theirs = (
            {s.path: s for s in side.sections if s.kind != "other" and s.path != model.path}
            for side, model in zip((self.left, self.right), self.models)
        )
        return mine, theirs

    def _pair(self, mine: Section, theirs: Section) -> Iterator[str]:
        if mine.kind != theirs.kind:
            yield f"{mine.title}: {mine.kind} on the left, {theirs.kind} on the right"
            return
        try:
            entries = self._compared(mine, theirs)
        except CkptError as error:
            yield f"{NOT_COMPARED}: {mine.title}: {error.message}"
            return
        count = sum(entry.status not in EITHER_WAY for entry in entries)
        if count:
            sides = (f"{one.source}::{mine.path}" for one in (self.left, self.right))
            words = shell("ckpttool", "diff", *["--values"] * (self.values is not None), *sides)
            yield f"{mine.title}: {plural(count, 'difference')} ({words})"

    def _compared(self, mine: Section, theirs: Section) -> tuple[Entry, ...]:
        if mine.kind == "state_dict":
            return compare(mine, theirs, self.values)
        saved = SavedOptimizer.of(self.left, mine), SavedOptimizer.of(self.right, theirs)
        return compare_optimizers(*saved, self.names, self.values).entries

    def _one_sided(self) -> Iterator[str]:
        mine, theirs = self._sections()
        left, right = loose(self.left), loose(self.right)
        for side, source, own, others, tensors, known in (
            ("left", self.left.source, mine, theirs, left, right),
            ("right", self.right.source, theirs, mine, right, left),
        ):
            alone = [section.title for path, section in own.items() if path not in others]
            if alone:
                yield f"{NOT_COMPARED}: {some(alone)} of {side} ({source}::{alone[0]} is one)"
            further = [key for key in tensors if key not in known]
            if further:
                what = plural(len(further), "entry")
                yield f"{NOT_COMPARED}: {what} outside of state dicts that only {side} has: {some(further)}"

    def _versions(self) -> Iterator[str]:
        others = otherwise(*self.models)
        if others:
            what = f"{plural(len(others), 'module')} of other versions (_metadata), which loading may read otherwise"
            yield f"{NOT_COMPARED}: {what}: {some(others)}"

    def _objects(self) -> Iterator[str]:
        """On what is no tensor, where values are asked for."""
        if self.values is None:
            return
        mine, theirs = ({entry.key: entry for entry in side.objects} for side in (self.left, self.right))
        for side, own, others in (("left", mine, theirs), ("right", theirs, mine)):
            alone = [path or "(root)" for path in own if path not in others]
            if alone:
                yield f"beside the tensors only {side} has {some(alone)}"
        unlike = [path or "(root)" for path in mine if path in theirs and not same_objects(mine[path], theirs[path])]
        if unlike:
            yield f"no tensor, and other values: {some(unlike)}"


def adapter_notes(left: Collection[str], right: Collection[str], names: tuple[str, str]) -> tuple[str, ...]:
    """Sentences on the adapters of two sides' keys; none where both have them, or neither. `names` are the sides'."""
    mine, theirs = adapter_of(left), adapter_of(right)
    if mine is not None and theirs is None:
        return _notes(mine, right, *names)
    if theirs is not None and mine is None:
        return _notes(theirs, left, *reversed(names))
    return ()


def _notes(adapter: Adapter, base: Collection[str], side: str, other: str) -> tuple[str, ...]:
    lost = missing_modules(adapter, base)
    count = plural(len(adapter.modules), "module")
    touched = f"{len(adapter.modules) - len(lost) if lost else 'all'} of them are in {other}"
    if adapter.alone:
        what = f"{side} is {adapter.title} for {count}, {touched}; it has no weights of the model itself"
        mend = (
            "PEFT's PeftModel.from_pretrained(BASE, FOLDER) adds it to its base, and merge_and_unload() merges the two"
        )
    else:
        what = f"{side} has {adapter.title} beside {count}, {touched}; without it the weights are not the trained ones"
        mend = "PEFT's merge_and_unload() merges it"
    notes = [f"{what}: {mend}"]
    if lost:
        notes.append(f"{plural(len(lost), 'adapted module')} not in {other}: {some(lost)}")
    return tuple(notes)


def dealt(values: Values | None, *comparisons: Callable[[Values], object]) -> Values | None:
    """`values`, with all that these comparisons ask it answered by the ranks of the job; the first then is alone.

    They are made once on every rank, as if all values were the same, to hear what they ask. What they ask besides where
    values differ is found when it is asked. Without a job it is `values` itself.
    """
    if values is None or current() is None:
        return values
    pairs: dict[tuple[object, object], tuple[TensorEntry, TensorEntry]] = {}  # keeps alive what the keys are ids of

    def noted(left: TensorEntry, right: TensorEntry) -> None:
        if left.storage is not None and right.storage is not None:
            pairs.setdefault((left.identity, right.identity), (left, right))

    for comparison in comparisons:
        comparison(noted)
    asked = {at: Question(a.key, a.nbytes + b.nbytes, partial(_asked, values, a, b)) for at, (a, b) in pairs.items()}
    found = answers("comparing values", asked)
    only_first()

    def known(left: TensorEntry, right: TensorEntry) -> Difference | None:
        at = left.identity, right.identity
        return _told(found[at]) if at in pairs else values(left, right)

    return known


def _asked(values: Values, left: TensorEntry, right: TensorEntry) -> dict[str, Any] | None:
    found = values(left, right)
    return None if found is None else asdict(found)


def _told(found: dict[str, Any] | None) -> Difference | None:
    if found is None:
        return None
    return Difference(found["text"], tuple((exponent, count) for exponent, count in found["spread"]))


_Keyed = Mapping[str, object]


def ask(left: Checkpoint, right: Checkpoint, model: ModelOperand | None, values: Values) -> None:
    """Asks `values` all that a diff of the two asks it, and nothing else that reads tensors."""
    saved = _saved_optimizers(left, right)
    if saved is not None:
        compare_optimizers(*saved, None if model is None else model.names(), values)
    else:
        mine, theirs, names = _read(left, right, model)
        _by_key(mine, theirs, names, values)
        Beside(left, right, (mine, theirs), names, values).of_sections()
    compare_loose(left, right, values)


def _saved_optimizers(left: Checkpoint, right: Checkpoint) -> tuple[SavedOptimizer, SavedOptimizer] | None:
    """The two, where both sides are an optimizer's state alone."""
    mine, theirs = optimizer_alone(left), optimizer_alone(right)
    return None if mine is None or theirs is None else (SavedOptimizer.of(left, mine), SavedOptimizer.of(right, theirs))


def _read(left: Checkpoint, right: Checkpoint, model: ModelOperand | None) -> tuple[Section, Section, Names | None]:
    """The models in the two, and the names of the one that they are read through."""
    mine, theirs = model_section(left), model_section(right)
    if model is None:
        return mine, theirs, None
    return mine, theirs, as_read(as_read(model, mine, left.source), theirs, right.source).names()


def _by_key(left: Section, right: Section, names: Names | None, values: Values | None) -> tuple[Entry, ...]:
    return compare(left, right, values) if names is None else compare_through(names, left, right, values)


def checkpoints(
    left: Checkpoint,
    right: Checkpoint,
    model: ModelOperand | None,
    values: Values | None,
    ignore_dtype: bool,
    infers: bool,
) -> Diff:
    """What the left has otherwise than the right; where it `infers`, with what may be one tensor under two names."""
    values = dealt(values, partial(ask, left, right, model))
    saved = _saved_optimizers(left, right)
    if saved is not None:
        return _optimizers(left, right, saved, model, values)
    mine, theirs, names = _read(left, right, model)
    entries = sections.explain_computed(explain_moved(_by_key(mine, theirs, names, values), mine, theirs))
    outside = compare_outside(left, right, values)
    if ignore_dtype and values is not None:
        entries = _converted(entries, mine.by_key(), theirs.by_key(), values)
        outside = _converted(outside, loose(left), loose(right), values)
    entries = (*entries, *outside)
    harmless = EITHER_WAY | ({"dtype"} if ignore_dtype else set())
    identical = all(entry.status in harmless for entry in entries)
    hidden = () if names is not None else hidden_segments(entries)
    adapters = adapter_notes(mine.keys, theirs.keys, ("left", "right"))
    ranks = (*one_rank(left), *one_rank(right))
    beside, others = Beside(left, right, (mine, theirs), names, values).compared()
    compared = {"keys": True, "shapes": True, "dtypes": not ignore_dtype, **others}
    notes = (*ranks, *hidden, *adapters, *beside)
    inferred = suggestions(left, right, entries, values is not None) if infers and names is None else None
    shown = Diff(left.source, right.source, identical, entries, notes=notes, inferred=inferred, harmless=harmless)
    return replace(shown, aside=bool(beside), compared=compared, outlines=(outlines(mine), outlines(theirs)))


def _converted(entries: Iterable[Entry], left: _Keyed, right: _Keyed, values: Values) -> tuple[Entry, ...]:
    """The entries; where the dtype is no difference, the values of the left count as loading converts them."""
    return tuple(
        _by_value(entry, left[entry.left[0]], right[entry.right[0]], values) if entry.status == "dtype" else entry
        for entry in entries
    )


def _by_value(entry: Entry, left: object, right: object, values: Values) -> Entry:
    """The entry of tensors of two dtypes, or that their values are others too, or not compared."""
    dense = [one for one in (left, right) if isinstance(one, TensorEntry) and one.storage and one.dtype in PLAIN]
    if len(dense) < 2:
        return replace(entry, status="value", reason=f"{entry.reason}, and the values are not compared")
    old, new = dense
    cast = Op("aten._to_copy.default", (Ref(old.key),), (("dtype", Special("dtype", new.dtype)),))
    differs = values(entry_of("", cast, {old.key: old}), new)
    if differs is None:
        return entry
    reason = f"{entry.reason}, and other values when they are converted"
    return replace(entry, status="value", reason=reason, detail=differs.text, spread=differs.spread or None)


def _optimizers(
    left: Checkpoint,
    right: Checkpoint,
    saved: tuple[SavedOptimizer, SavedOptimizer],
    model: ModelOperand | None,
    values: Values | None,
) -> Diff:
    """Two saved optimizers."""
    names = None if model is None else model.names()
    found = compare_optimizers(*saved, names, values)
    entries = (*found.entries, *compare_outside(left, right, values))
    identical = all(entry.status in EITHER_WAY for entry in entries)
    remedy = _alike(saved, model is not None, entries)
    beside, others = Beside(left, right, (saved[0].section, saved[1].section), names, values).compared()
    compared = dict.fromkeys(("keys", "shapes", "dtypes"), True) | others
    shown = Diff(left.source, right.source, identical, entries, (), (*found.notes, *beside), remedy=remedy)
    return replace(shown, aside=bool(beside), compared=compared, outlines=found.outlines)


def _alike(saved: tuple[SavedOptimizer, SavedOptimizer], by_model: bool, entries: Iterable[Entry]) -> Remedy | None:
    """What brings the first optimizer into the form, the order and the groups of the second."""
    form, wanted = (form_of(one.section) for one in saved)
    regrouped = (entry.status == "renamed" and entry.right[0].startswith(GROUPS) for entry in entries)
    if any(regrouped) or any(entry.status == "order" for entry in entries):
        return Remedy("like_right", None if form == wanted else wanted)
    if form == wanted:
        return None
    return Remedy("keys_by_model" if by_model or not is_named(saved[0]) else "keys", wanted)
