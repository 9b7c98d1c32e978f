"""The document of an inspection."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field, replace
from functools import partial
from itertools import groupby
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from ckpttool.core.checkpoint import Checkpoint, Section, TensorEntry
from ckpttool.core.dtypes import itemsize
from ckpttool.core.pickle_imports import DANGEROUS, KNOWN, UNKNOWN
from ckpttool.core.text import dotted, human_bytes, listed, number, plural, shape_text, some
from ckpttool.core.values import dataclass
from ckpttool.formats.registry import format_of
from ckpttool.inspection.inspect import Inspection, names_in_file
from ckpttool.naming.flat import flat_params
from ckpttool.operands.checkpoint import split
from ckpttool.report.collapse import Group, collapse
from ckpttool.report.document import (
    Block,
    Cell,
    Column,
    Document,
    Facts,
    Finding,
    Listing,
    Named,
    Note,
    Role,
    Row,
    Table,
    noted,
    shortened,
)

if TYPE_CHECKING:
    from ckpttool.diffing.result import Outline

_ROWS = 40
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
    dangerous = any(one.verdict == DANGEROUS for one in checkpoint.imports)
    extras = [
        dotted(section.path, extra.key)
        for section in checkpoint.sections
        for extra in section.extras
    ]
    second_names: tuple[Row, ...] = tuple(
        (dotted(path, key), Cell(dotted(path, first), "key"))
        for path, aliases in inspection.aliases.items()
        for key, first in aliases.items()
    )
    others = (*extras, *checkpoint.others)
    metadata = tuple((key, _cut(value, all)) for key, value in checkpoint.metadata.items())
    tables = (
        *([_imports(checkpoint)] if dangerous else []),
        shortened(_sections(inspection), limit),
        _dtypes(checkpoint),
        shortened(_tensors(checkpoint, all, by_bytes), limit)
        if depth is None
        else tree(checkpoint, depth, by_bytes),
        shortened(_statistics(inspection), limit),
        shortened(_flat_parameters(checkpoint), limit),
        _adapters(inspection, all),
        *(
            [shortened(_optimizer_params(inspection), limit)]
            if all or not checkpoint.state_dicts
            else []
        ),
        shortened(
            Table(
                "Aliases (second names of a tensor)", (_KEY, Column("same tensor as")), second_names
            ),
            limit,
        ),
        *(
            [
                Table(
                    "Non-tensor entries (copied unchanged)",
                    (_KEY,),
                    tuple((key,) for key in others),
                )
            ]
            if all
            else []
        ),
        *([] if dangerous else [shortened(_imports(checkpoint), limit)]),
        shortened(Table("Metadata", (_KEY, Column("value")), metadata), limit),
    )
    folded: list[Block] = []
    if not all and others:
        names = [group.pattern for group in collapse((key, None) for key in extras)]
        names += dict.fromkeys(key.split(".")[0] for key in checkpoint.others)
        count = plural(len(others), "non-tensor entry")
        folded = [Note(f"{count}, copied unchanged (--all lists them): {some(names, 8)}")]
    kinds = tuple(("kind", kind.sentence(checkpoint.source)) for kind in checkpoint.kinds)
    lead = (Facts(kinds, is_short=True),) if kinds else ()
    blocks = (*(table for table in tables if table.rows), *folded, *noted(inspection.notes))
    listing = Listing((checkpoint.source,), {"tensor": "plain"}, partial(_findings, inspection))
    title = f"inspect {checkpoint.source}"
    return Document(title, _contents(inspection), True, blocks, listing, lead)


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
    objects = len(checkpoint.others) + sum(len(one.extras) for one in checkpoint.sections)
    if objects:
        parts.append(plural(objects, "non-tensor entry"))
    title = format_of(checkpoint).title
    size = human_bytes(checkpoint.nbytes)
    return f"{checkpoint.source} holds {listed(parts) or 'nothing'}: {title}, {size}"


def _findings(inspection: Inspection) -> Iterator[Finding]:
    """Yield every tensor, below the path of its section."""
    for one in inspection.tensors():
        why = "" if one.alias_of is None else f"second name of {one.alias_of}"
        yield Finding(
            "tensor", (replace(outlined(one.entry.key, one.entry), key=one.name),), why=why
        )


def outlined(key: str, outline: Outline | None) -> Named:
    """Return the key with what is known about its tensor."""
    if outline is None:
        return Named(key)
    if isinstance(outline, TensorEntry):
        dtype = (
            outline.dtype if outline.layout == "strided" else (f"{outline.dtype} {outline.layout}")
        )
        return Named(key, dtype, shape_text(outline.shape), outline.nbytes)
    nbytes = None if outline.shape is None else prod(outline.shape) * itemsize(outline.dtype)
    return Named(key, outline.dtype, shape_text(outline.shape), nbytes)


def _cut(text: str, all: bool) -> str:
    more = len(text) - _VALUE_WIDTH
    return (
        text
        if all or more <= 0
        else (f"{text[:_VALUE_WIDTH]} ... {plural(more, 'more character')} (--all)")
    )


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
    entries = [entry for section in checkpoint.sections for entry in section.all_tensors()]
    entries.sort(key=lambda entry: entry.dtype)
    rows: list[Row] = []
    for dtype, group in groupby(entries, key=lambda entry: entry.dtype):
        same = list(group)
        elements, size = sum(entry.numel for entry in same), sum(entry.nbytes for entry in same)
        rows.append((dtype, number(len(same)), number(elements), human_bytes(size)))
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
    groups: list[tuple[Section, Group[str, _Likeness], int]] = []
    folded: list[Section] = []
    has_model = any(section.kind == "state_dict" for section in checkpoint.sections)
    for section in checkpoint.sections:
        items = [
            (e.key, _Likeness(e.dtype, e.shape, e.layout, e.nbytes)) for e in section.all_tensors()
        ]
        own = [Group(key, (key,), like) for key, like in items] if all else [*collapse(items)]
        if has_model and section.kind != "state_dict" and not all and len(own) > _FOLDED:
            folded.append(section)
            continue
        groups += [(section, group, group.likeness.nbytes * len(group.keys)) for group in own]
    if by_bytes:
        groups.sort(key=lambda one: -one[2])
    has_sections = len([section for section in checkpoint.sections if section.all_tensors()]) > 1
    has_counts = bool(folded) or any(len(group.keys) > 1 for _, group, _ in groups)
    rows: list[Row] = []
    for section, group, nbytes in groups:
        like = group.likeness
        shape = shape_text(like.shape) + ("" if like.layout == "strided" else f" {like.layout}")
        prefix = ((section.path or _ROOT,) if has_sections else ()) + (
            (number(len(group.keys)),) if has_counts else ()
        )
        rows.append((*prefix, group.pattern, like.dtype, shape, human_bytes(nbytes)))
    for section in folded:
        count, dtypes = (
            number(len(section.all_tensors())),
            ", ".join(sorted({e.dtype for e in section.all_tensors()})),
        )
        what = "optimizer state" if section.kind == "optimizer" else "other entries"
        rows.append(
            (
                section.path or _ROOT,
                count,
                Cell(f"{what} (--all)", "dim"),
                dtypes,
                "",
                human_bytes(section.nbytes),
            )
        )
    columns = [*([Column("section")] if has_sections else []), *([_TENSORS] if has_counts else [])]
    columns += [_KEY, Column("dtype", "dtype"), Column("shape", "shape"), _SIZE]
    return Table("Tensors", tuple(columns), tuple(rows), is_listed=True)


def _statistics(inspection: Inspection) -> Table:
    """Return a line for each dense tensor whose values were read."""
    titles = ("min", "max", "mean", "zeros", "NaN", "inf")
    columns = (_KEY, *(Column(title, "number") for title in titles), Column("sha256", "dim"))
    rows: list[Row] = []
    for one in inspection.tensors() if inspection.statistics else ():
        stats = one.stats
        if stats is None:
            continue
        odd = [
            Cell("" if n is None else number(n), "bad" if n else "number")
            for n in (stats.nan, stats.inf)
        ]
        values = [
            "" if value is None else f"{value:.4g}"
            for value in (stats.minimum, stats.maximum, stats.mean)
        ]
        zeros = "" if stats.zeros is None else number(stats.zeros)
        rows.append((one.name, *values, zeros, *odd, stats.sha256[:_DIGITS]))
    return Table("Values", columns, tuple(rows))


def _flat_parameters(checkpoint: Checkpoint) -> Table:
    rows: list[Row] = [
        (dotted(section.path, flat.key), Cell(flat.unit or _ROOT, "key"), number(flat.numel))
        for section in checkpoint.sections
        for flat in flat_params(section)
    ]
    columns = (_KEY, Column("module"), Column("elements", "number"))
    return Table("Flat parameters (all parameters of a module, end to end)", columns, tuple(rows))


def _adapters(inspection: Inspection, all: bool) -> Table:
    rows: list[Row] = []
    for path, adapter in inspection.adapters.items():
        modules = ", ".join(
            group.pattern for group in collapse((module, None) for module in adapter.modules)
        )
        kinds = (
            f"{' and '.join(adapter.kinds)}, {'without' if adapter.alone else 'with'} its base"
            " model"
        )
        rows.append((path or _ROOT, kinds, number(len(adapter.modules)), _cut(modules, all)))
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
    imports = checkpoint.imports
    several = {one.file for one in imports} != {split(checkpoint.source)[0]}
    rows: list[Row] = []
    for one in imports:
        place = f"{one.file}: {one.place}" if several and one.member else one.place
        calls = list(one.calls) if one.verdict != KNOWN else []
        if calls and one.called > len(calls):
            calls.append(f"{number(one.called - len(calls))} more")
        rows.append((one.name, Cell(one.verdict, _VERDICTS[one.verdict]), place, "; ".join(calls)))
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
        roots.sort(key=lambda one: -one[1].nbytes)
    total = sum(root.nbytes for _, root in roots)
    rows: list[Row] = []

    def add(name: str, count: int, module: _Module, level: int) -> None:
        nbytes = module.nbytes * count
        share = nbytes / total if total else 0.0
        bar = Cell(f"{share:>6.1%} {'#' * max(round(share * _BAR), 1 if nbytes else 0)}", "dim")
        dtypes = ", ".join(module.dtypes)
        rows.append(
            ("  " * level + name, number(module.tensors * count), dtypes, human_bytes(nbytes), bar)
        )
        if level == depth:
            return
        groups = collapse((below, child.likeness) for below, child in module.below.items())
        children = [
            (group.pattern, len(group.keys), module.below[group.keys[0]]) for group in groups
        ]
        if by_bytes:
            children.sort(key=lambda one: -one[1] * one[2].nbytes)
        for pattern, many, child in children:
            add(pattern, count * many, child, level + 1)

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
