"""Every key of a result, with what is known of its tensor, for a reader who searches and folds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import inf, prod
from typing import TYPE_CHECKING

from ckpttool.checkpoint import TensorEntry
from ckpttool.dtypes import itemsize
from ckpttool.report.document import Finding, Named
from ckpttool.words import shape_text

if TYPE_CHECKING:
    from ckpttool.queries.diff.result import Diff, Entry, Outline, Outlines
    from ckpttool.queries.inspection import Inspection


def of_diff(diff: Diff) -> Iterator[Finding]:
    """Every entry, in the order of the tensors on the right, and those that only left has by their own."""
    left, right = diff.outlines
    places = [{key: place for place, key in enumerate(side)} for side in (left, right)]

    def order(entry: Entry) -> float:
        keys, side = (entry.right, places[1]) if entry.right else (entry.left, places[0])
        return side.get(keys[0], inf)

    for entry in sorted(diff.entries, key=order):
        sides = _named(entry.left, left), _named(entry.right, right)
        place = None if entry.hook is None or not entry.hook.file else (entry.hook.file, entry.hook.line)
        fails = not diff.identical and diff.weighs(entry) and entry.ignored is None
        yield Finding(entry.status, *sides, entry.why, entry.detail or "", entry.spread or (), place, fails)


def of_inspection(inspection: Inspection) -> Iterator[Finding]:
    """Every tensor, below the path of its section."""
    for found in inspection.tensors():
        why = "" if found.alias_of is None else f"a second name of {found.alias_of}"
        yield Finding("tensor", (replace(_outlined(found.entry.key, found.entry), key=found.name),), why=why)


def _named(keys: Iterable[str], outlines: Outlines) -> tuple[Named, ...]:
    return tuple(_outlined(key, outlines[key]) if key in outlines else Named(key) for key in keys)


def _outlined(key: str, outline: Outline) -> Named:
    if isinstance(outline, TensorEntry):
        dtype = outline.dtype if outline.layout == "strided" else f"{outline.dtype} {outline.layout}"
        return Named(key, dtype, shape_text(outline.shape), outline.nbytes)
    nbytes = None if outline.shape is None else prod(outline.shape) * itemsize(outline.dtype)
    return Named(key, outline.dtype, shape_text(outline.shape), nbytes)
