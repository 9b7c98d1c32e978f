"""Compare two checkpoints, with everything in them besides the model."""

from __future__ import annotations

from functools import partial

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.text import Info, Note
from ckpttool.diffing.causes import FIELDS, NOT_WEIGHTS, SIDES, Sides
from ckpttool.diffing.explain import explain_computed, explain_quantized
from ckpttool.diffing.key_notes import adapter_notes, hidden_segments
from ckpttool.diffing.metadata import compare_versions, metadata_notes, tie_notes
from ckpttool.diffing.moved import explain_moved
from ckpttool.diffing.on_ranks import compare_on_ranks
from ckpttool.diffing.one_model import compare_through, explain_program
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
    Entry,
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
from ckpttool.diffing.sections import compare, without_dtypes
from ckpttool.diffing.sides import BothSides
from ckpttool.formats.registry import MEMORY, format_of, is_program
from ckpttool.formats.remarks import one_rank
from ckpttool.kinds.adapters import adapter_in
from ckpttool.operands.checkpoint import model_section
from ckpttool.operands.model import ModelOperand
from ckpttool.operands.reading import as_read

# Statuses of equal weights: what a program has under other names, or with another number of names.
_OTHER_NAMES = frozenset({"renamed", "transformed", "alias"})
# What does not count if a program has the weights of a checkpoint.
OF_PROGRAMS = _OTHER_NAMES | {code.code for code in NOT_WEIGHTS}


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
    sides = _models(left, right, model)
    entries, harmless = _compared(sides, values, options)
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


def _compared(
    sides: BothSides, values: Values | None, options: CompareOptions
) -> tuple[tuple[Entry, ...], frozenset[str]]:
    """Pair the keys of the two models, and say why pairs differ. Return the entries, and the
    statuses and codes that are not differences.
    """
    scaled = through_scales(sides, values)
    entries = _paired(scaled.sides, values)
    entries = explain_moved(entries, scaled.sides)
    entries = scaled.with_parts(entries)
    entries = explain_computed(entries)
    entries = explain_quantized(entries, sides.left.section, sides.right.section, values)
    entries = (*entries, *compare_outside(sides, values))
    harmless = EITHER_WAY
    if options.ignore_dtype:
        entries, harmless = without_dtypes(entries), harmless | {"dtype"}
    if sides.names is not None and sides.has_program:
        entries = explain_program(entries, sides.names, sides)
        if values is not None:
            harmless |= OF_PROGRAMS
    return entries, harmless


def _paired(sides: BothSides, values: Values | None) -> tuple[Entry, ...]:
    """Pair the keys of the two models by their text, or by the names of the model that has both."""
    left, right = sides.left.section, sides.right.section
    if sides.names is None:
        return compare(left, right, values)
    return compare_through(sides.names, left, right, values)


def names_of(left: Checkpoint, right: Checkpoint) -> Sides:
    """Return the operands as the names of the two sides; ``left`` and ``right`` if neither has a
    name.
    """
    is_nameless = left.source == right.source == MEMORY.title
    return SIDES if is_nameless else (left.source, right.source)


def _models(left: Checkpoint, right: Checkpoint, model: ModelOperand | None) -> BothSides:
    """Return the sections of the two models, and the names that both are read with."""
    left_section, right_section = model_section(left), model_section(right)
    names = None
    if model is not None:
        model = as_read(model, left_section, left.source)
        names = as_read(model, right_section, right.source).names()
    return BothSides.of((left, left_section), (right, right_section), names)


# Programs


def program_and_weights(left: Checkpoint, right: Checkpoint) -> tuple[Checkpoint, Checkpoint]:
    """Return the two in the order of `swap-weights`, which takes the program first."""
    return (right, left) if is_program(right) else (left, right)


def is_written_program(checkpoint: Checkpoint) -> bool:
    """Return True if it is a program whose names a remap can change."""
    format = format_of(checkpoint)
    return format.holds.programs and format.writes


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
        sides = _models(left, right, model)
        _paired(through_scales(sides, values).sides, values)
        compare_sections(sides, values, CompareOptions())
    compare_loose(sides, values)
