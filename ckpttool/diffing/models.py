"""Compare the models of two checkpoints: pair their keys, then say why pairs differ."""

from __future__ import annotations

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.diffing.causes import NOT_WEIGHTS
from ckpttool.diffing.explain import explain_computed, explain_quantized
from ckpttool.diffing.moved import explain_moved
from ckpttool.diffing.one_model import compare_through, explain_program
from ckpttool.diffing.options import CompareOptions
from ckpttool.diffing.others import compare_outside
from ckpttool.diffing.pairs import Values
from ckpttool.diffing.result import EITHER_WAY, Entry
from ckpttool.diffing.scales import through_scales
from ckpttool.diffing.sections import compare, without_dtypes
from ckpttool.diffing.sides import BothSides
from ckpttool.formats.registry import format_of, is_program
from ckpttool.operands.checkpoint import model_section
from ckpttool.operands.model import ModelOperand
from ckpttool.operands.reading import as_read

# Statuses of equal weights: what a program has under other names, or with another number of names.
_OTHER_NAMES = frozenset({"renamed", "transformed", "alias"})
# What does not count if a program has the weights of a checkpoint.
OF_PROGRAMS = _OTHER_NAMES | {code.code for code in NOT_WEIGHTS}


def sides_of(left: Checkpoint, right: Checkpoint, model: ModelOperand | None) -> BothSides:
    """Return the sections of the two models, and the names that both are read with."""
    left_section, right_section = model_section(left), model_section(right)
    names = None
    if model is not None:
        model = as_read(model, left_section, left.source)
        names = as_read(model, right_section, right.source).names()
    return BothSides.of((left, left_section), (right, right_section), names)


def compare_models(
    sides: BothSides, values: Values | None, options: CompareOptions
) -> tuple[tuple[Entry, ...], frozenset[str]]:
    """Pair the keys of the two models, and say why pairs differ. Return the entries, and the
    statuses and codes that are not differences.
    """
    scaled = through_scales(sides, values)
    entries = pair_models(scaled.sides, values)
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


def pair_models(sides: BothSides, values: Values | None) -> tuple[Entry, ...]:
    """Pair the keys of the two models by their text, or by the names of the model that has both."""
    left, right = sides.left.section, sides.right.section
    if sides.names is None:
        return compare(left, right, values)
    return compare_through(sides.names, left, right, values)


# Programs


def program_and_weights(left: Checkpoint, right: Checkpoint) -> tuple[Checkpoint, Checkpoint]:
    """Return the two in the order of `swap-weights`, which takes the program first."""
    return (right, left) if is_program(right) else (left, right)


def is_written_program(checkpoint: Checkpoint) -> bool:
    """Return True if it is a program whose names a remap can change."""
    format = format_of(checkpoint)
    return format.holds.programs and format.writes
