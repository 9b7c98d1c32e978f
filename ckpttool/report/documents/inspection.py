"""The document of an inspection."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import field, replace
from functools import partial
from math import prod
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from ckpttool.core.checkpoint import Checkpoint, Described, Section, TensorEntry
from ckpttool.core.dtypes import itemsize
from ckpttool.core.pickle_imports import DANGEROUS, KNOWN, UNKNOWN, Import, dangerous
from ckpttool.core.strides import Shape
from ckpttool.core.text import dotted, human_bytes, listed, number, plural, shape_text
from ckpttool.core.values import dataclass
from ckpttool.formats.registry import format_of
from ckpttool.inspection.result import Inspection, names_in_file
from ckpttool.naming.flat import flat_params
from ckpttool.operands.checkpoint import split
from ckpttool.report.collapse import KeyPattern, collapse, patterns
from ckpttool.report.document import (
    Block,
    Cell,
    Column,
    Document,
    Finding,
    Inline,
    Listing,
    Named,
    Role,
    Row,
    Table,
    kind_facts,
    noted,
    shortened,
)
from ckpttool.report.documents.answer import RUNS_CODE

if TYPE_CHECKING:
    from ckpttool.diffing.result import Outline

_ROWS = 40
_FEW_ROWS = 8  # of entries that are not tensors
_DIGITS = 12  # of a hash; JSON has all of them
_VALUE_WIDTH = 200  # characters of a long text that are shown
_ROOT = "(root)"
_ORDER = ("state_dict", "other", "optimizer")
_FEW_LINES = 3  # lines of a section besides the model; more are one line
_BAR = 20  # characters of the longest bar
_DEEPEST = 24  # levels of modules that are distinguished; models have about ten
_VERDICTS: dict[str, Role] = {DANGEROUS: "bad", UNKNOWN: "warn", KNOWN: "ok"}
_KEY, _TENSORS, _SIZE = Column("key", "key"), Column("tensors", "number"), Column("size", "number")
_SECTION = Column("section", "key")

L = TypeVar("L", bound=Hashable)


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
    if dangerous(checkpoint.imports):
        tables.insert(0, _imports(checkpoint))
    else:
        tables.append(shortened(_imports(checkpoint), limit))
    tables.append(shortened(_metadata(checkpoint, all), limit))
    blocks: list[Block] = [table for table in tables if table.rows]
    blocks += noted(inspection.notes)
    lead: list[Block] = []
    if checkpoint.kinds:
        lead.append(kind_facts(kind.sentence(checkpoint.source) for kind in checkpoint.kinds))
    listing = Listing((checkpoint.source,), {"tensor": "plain"}, partial(_findings, inspection))
    title = f"inspect {checkpoint.source}"
    sentence = _sentence(inspection)
    if dangerous(checkpoint.imports):
        sentence += RUNS_CODE
    return Document(
        title,
        sentence,
        ok=True,
        blocks=tuple(blocks),
        listing=listing,
        lead=tuple(lead),
    )


def _metadata(checkpoint: Checkpoint, all: bool) -> Table:
    rows: list[Row] = []
    for key, value in checkpoint.metadata.items():
        rows.append((key, _cut(value, all)))
    return Table("Metadata", (_KEY, Column("value")), tuple(rows))


def _extras(checkpoint: Checkpoint, all: bool) -> Table:
    """Return a line for each entry that is not a tensor, with its type and value; equal ones of
    repeated layers are one.
    """
    items: list[tuple[str, Described]] = []
    for section in checkpoint.sections:
        for extra in section.extras:
            items.append((dotted(section.path, extra.key), extra.described()))
    objects = {extra.key: extra.described() for extra in checkpoint.objects}
    for path in checkpoint.others:
        items.append((path, objects.get(path, Described())))
    rows: list[Row] = []
    for group in _groups(items, all):
        kind, value = group.likeness
        rows.append((group.pattern, kind, _cut(value, all)))
    columns = (_KEY, Column("type"), Column("value"))
    return Table("Non-tensor entries (copied unchanged)", columns, tuple(rows))


def _groups(items: Iterable[tuple[str, L]], all: bool) -> Iterable[KeyPattern[str, L]]:
    """Return the keys, equal ones of repeated layers as one pattern; with `all` each key alone."""
    if not all:
        return collapse(items)
    return [KeyPattern(key, (key,), likeness) for key, likeness in items]


def _aliases(inspection: Inspection) -> Table:
    rows: list[Row] = []
    for path, aliases in inspection.aliases.items():
        for key, first in aliases.items():
            rows.append((dotted(path, key), Cell(dotted(path, first), "key")))
    columns = (_KEY, Column("same tensor as"))
    return Table("Aliases (second names of a tensor)", columns, tuple(rows))


def _sentence(inspection: Inspection) -> str:
    """Return ``train.pt holds a state dict of 92 tensors and an optimizer: torch.save, 3 MiB``."""
    checkpoint = inspection.checkpoint
    parts = []
    state_dicts = checkpoint.state_dicts
    if state_dicts:
        tensors = sum(len(section.all_tensors()) for section in state_dicts)
        count = _counted(len(state_dicts), "a state dict")
        parts.append(f"{count} of {plural(tensors, 'tensor')}")
    if checkpoint.optimizers:
        parts.append(_counted(len(checkpoint.optimizers), "an optimizer"))
    loose = 0
    objects = len(checkpoint.others)
    for section in checkpoint.sections:
        objects += len(section.extras)
        if section.kind == "other":
            loose += len(section.all_tensors())
    if loose:
        parts.append(plural(loose, "other tensor" if parts else "tensor"))
    if objects:
        parts.append(plural(objects, "non-tensor entry"))
    contents = listed(parts) or "nothing"
    title = format_of(checkpoint).title
    size = human_bytes(checkpoint.nbytes)
    return f"{checkpoint.source} holds {contents}: {title}, {size}"


def _counted(count: int, single: str) -> str:
    """Return ``an optimizer`` for one, ``2 optimizers`` for two."""
    _, noun = single.split(" ", 1)
    return single if count == 1 else plural(count, noun)


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
    dtype, shape = outline.dtype, shape_text(outline.shape)
    if isinstance(outline, TensorEntry):
        if outline.layout != "strided":
            dtype += f" {outline.layout}"
        return Named(key, dtype, shape, outline.nbytes)
    if outline.shape is None:
        return Named(key, dtype, shape)
    return Named(key, dtype, shape, prod(outline.shape) * itemsize(dtype))


def _cut(text: str, all: bool) -> str:
    more = len(text) - _VALUE_WIDTH
    if all or more <= 0:
        return text
    return f"{text[:_VALUE_WIDTH]} ... {plural(more, 'more character')} (--all)"


def _sections(inspection: Inspection) -> Table:
    rows: list[Row] = []
    for section in inspection.checkpoint.sections:
        path = section.path or _ROOT
        tensors = number(len(section.all_tensors()))
        wrappers = Cell(", ".join(inspection.wrappers[section.path]), "warn")
        rows.append((path, section.kind, tensors, human_bytes(section.nbytes), wrappers))
    columns = (_SECTION, Column("kind"), _TENSORS, _SIZE, Column("wrappers", "warn"))
    return Table("Sections", columns, tuple(rows))


def _dtypes(checkpoint: Checkpoint) -> Table:
    tensors, elements, sizes = Counter[str](), Counter[str](), Counter[str]()
    for section in checkpoint.sections:
        for entry in section.all_tensors():
            tensors[entry.dtype] += 1
            elements[entry.dtype] += entry.numel
            sizes[entry.dtype] += entry.nbytes
    rows: list[Row] = []
    for dtype in sorted(tensors):
        count, size = number(tensors[dtype]), human_bytes(sizes[dtype])
        rows.append((dtype, count, number(elements[dtype]), size))
    columns = (Column("dtype", "dtype"), _TENSORS, Column("elements", "number"), _SIZE)
    return Table("Dtypes", columns, tuple(rows))


class _CommonFacts(NamedTuple):
    """The properties that all tensors on one line have; `nbytes` is the size of one tensor."""

    dtype: str
    shape: Shape
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
        if all or is_model or not checkpoint.state_dicts or len(of_section) <= _FEW_LINES:
            lines += of_section
        else:
            folded.append(_as_one_line(section))
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
        likeness = _CommonFacts(entry.dtype, entry.shape, entry.layout, entry.nbytes)
        items.append((entry.key, likeness))
    path = section.path or _ROOT
    lines = []
    for group in _groups(items, all):
        dtype, shape, layout, nbytes = group.likeness
        geometry = shape_text(shape)
        if layout != "strided":
            geometry += f" {layout}"
        count = len(group.keys)
        lines.append(_Line(path, count, group.pattern, dtype, geometry, nbytes * count))
    return lines


def _as_one_line(section: Section) -> _Line:
    """Return one line for a section with many tensors that is not the model."""
    what = "optimizer state" if section.kind == "optimizer" else "other entries"
    tensors = section.all_tensors()
    dtypes = ", ".join(sorted({entry.dtype for entry in tensors}))
    key = Cell(f"{what} (--all)", "dim")
    return _Line(section.path or _ROOT, len(tensors), key, dtypes, "", section.nbytes)


def _statistics(inspection: Inspection) -> Table:
    """Return a line for each dense tensor whose values were read."""
    rows: list[Row] = []
    for tensor in inspection.tensors() if inspection.statistics else ():
        stats = tensor.stats
        if stats is not None:
            values = map(_value, (stats.minimum, stats.maximum, stats.mean))
            zeros = "" if stats.zeros is None else number(stats.zeros)
            odd = map(_odd, (stats.nan, stats.inf))
            digest = stats.sha256[:_DIGITS]
            rows.append((tensor.name, *values, zeros, *odd, digest))
    titles = ("min", "max", "mean", "zeros", "NaN", "inf")
    numbers = [Column(title, "number") for title in titles]
    return Table("Values", (_KEY, *numbers, Column("sha256", "dim")), tuple(rows))


def _value(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _odd(count: int | None) -> Cell:
    if not count:
        return Cell("" if count is None else "0", "number")
    return Cell(number(count), "bad")


def _flat_parameters(checkpoint: Checkpoint) -> Table:
    rows: list[Row] = []
    for section in checkpoint.sections:
        for flat in flat_params(section):
            unit = Cell(flat.unit or _ROOT, "key")
            rows.append((dotted(section.path, flat.key), unit, number(flat.numel)))
    title = "Flat parameters (all parameters of a module, end to end)"
    columns = (_KEY, Column("module"), Column("elements", "number"))
    return Table(title, columns, tuple(rows))


def _adapters(inspection: Inspection, all: bool) -> Table:
    rows: list[Row] = []
    for path, adapter in inspection.adapters.items():
        kinds = " and ".join(adapter.kinds)
        base = "without" if adapter.alone else "with"
        count = number(len(adapter.modules))
        modules = _cut(", ".join(patterns(adapter.modules)), all)
        rows.append((path or _ROOT, f"{kinds}, {base} its base model", count, modules))
    columns = (
        _SECTION,
        Column("adapter"),
        Column("modules", "number"),
        Column("adapted modules", "key"),
    )
    return Table("Adapters", columns, tuple(rows))


def _optimizer_params(inspection: Inspection) -> Table:
    """Return a line for each parameter that is a number in the keys and has a name in its param
    group.
    """
    rows: list[Row] = []
    for path, state in inspection.optimizers.items():
        names = names_in_file(state)
        for index, group in enumerate(state.groups):
            for param in group.params:
                if isinstance(param, int) and param in names:
                    rows.append((path or _ROOT, str(index), str(param), names[param]))
    columns = (
        _SECTION,
        Column("param group", "number"),
        Column("id", "number"),
        Column("parameter", "key"),
    )
    return Table("Optimizer parameters, with their names in the file", columns, tuple(rows))


def _imports(checkpoint: Checkpoint) -> Table:
    """Return a line for each import with its place and its calls."""
    file, _ = split(checkpoint.source)
    has_others = any(imported.file != file for imported in checkpoint.imports)
    rows: list[Row] = []
    for imported in checkpoint.imports:
        place = imported.place
        if has_others and imported.member:
            place = f"{imported.file}: {place}"
        verdict = Cell(imported.verdict, _VERDICTS[imported.verdict])
        rows.append((imported.name, verdict, place, _calls(imported)))
    columns = (Column("name", "key"), Column("verdict"), Column("where"), Column("called"))
    return Table("Pickle imports (never executed)", columns, tuple(rows))


def _calls(imported: Import) -> str:
    """Return the calls of an import that is not known to be harmless."""
    if imported.verdict == KNOWN:
        return ""
    calls = list(imported.calls)
    more = imported.called - len(calls)
    if calls and more > 0:
        calls.append(f"{number(more)} more")
    return "; ".join(calls)


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
        return self.tensors, self.nbytes, tuple(self.dtypes), self._likeness_below()

    def _likeness_below(self) -> tuple[tuple[str, object], ...]:
        return tuple((name, module.likeness) for name, module in self.below.items())

    def children(self) -> list[_ModuleGroup]:
        """Return the modules below, grouped if they are alike."""
        children = []
        for group in collapse(self._likeness_below()):
            first = self.below[group.keys[0]]
            children.append(_ModuleGroup(group.pattern, len(group.keys), first))
        return children


class _ModuleGroup(NamedTuple):
    """Modules that are alike: the pattern of their names, their number, and the first of them."""

    pattern: str
    repeats: int
    module: _Module

    @property
    def nbytes(self) -> int:
        """The bytes of all modules of the group."""
        return self.repeats * self.module.nbytes


def tree(checkpoint: Checkpoint, depth: int, by_bytes: bool) -> Table:
    """Return a row for each module down to `depth`, repeated layers on one line; the bar is its
    share of all bytes.
    """
    roots: list[_ModuleGroup] = []
    for section in checkpoint.sections:
        root = _module_of(section)
        if root.tensors:
            roots.append(_ModuleGroup(section.path or _ROOT, 1, root))
    total = sum(root.nbytes for root in roots)
    rows: list[Row] = []

    def add(groups: list[_ModuleGroup], parents: int, level: int) -> None:
        if by_bytes:
            groups.sort(key=lambda group: -group.nbytes)
        for group in groups:
            module, count = group.module, parents * group.repeats
            nbytes = module.nbytes * count
            rows.append(
                (
                    "  " * level + group.pattern,
                    number(module.tensors * count),
                    ", ".join(module.dtypes),
                    human_bytes(nbytes),
                    _share(nbytes, total),
                )
            )
            if level < depth:
                add(module.children(), count, level + 1)

    add(roots, 1, 0)
    columns = (
        Column("module", "key"),
        _TENSORS,
        Column("dtypes", "dtype"),
        _SIZE,
        Column("share of all"),
    )
    return Table("Modules", columns, tuple(rows))


def _module_of(section: Section) -> _Module:
    """Return all modules of a section, as the one at the top."""
    root = _Module()
    seen: set[object] = set()
    for entry in section.all_tensors():
        nbytes = 0 if entry.identity in seen else entry.nbytes
        seen.add(entry.identity)
        path = entry.key.split(".")[:-1]
        root.add(path[:_DEEPEST], entry.dtype, nbytes)
    return root


def _share(nbytes: int, total: int) -> Cell:
    """Return the share in percent, and a bar; a module with any bytes has a bar."""
    share = nbytes / total if total else 0.0
    length = round(share * _BAR)
    if nbytes:
        length = max(length, 1)
    return Cell(f"{share:>6.1%} {'#' * length}", "dim")
