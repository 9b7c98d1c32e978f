"""The document of an inspection: repeated layers on one line, the long lists cut where `--all` is not given."""

from __future__ import annotations

from functools import partial
from itertools import groupby
from typing import NamedTuple

from ckpttool.checkpoint import Section
from ckpttool.imports import DANGEROUS, KNOWN, UNKNOWN
from ckpttool.keys import dotted
from ckpttool.naming.flat_param import flat_params
from ckpttool.queries.inspection import Inspection, names_in_file
from ckpttool.report.collapse import Group, collapse
from ckpttool.report.document import Cell, Column, Document, Inline, Listing, Role, Table, noted, shortened
from ckpttool.report.documents.listing import of_inspection
from ckpttool.report.documents.tree import tree
from ckpttool.words import human_bytes, number, plural, shape_text

_ROWS = 40
_DIGITS = 12  # of a hash; JSON has all of them
_VALUE_WIDTH = 200  # characters of a long text that are shown
_ROOT = "(root)"


def document(
    inspection: Inspection, *, all: bool = False, depth: int | None = None, by_bytes: bool = False
) -> Document:
    """The document; with `all` every tensor has a line of its own and no list is cut.

    With a `depth` the modules stand in the place of the tensors; `by_bytes` puts what is largest first.
    """
    checkpoint = inspection.checkpoint
    tensors = sum(len(section.all_tensors()) for section in checkpoint.sections)
    verdict = f"{checkpoint.format}, {plural(tensors, 'tensor')}, {human_bytes(checkpoint.nbytes)} on disk"
    limit = None if all else _ROWS
    dangerous = any(one.verdict == DANGEROUS for one in checkpoint.imports)
    tables = (
        *([_imports(inspection)] if dangerous else []),
        _sections(inspection),
        _dtypes(inspection),
        shortened(_tensors(inspection, all, by_bytes), limit) if depth is None else tree(checkpoint, depth, by_bytes),
        shortened(_statistics(inspection), limit),
        shortened(_flat_parameters(inspection), limit),
        _adapters(inspection, all),
        shortened(_parameters(inspection), limit),
        shortened(_aliases(inspection), limit),
        shortened(_extras(inspection), limit),
        *([] if dangerous else [shortened(_imports(inspection), limit)]),
        shortened(_metadata(inspection, all), limit),
    )
    notes = tuple(noted(inspection.notes))
    shown = [table for table in tables if table.rows]
    listing = Listing((checkpoint.source,), {"tensor": "plain"}, partial(of_inspection, inspection))
    return Document(f"inspect {checkpoint.source}", verdict, True, (*notes, *shown), listing)


def _sections(inspection: Inspection) -> Table:
    columns = (Column("section", "key"), Column("kind"), Column("tensors", "number"), Column("size", "number"))
    rows: list[tuple[Inline, ...]] = []
    for section in inspection.checkpoint.sections:
        wrappers = Cell(", ".join(inspection.wrappers[section.path]), "warn")
        size = human_bytes(section.nbytes)
        rows.append((section.path or _ROOT, section.kind, number(len(section.all_tensors())), size, wrappers))
    return Table("Sections", (*columns, Column("wrappers seen", "warn")), tuple(rows))


def _dtypes(inspection: Inspection) -> Table:
    columns = (Column("dtype", "dtype"), Column("tensors", "number"), Column("elements", "number"))
    entries = [entry for section in inspection.checkpoint.sections for entry in section.all_tensors()]
    entries.sort(key=lambda entry: entry.dtype)
    rows: list[tuple[Inline, ...]] = []
    for dtype, found in groupby(entries, key=lambda entry: entry.dtype):
        same = list(found)
        elements, size = sum(entry.numel for entry in same), sum(entry.nbytes for entry in same)
        rows.append((dtype, number(len(same)), number(elements), human_bytes(size)))
    return Table("Dtypes", (*columns, Column("size", "number")), tuple(rows))


def _tensors(inspection: Inspection, all: bool, by_bytes: bool) -> Table:
    """A line a group of alike tensors; the columns that would say nothing (one section, no groups) are left out."""
    sections = inspection.checkpoint.sections
    groups = [(section, group) for section in sections for group in _groups(section, all)]
    many = len([section for section in sections if section.all_tensors()]) > 1
    counted = any(len(group.keys) > 1 for _, group in groups)
    columns = [Column("key", "key"), Column("dtype", "dtype"), Column("shape", "shape"), Column("size", "number")]
    if by_bytes:
        groups.sort(key=lambda one: -_size(one[1]))
    rows: list[tuple[Inline, ...]] = []
    for section, group in groups:
        like = group.likeness
        row: tuple[Inline, ...] = (group.pattern, like.dtype, _geometry(like), human_bytes(_size(group)))
        count = (number(len(group.keys)),) if counted else ()
        rows.append((*((section.path or _ROOT,) if many else ()), *count, *row))
    columns = [*([Column("section")] if many else []), *([Column("tensors", "number")] if counted else []), *columns]
    return Table("Tensors", tuple(columns), tuple(rows), is_listed=True)


def _statistics(inspection: Inspection) -> Table:
    """A line a dense tensor, where its values were read."""
    titles = ("min", "max", "mean", "zeros", "NaN", "inf")
    columns = (Column("key", "key"), *(Column(title, "number") for title in titles), Column("sha256", "dim"))
    rows: list[tuple[Inline, ...]] = []
    for found in inspection.tensors() if inspection.statistics else ():
        own = found.stats
        if own is None:
            continue
        counts = [Cell("" if n is None else number(n), "bad" if n else "number") for n in (own.nan, own.inf)]
        values = ["" if value is None else f"{value:.4g}" for value in (own.minimum, own.maximum, own.mean)]
        zeros = "" if own.zeros is None else number(own.zeros)
        rows.append((found.name, *values, zeros, *counts, own.sha256[:_DIGITS]))
    return Table("Values", columns, tuple(rows))


class _Likeness(NamedTuple):
    """What tensors on one line have in common; `nbytes` are those of one of them."""

    dtype: str
    shape: tuple[int, ...]
    layout: str
    nbytes: int


def _groups(section: Section, all: bool) -> list[Group[_Likeness]]:
    shown = [(e.key, _Likeness(e.dtype, e.shape, e.layout, e.nbytes)) for e in section.all_tensors()]
    return [Group(key, (key,), likeness) for key, likeness in shown] if all else collapse(shown)


def _size(group: Group[_Likeness]) -> int:
    return group.likeness.nbytes * len(group.keys)


def _geometry(like: _Likeness) -> str:
    shape = shape_text(like.shape)
    return shape if like.layout == "strided" else f"{shape} {like.layout}"


def _flat_parameters(inspection: Inspection) -> Table:
    rows: list[tuple[Inline, ...]] = [
        (dotted(section.path, flat.key), Cell(flat.unit or _ROOT, "key"), number(flat.numel))
        for section in inspection.checkpoint.sections
        for flat in flat_params(section)
    ]
    columns = (Column("key", "key"), Column("parameters of"), Column("elements", "number"))
    return Table("Flat parameters: all parameters of a module, end to end", columns, tuple(rows))


def _adapters(inspection: Inspection, all: bool) -> Table:
    columns = (Column("section", "key"), Column("adapter"), Column("modules", "number"), Column("touches", "key"))
    rows: list[tuple[Inline, ...]] = []
    for path, adapter in inspection.adapters.items():
        touched = ", ".join(group.pattern for group in collapse((module, None) for module in adapter.modules))
        alone = "alone: no weights of its model" if adapter.alone else "beside its model"
        kinds = f"{' and '.join(adapter.kinds)}, {alone}"
        rows.append((path or _ROOT, kinds, number(len(adapter.modules)), _cut(touched, all)))
    return Table("Adapters: what is added to a model's layers", columns, tuple(rows))


def _parameters(inspection: Inspection) -> Table:
    """A line a parameter that is a number in the keys, and has a name in its param group."""
    rows: list[tuple[Inline, ...]] = []
    for path, state in inspection.optimizers.items():
        names = names_in_file(state)
        for index, group in enumerate(state.groups):
            ids = (param for param in group.params if isinstance(param, int) and param in names)
            rows += [(path or _ROOT, str(index), str(param), names[param]) for param in ids]
    columns = (Column("section", "key"), Column("param group", "number"), Column("id", "number"))
    return Table(
        "Parameters of the optimizer, as the file names them", (*columns, Column("parameter", "key")), tuple(rows)
    )


def _aliases(inspection: Inspection) -> Table:
    rows: list[tuple[Inline, ...]] = [
        (dotted(path, key), Cell(dotted(path, first), "key"))
        for path, aliases in inspection.aliases.items()
        for key, first in aliases.items()
    ]
    return Table("Aliases: a second name of one tensor", (Column("key", "key"), Column("same tensor as")), tuple(rows))


def _extras(inspection: Inspection) -> Table:
    places = ((section.path, extra.key) for section in inspection.checkpoint.sections for extra in section.extras)
    keys = (*(dotted(*place) for place in places), *inspection.checkpoint.others)
    return Table("Not tensors, carried as they are", (Column("key", "key"),), tuple((key,) for key in keys))


_STYLES: dict[str, Role] = {DANGEROUS: "bad", UNKNOWN: "warn", KNOWN: "ok"}


def _imports(inspection: Inspection) -> Table:
    """A line for each import, dangerous ones first, with its place and its calls."""
    imports = inspection.checkpoint.imports
    several = len({one.file for one in imports}) > 1
    rows: list[tuple[Inline, ...]] = []
    for one in imports:
        place = f"{one.file}: {one.place}" if several and one.member else one.place
        calls = list(one.calls) if one.verdict != KNOWN else []
        if calls and one.called > len(calls):
            calls.append(f"{number(one.called - len(calls))} more")
        rows.append((one.name, Cell(one.verdict, _STYLES[one.verdict]), place, "; ".join(calls)))
    columns = (Column("name", "key"), Column("verdict"), Column("where"), Column("called"))
    return Table("Pickle imports (never executed)", columns, tuple(rows))


def _cut(text: str, all: bool) -> str:
    more = len(text) - _VALUE_WIDTH
    return text if all or more <= 0 else f"{text[:_VALUE_WIDTH]} ... {plural(more, 'more character')} (--all)"


def _metadata(inspection: Inspection, all: bool) -> Table:
    rows = tuple((key, _cut(value, all)) for key, value in inspection.checkpoint.metadata.items())
    return Table("Metadata", (Column("key", "key"), Column("value")), rows)
