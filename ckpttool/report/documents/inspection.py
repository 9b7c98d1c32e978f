"""The document of an inspection."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import field, replace
from functools import partial
from itertools import groupby
from math import inf, prod
from typing import TYPE_CHECKING, NamedTuple

from ckpttool.core.checkpoint import Checkpoint, Section, TensorEntry
from ckpttool.core.dtypes import itemsize
from ckpttool.core.keys import dotted
from ckpttool.core.pickle_imports import DANGEROUS, KNOWN, UNKNOWN
from ckpttool.core.text import human_bytes, number, plural, shape_text
from ckpttool.core.values import dataclass
from ckpttool.inspection.inspect import Inspection, names_in_file
from ckpttool.naming.flat import flat_params
from ckpttool.operands.checkpoint import split
from ckpttool.report.collapse import Group, collapse
from ckpttool.report.document import (
    Cell,
    Column,
    Document,
    Finding,
    Inline,
    Listing,
    Named,
    Role,
    Table,
    noted,
    shortened,
)

if TYPE_CHECKING:
    from ckpttool.diffing.result import Diff, Entry, Outline, Outlines


_BAR = 20  # characters of the longest bar
_INDENT = "  "
_DEEPEST = 24  # levels that are told apart; models have about ten


@dataclass(slots=True)
class _Module:
    """What lies under a module; `storages` are counted once, however many names they have."""

    tensors: int = 0
    nbytes: int = 0
    dtypes: dict[str, None] = field(default_factory=dict)
    below: dict[str, _Module] = field(default_factory=dict)

    def add(self, path: list[str], dtype: str, nbytes: int) -> None:
        """Counts a tensor here, and in every module on its way."""
        self.tensors += 1
        self.nbytes += nbytes
        self.dtypes[dtype] = None
        if path:
            self.below.setdefault(path[0], _Module()).add(path[1:], dtype, nbytes)

    @property
    def likeness(self) -> tuple[object, ...]:
        """Equal for modules that look alike, down to the last tensor."""
        below = tuple((name, module.likeness) for name, module in self.below.items())
        return self.tensors, self.nbytes, tuple(self.dtypes), below


def tree(checkpoint: Checkpoint, depth: int, by_bytes: bool) -> Table:
    """A row for each module down to `depth`, repeated layers on one; the bar is its share of the file's tensors."""
    columns = (
        Column("module", "key"),
        Column("tensors", "number"),
        Column("dtypes", "dtype"),
        Column("size", "number"),
        Column("share of all"),
    )
    roots = [(section.path or _ROOT, _module_of(section)) for section in checkpoint.sections]
    roots = [(path, root) for path, root in roots if root.tensors]
    total = sum(root.nbytes for _, root in roots)
    if by_bytes:
        roots.sort(key=lambda one: -one[1].nbytes)
    rows = [row for path, root in roots for row in _rows(path, 1, root, depth, 0, total, by_bytes)]
    return Table("Modules", columns, tuple(rows))


def _module_of(section: Section) -> _Module:
    root, seen = _Module(), set[object]()
    for entry in section.all_tensors():
        counted = 0 if entry.identity in seen else entry.nbytes
        seen.add(entry.identity)
        root.add(entry.key.split(".")[:-1][:_DEEPEST], entry.dtype, counted)
    return root


def _rows(
    name: str, count: int, module: _Module, depth: int, level: int, total: int, by_bytes: bool
) -> Iterator[tuple[Inline, ...]]:
    nbytes = module.nbytes * count
    share = nbytes / total if total else 0.0
    bar = "#" * max(round(share * _BAR), 1 if nbytes else 0)
    yield (
        _INDENT * level + name,
        number(module.tensors * count),
        ", ".join(module.dtypes),
        human_bytes(nbytes),
        Cell(f"{share:>6.1%} {bar}", "dim"),
    )
    if level == depth:
        return
    groups = collapse((below, own.likeness) for below, own in module.below.items())
    found = [(group.pattern, len(group.keys), module.below[group.keys[0]]) for group in groups]
    if by_bytes:
        found.sort(key=lambda one: -one[1] * one[2].nbytes)
    for pattern, many, below in found:
        yield from _rows(pattern, count * many, below, depth, level + 1, total, by_bytes)


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
    several = {one.file for one in imports} != {split(inspection.checkpoint.source)[0]}
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
