"""The document of an inspection."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field, replace
from functools import partial
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from ckpttool.core.checkpoint import Checkpoint, Described, Section, TensorEntry
from ckpttool.core.dtypes import itemsize
from ckpttool.core.pickle_imports import DANGEROUS, KNOWN, UNKNOWN
from ckpttool.core.text import dotted, human_bytes, listed, number, plural, shape_text
from ckpttool.core.values import dataclass
from ckpttool.formats.registry import format_of
from ckpttool.inspection.inspect import Inspection, names_in_file
from ckpttool.naming.flat import flat_params
from ckpttool.operands.checkpoint import split
from ckpttool.report.collapse import KeyPattern, collapse, patterns
from ckpttool.report.document import (
    Block,
    Cell,
    Column,
    Document,
    Facts,
    Finding,
    Inline,
    Listing,
    Named,
    Role,
    Row,
    Table,
    noted,
    shortened,
)

if TYPE_CHECKING:
    from ckpttool.diffing.result import Outline

_ROWS = 40
_FEW_ROWS = 8  # of entries that are not tensors
_DIGITS = 12  # of a hash; JSON has all of them
_VALUE_WIDTH = 200  # characters of a long text that are shown
_ROOT = "(root)"
_ORDER = ("state_dict", "other", "optimizer")
_FOLDED = 3  # lines of a section besides the model; more are one line
_BAR = 20  # characters of the longest bar
_DEEPEST = 24  # levels of modules that are distinguished; models have about ten
_VERDICTS: dict[str, Role] = {DANGEROUS: "bad", UNKNOWN: "warn", KNOWN: "ok"}
_KEY, _TENSORS, _SIZE = Column("key", "key"), Column("tensors", "number"), Column("size", "number")
_SECTION = Column("section", "key")


def document(
    inspection: Inspection, *, all: bool = False, depth: int | None = None, by_bytes: bool = False
) -> Document:
    """Return the document; with `all` every tensor has its own line and no list is cut.

    With a `depth`, list modules instead of tensors; `by_bytes` lists the largest first.
    """
    # model first
    in_order = sorted(
        inspection.checkpoint.sections, key=lambda section: _ORDER.index(section.kind)
    )
    checkpoint = replace(inspection.checkpoint, sections=tuple(in_order))
    inspection = replace(inspection, checkpoint=checkpoint)
    limit = None if all else _ROWS
    if depth is None:
        tensors = shortened(_tensors(checkpoint, all, by_bytes), limit)
    else:
        tensors = tree(checkpoint, depth, by_bytes)
    tables = [
        shortened(_sections(inspection), limit),
        _dtypes(checkpoint),
        tensors,
        shortened(_statistics(inspection), limit),
        shortened(_flat_parameters(checkpoint), limit),
        _adapters(inspection, all),
    ]
    if all or not checkpoint.state_dicts:
        tables.append(shortened(_optimizer_params(inspection), limit))
    tables.append(shortened(_aliases(inspection), limit))
    tables.append(shortened(_extras(checkpoint, all), None if all else _FEW_ROWS))
    if any(imported.verdict == DANGEROUS for imported in checkpoint.imports):
        tables.insert(0, _imports(checkpoint))
    else:
        tables.append(shortened(_imports(checkpoint), limit))
    metadata = tuple((key, _cut(value, all)) for key, value in checkpoint.metadata.items())
    tables.append(shortened(Table("Metadata", (_KEY, Column("value")), metadata), limit))
    blocks: list[Block] = [table for table in tables if table.rows]
    blocks += noted(inspection.notes)
    kinds = tuple(("kind", kind.sentence(checkpoint.source)) for kind in checkpoint.kinds)
    lead = (Facts(kinds, is_short=True),) if kinds else ()
    listing = Listing((checkpoint.source,), {"tensor": "plain"}, partial(_findings, inspection))
    title = f"inspect {checkpoint.source}"
    return Document(title, _contents(inspection), True, tuple(blocks), listing, lead)


def _extras(checkpoint: Checkpoint, all: bool) -> Table:
    """Return a line for each entry that is not a tensor, with its type and value; equal ones of
    repeated layers are one.
    """
    items: list[tuple[str, Described]] = []
    for section in checkpoint.sections:
        items += [(dotted(section.path, extra.key), extra.described()) for extra in section.extras]
    objects = {extra.key: extra.described() for extra in checkpoint.objects}
    items += [(path, objects.get(path, Described())) for path in checkpoint.others]
    groups = [KeyPattern(key, (key,), likeness) for key, likeness in items]
    rows: list[Row] = []
    for group in groups if all else collapse(items):
        kind, value = group.likeness
        rows.append((group.pattern, kind, _cut(value, all)))
    columns = (_KEY, Column("type"), Column("value"))
    return Table("Non-tensor entries (copied unchanged)", columns, tuple(rows))


def _aliases(inspection: Inspection) -> Table:
    rows: list[Row] = []
    for path, aliases in inspection.aliases.items():
        for key, first in aliases.items():
            rows.append((dotted(path, key), Cell(dotted(path, first), "key")))
    columns = (_KEY, Column("same tensor as"))
    return Table("Aliases (second names of a tensor)", columns, tuple(rows))


def _contents(inspection: Inspection) -> str:
    """Return ``train.pt holds a state dict of 92 tensors and an optimizer: torch.save, 3 MiB``."""
    checkpoint = inspection.checkpoint
    parts = []
    state_dicts = checkpoint.state_dicts
    if state_dicts:
        tensors = sum(len(section.all_tensors()) for section in state_dicts)
        several = plural(len(state_dicts), "state dict")
        count = "a state dict" if len(state_dicts) == 1 else several
        parts.append(f"{count} of {plural(tensors, 'tensor')}")
    optimizers = len(checkpoint.optimizers)
    if optimizers:
        parts.append("an optimizer" if optimizers == 1 else plural(optimizers, "optimizer"))
    others = [section for section in checkpoint.sections if section.kind == "other"]
    loose = sum(len(section.all_tensors()) for section in others)
    if loose:
        parts.append(plural(loose, "other tensor" if parts else "tensor"))
    objects = len(checkpoint.others) + sum(len(section.extras) for section in checkpoint.sections)
    if objects:
        parts.append(plural(objects, "non-tensor entry"))
    title = format_of(checkpoint).title
    size = human_bytes(checkpoint.nbytes)
    return f"{checkpoint.source} holds {listed(parts) or 'nothing'}: {title}, {size}"


def _findings(inspection: Inspection) -> Iterator[Finding]:
    """Yield every tensor, below the path of its section."""
    for tensor in inspection.tensors():
        why = "" if tensor.alias_of is None else f"second name of {tensor.alias_of}"
        named = replace(outlined(tensor.entry.key, tensor.entry), key=tensor.name)
        yield Finding("tensor", (named,), why=why)


def outlined(key: str, outline: Outline | None) -> Named:
    """Return the key with what is known about its tensor."""
    if outline is None:
        return Named(key)
    if isinstance(outline, TensorEntry):
        dtype = outline.dtype
        if outline.layout != "strided":
            dtype += f" {outline.layout}"
        return Named(key, dtype, shape_text(outline.shape), outline.nbytes)
    nbytes = None if outline.shape is None else prod(outline.shape) * itemsize(outline.dtype)
    return Named(key, outline.dtype, shape_text(outline.shape), nbytes)


def _cut(text: str, all: bool) -> str:
    more = len(text) - _VALUE_WIDTH
    if all or more <= 0:
        return text
    return f"{text[:_VALUE_WIDTH]} ... {plural(more, 'more character')} (--all)"


def _sections(inspection: Inspection) -> Table:
    rows: list[Row] = []
    for section in inspection.checkpoint.sections:
        wrappers = Cell(", ".join(inspection.wrappers[section.path]), "warn")
        tensors = number(len(section.all_tensors()))
        rows.append(
            (section.path or _ROOT, section.kind, tensors, human_bytes(section.nbytes), wrappers)
        )
    return Table(
        "Sections",
        (_SECTION, Column("kind"), _TENSORS, _SIZE, Column("wrappers", "warn")),
        tuple(rows),
    )


def _dtypes(checkpoint: Checkpoint) -> Table:
    by_dtype: dict[str, list[TensorEntry]] = {}
    for section in checkpoint.sections:
        for entry in section.all_tensors():
            by_dtype.setdefault(entry.dtype, []).append(entry)
    rows: list[Row] = []
    for dtype, entries in sorted(by_dtype.items()):
        elements = sum(entry.numel for entry in entries)
        size = sum(entry.nbytes for entry in entries)
        rows.append((dtype, number(len(entries)), number(elements), human_bytes(size)))
    columns = (Column("dtype", "dtype"), _TENSORS, Column("elements", "number"), _SIZE)
    return Table("Dtypes", columns, tuple(rows))


class _Likeness(NamedTuple):
    """The properties that all tensors on one line have; `nbytes` is the size of one tensor."""

    dtype: str
    shape: tuple[int, ...]
    layout: str
    nbytes: int


def _tensors(checkpoint: Checkpoint, all: bool, by_bytes: bool) -> Table:
    """Return a line for each group of equal tensors, without columns that would be the same
    everywhere.
    """
    lines: list[_Line] = []
    folded: list[_Line] = []
    for section in checkpoint.sections:
        of_section = _lines(section, all)
        is_model = section.kind == "state_dict"
        if all or is_model or not checkpoint.state_dicts or len(of_section) <= _FOLDED:
            lines += of_section
        else:
            folded.append(_folded(section))
    if by_bytes:
        lines.sort(key=lambda line: -line.nbytes)
    has_sections = sum(bool(section.all_tensors()) for section in checkpoint.sections) > 1
    has_counts = bool(folded) or any(line.tensors > 1 for line in lines)
    columns = [_KEY, Column("dtype", "dtype"), Column("shape", "shape"), _SIZE]
    if has_counts:
        columns.insert(0, _TENSORS)
    if has_sections:
        columns.insert(0, Column("section"))
    rows: list[Row] = []
    for line in (*lines, *folded):
        row = [line.key, line.dtype, line.shape, human_bytes(line.nbytes)]
        if has_counts:
            row.insert(0, number(line.tensors))
        if has_sections:
            row.insert(0, line.section)
        rows.append(tuple(row))
    return Table("Tensors", tuple(columns), tuple(rows), is_listed=True)


class _Line(NamedTuple):
    """A line of the table of tensors; `nbytes` of all its tensors together."""

    section: str
    tensors: int
    key: Inline
    dtype: str
    shape: str
    nbytes: int


def _lines(section: Section, all: bool) -> list[_Line]:
    """Return a line for each group of equal tensors, or with `all` for each tensor."""
    items = []
    for entry in section.all_tensors():
        items.append((entry.key, _Likeness(entry.dtype, entry.shape, entry.layout, entry.nbytes)))
    groups = collapse(items)
    if all:
        groups = (KeyPattern(key, (key,), likeness) for key, likeness in items)
    lines = []
    for group in groups:
        dtype, shape, layout, nbytes = group.likeness
        geometry = shape_text(shape) if layout == "strided" else f"{shape_text(shape)} {layout}"
        count = len(group.keys)
        path = section.path or _ROOT
        lines.append(_Line(path, count, group.pattern, dtype, geometry, nbytes * count))
    return lines


def _folded(section: Section) -> _Line:
    """Return one line for a section with many tensors that is not the model."""
    what = "optimizer state" if section.kind == "optimizer" else "other entries"
    tensors = section.all_tensors()
    dtypes = ", ".join(sorted({entry.dtype for entry in tensors}))
    key = Cell(f"{what} (--all)", "dim")
    return _Line(section.path or _ROOT, len(tensors), key, dtypes, "", section.nbytes)


def _statistics(inspection: Inspection) -> Table:
    """Return a line for each dense tensor whose values were read."""
    titles = ("min", "max", "mean", "zeros", "NaN", "inf")
    columns = (_KEY, *(Column(title, "number") for title in titles), Column("sha256", "dim"))
    rows: list[Row] = []
    for tensor in inspection.tensors() if inspection.statistics else ():
        stats = tensor.stats
        if stats is not None:
            values = map(_value, (stats.minimum, stats.maximum, stats.mean))
            odd = map(_odd, (stats.nan, stats.inf))
            zeros = "" if stats.zeros is None else number(stats.zeros)
            rows.append((tensor.name, *values, zeros, *odd, stats.sha256[:_DIGITS]))
    return Table("Values", columns, tuple(rows))


def _value(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _odd(count: int | None) -> Cell:
    return Cell("" if count is None else number(count), "bad" if count else "number")


def _flat_parameters(checkpoint: Checkpoint) -> Table:
    rows: list[Row] = []
    for section in checkpoint.sections:
        for flat in flat_params(section):
            unit = Cell(flat.unit or _ROOT, "key")
            rows.append((dotted(section.path, flat.key), unit, number(flat.numel)))
    columns = (_KEY, Column("module"), Column("elements", "number"))
    return Table("Flat parameters (all parameters of a module, end to end)", columns, tuple(rows))


def _adapters(inspection: Inspection, all: bool) -> Table:
    rows: list[Row] = []
    for path, adapter in inspection.adapters.items():
        modules = ", ".join(patterns(adapter.modules))
        base = "without its base model" if adapter.alone else "with its base model"
        kinds = f"{' and '.join(adapter.kinds)}, {base}"
        rows.append((path or _ROOT, kinds, number(len(adapter.modules)), _cut(modules, all)))
    modules_columns = (Column("modules", "number"), Column("adapted modules", "key"))
    return Table("Adapters", (_SECTION, Column("adapter"), *modules_columns), tuple(rows))


def _optimizer_params(inspection: Inspection) -> Table:
    """Return a line for each parameter that is a number in the keys and has a name in its param
    group.
    """
    rows: list[Row] = []
    for path, state in inspection.optimizers.items():
        names = names_in_file(state)
        for index, group in enumerate(state.groups):
            ids = (param for param in group.params if isinstance(param, int) and param in names)
            rows += [(path or _ROOT, str(index), str(param), names[param]) for param in ids]
    columns = (
        _SECTION,
        Column("param group", "number"),
        Column("id", "number"),
        Column("parameter", "key"),
    )
    return Table("Optimizer parameters, with their names in the file", columns, tuple(rows))


def _imports(checkpoint: Checkpoint) -> Table:
    """Return a line for each import with its place and its calls."""
    file = split(checkpoint.source)[0]
    has_others = any(imported.file != file for imported in checkpoint.imports)
    rows: list[Row] = []
    for imported in checkpoint.imports:
        verdict = Cell(imported.verdict, _VERDICTS[imported.verdict])
        place = imported.place
        if has_others and imported.member:
            place = f"{imported.file}: {place}"
        calls = list(imported.calls) if imported.verdict != KNOWN else []
        if calls and imported.called > len(calls):
            calls.append(f"{number(imported.called - len(calls))} more")
        rows.append((imported.name, verdict, place, "; ".join(calls)))
    columns = (Column("name", "key"), Column("verdict"), Column("where"), Column("called"))
    return Table("Pickle imports (never executed)", columns, tuple(rows))


@dataclass(slots=True)
class _Module:
    """The tensors below a module; a storage is counted once, however many names it has."""

    tensors: int = 0
    nbytes: int = 0
    dtypes: dict[str, None] = field(default_factory=dict)
    below: dict[str, _Module] = field(default_factory=dict)

    def add(self, path: list[str], dtype: str, nbytes: int) -> None:
        """Count a tensor here, and in every module on its path."""
        self.tensors += 1
        self.nbytes += nbytes
        self.dtypes[dtype] = None
        if path:
            self.below.setdefault(path[0], _Module()).add(path[1:], dtype, nbytes)

    @property
    def likeness(self) -> tuple[object, ...]:
        """Equal for modules that are alike, down to the last tensor."""
        below = tuple((name, module.likeness) for name, module in self.below.items())
        return self.tensors, self.nbytes, tuple(self.dtypes), below


def tree(checkpoint: Checkpoint, depth: int, by_bytes: bool) -> Table:
    """Return a row for each module down to `depth`, repeated layers on one line; the bar is its
    share of all bytes.
    """
    roots: list[tuple[str, _Module]] = []
    for section in checkpoint.sections:
        root, seen = _Module(), set[object]()
        for entry in section.all_tensors():
            nbytes = 0 if entry.identity in seen else entry.nbytes
            seen.add(entry.identity)
            root.add(entry.key.split(".")[:-1][:_DEEPEST], entry.dtype, nbytes)
        if root.tensors:
            roots.append((section.path or _ROOT, root))
    if by_bytes:
        roots.sort(key=lambda root: -root[1].nbytes)
    total = sum(root.nbytes for _, root in roots)
    rows: list[Row] = []

    def add(name: str, count: int, module: _Module, level: int) -> None:
        nbytes = module.nbytes * count
        share = nbytes / total if total else 0.0
        bar = Cell(f"{share:>6.1%} {'#' * max(round(share * _BAR), 1 if nbytes else 0)}", "dim")
        tensors, dtypes = number(module.tensors * count), ", ".join(module.dtypes)
        rows.append(("  " * level + name, tensors, dtypes, human_bytes(nbytes), bar))
        if level == depth:
            return
        groups = list(collapse((below, child.likeness) for below, child in module.below.items()))
        if by_bytes:
            groups.sort(key=lambda group: -len(group.keys) * module.below[group.keys[0]].nbytes)
        for group in groups:
            add(group.pattern, count * len(group.keys), module.below[group.keys[0]], level + 1)

    for path, root in roots:
        add(path, 1, root, 0)
    columns = (
        Column("module", "key"),
        _TENSORS,
        Column("dtypes", "dtype"),
        _SIZE,
        Column("share of all"),
    )
    return Table("Modules", columns, tuple(rows))
