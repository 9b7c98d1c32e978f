"""Two checkpoints against each other, read through a model where one is given."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial

from ckpttool.checkpoint import Checkpoint, Section, TensorEntry
from ckpttool.dtypes import PLAIN
from ckpttool.evaluate.digests import made
from ckpttool.expression import Op, Ref, Special
from ckpttool.formats.ranks.files import one_rank
from ckpttool.names import Names
from ckpttool.naming.optimizers.forms import form_of
from ckpttool.operands.checkpoint import model_section
from ckpttool.operands.model import ModelOperand, as_read
from ckpttool.optimizer_state import GROUPS
from ckpttool.queries.diff import computed
from ckpttool.queries.diff.adapters import adapter_notes
from ckpttool.queries.diff.beside import Beside
from ckpttool.queries.diff.dealt import dealt
from ckpttool.queries.diff.elsewhere import explained
from ckpttool.queries.diff.keys import Values, compare
from ckpttool.queries.diff.names import compare_through
from ckpttool.queries.diff.optimizer import (
    SavedOptimizer,
    compare_optimizers,
    is_named,
    optimizer_alone,
)
from ckpttool.queries.diff.outside import compare_loose, compare_outside, loose
from ckpttool.queries.diff.reasons import hidden_segments
from ckpttool.queries.diff.result import EITHER_WAY, Diff, Entry, Remedy, outlines
from ckpttool.queries.diff.suggestions import suggestions

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
    entries = computed.explained(explained(_by_key(mine, theirs, names, values), mine, theirs))
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
    converted = made(cast, {old.key: old})
    assert converted is not None
    differs = values(converted, new)
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
