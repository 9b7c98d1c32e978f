"""A checkpoint's modules as a tree: how many tensors, of which dtypes, and how many bytes lie under each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field

from ckpttool.checkpoint import Checkpoint, Section
from ckpttool.report.collapse import collapse
from ckpttool.report.document import Cell, Column, Inline, Table
from ckpttool.values import dataclass
from ckpttool.words import human_bytes, number

_BAR = 20  # characters of the longest bar
_INDENT = "  "
_DEEPEST = 24  # levels that are told apart; models have about ten
_ROOT = "(root)"


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
