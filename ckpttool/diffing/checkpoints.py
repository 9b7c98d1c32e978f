"""Compare two checkpoints, with everything in them besides the model."""

from __future__ import annotations

from functools import partial

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.text import Info, Note
from ckpttool.diffing.causes import FIELDS, SIDES, Sides
from ckpttool.diffing.key_notes import adapter_notes, hidden_segments
from ckpttool.diffing.metadata import compare_versions, metadata_notes, tie_notes
from ckpttool.diffing.models import compare_models, pair_models, sides_of
from ckpttool.diffing.on_ranks import compare_on_ranks
from ckpttool.diffing.options import CompareOptions
from ckpttool.diffing.others import (
    compare_loose,
    compare_others,
    compare_outside,
    compare_sections,
)
from ckpttool.diffing.pairs import Values
from ckpttool.diffing.renames import suggestions
from ckpttool.diffing.result import (
    EITHER_WAY,
    Diff,
    alike,
    kinds_by_side,
    outlines,
    statuses_of,
)
from ckpttool.diffing.saved_optimizers import (
    UNKNOWN_CLASS,
    SavedOptimizer,
    compare_optimizers,
    optimizer_alone,
    remedy_between,
)
from ckpttool.diffing.scales import through_scales
from ckpttool.diffing.sides import BothSides
from ckpttool.formats.registry import MEMORY
from ckpttool.formats.remarks import one_rank
from ckpttool.kinds.adapters import adapter_in
from ckpttool.operands.model import ModelOperand


def checkpoints(
    left: Checkpoint,
    right: Checkpoint,
    model: ModelOperand | None,
    values: Values | None,
    options: CompareOptions,
    infers: bool,
) -> Diff:
    """Compare two checkpoints; if it `infers`, also find likely renames."""
    values = compare_on_ranks(values, partial(read_all_values, left, right, model))
    optimizers = _saved_optimizers(left, right)
    if optimizers is not None:
        return _optimizers(left, right, optimizers, model, values, options)
    sides = sides_of(left, right, model)
    entries, harmless = compare_models(sides, values, options)
    versions, failure = compare_versions(sides)
    about_others, compared = compare_others(sides, values, options)
    other_notes = [*tie_notes(sides, entries), *metadata_notes(sides), *about_others]
    notes = [*one_rank(left), *one_rank(right), *versions]
    inferred = None
    if sides.names is None:
        notes += hidden_segments(entries)
        if infers:
            inferred = suggestions(left, right, entries, values is not None)
    left_section, right_section = sides.left.section, sides.right.section
    adapters = adapter_in(left_section), adapter_in(right_section)
    keys = left_section.keys, right_section.keys
    notes += adapter_notes(adapters, keys, FIELDS, (left_section, right_section))
    names = names_of(left, right)
    return Diff(
        left.source,
        right.source,
        identical=not failure and all(group[0].is_one_of(harmless) for group in alike(entries)),
        entries=entries,
        notes=(*notes, *other_notes),
        other_failure=failure.format(left=names[0], right=names[1]),
        inferred=inferred,
        harmless=harmless,
        has_other_notes=any(not isinstance(note, Info) for note in other_notes),
        compared={"keys": True, "shapes": True, "dtypes": not options.ignore_dtype, **compared},
        outlines=(outlines(left_section), outlines(right_section)),
        kinds=kinds_by_side(left=left.kinds_of(left_section), right=right.kinds_of(right_section)),
        names=names,
    )


def names_of(left: Checkpoint, right: Checkpoint) -> Sides:
    """Return the operands as the names of the two sides; ``left`` and ``right`` if neither has a
    name.
    """
    is_nameless = left.source == right.source == MEMORY.title
    return SIDES if is_nameless else (left.source, right.source)


# Two saved optimizers


def _saved_optimizers(
    left: Checkpoint, right: Checkpoint
) -> tuple[SavedOptimizer, SavedOptimizer] | None:
    """Return the two optimizers if both sides hold nothing but the state of one."""
    left_section, right_section = optimizer_alone(left), optimizer_alone(right)
    if left_section is None or right_section is None:
        return None
    return SavedOptimizer.of(left, left_section), SavedOptimizer.of(right, right_section)


def _optimizers(
    left: Checkpoint,
    right: Checkpoint,
    saved: tuple[SavedOptimizer, SavedOptimizer],
    model: ModelOperand | None,
    values: Values | None,
    options: CompareOptions,
) -> Diff:
    """Compare two saved optimizers."""
    names = None if model is None else model.names()
    sides = BothSides.of((left, saved[0].section), (right, saved[1].section), names)
    diff = compare_optimizers(*saved, names, values)
    entries = (*diff.entries, *compare_outside(sides, values))
    notes: list[str] = []
    if diff.by_id:
        text = "parameters are compared by id"
        if names is None:
            text += ": pass --model MODEL to compare them by name"
        notes.append(Info(text, "compared-by"))
    left_class, right_class = diff.classes
    if left_class != right_class:
        words = "{left} is the state of {}, {right} of {}: neither loads the other's"
        classes = (left_class or UNKNOWN_CLASS, right_class or UNKNOWN_CLASS)
        notes.append(Note.about(words, "optimizer-class", *classes))
    other_notes, compared = compare_others(sides, values, options)
    return Diff(
        left.source,
        right.source,
        identical=statuses_of(entries) <= EITHER_WAY,
        entries=entries,
        notes=(*notes, *diff.notes, *other_notes),
        remedy=remedy_between(entries, *saved, has_model=model is not None),
        has_other_notes=bool(other_notes),
        compared=dict.fromkeys(("keys", "shapes", "dtypes"), True) | compared,
        outlines=diff.outlines,
        names=names_of(left, right),
    )


# The same comparison shared by the ranks of a job


def read_all_values(
    left: Checkpoint, right: Checkpoint, model: ModelOperand | None, values: Values
) -> None:
    """Compare `values` of every pair of tensors that a diff of the two compares, and read nothing
    else.
    """
    optimizers = _saved_optimizers(left, right)
    if optimizers is not None:
        names = None if model is None else model.names()
        compare_optimizers(*optimizers, names, values)
        sections = optimizers[0].section, optimizers[1].section
        sides = BothSides.of((left, sections[0]), (right, sections[1]), names)
    else:
        sides = sides_of(left, right, model)
        pair_models(through_scales(sides, values).sides, values)
        compare_sections(sides, values, CompareOptions())
    compare_loose(sides, values)
