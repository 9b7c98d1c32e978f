"""Documents: what a command reports, independent of the format.

Texts are raw: renderers pass every one through `visible` before it leaves the program. Keep the
words around them ASCII, so that the plain rendering can be read on any terminal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from os.path import isabs, relpath
from typing import Literal, Union

from ckpttool.core.errors import Problem
from ckpttool.core.text import Info, Note, number, visible
from ckpttool.core.values import dataclass
from ckpttool.report.collapse import paired

Role = Literal["plain", "key", "number", "dtype", "shape", "ok", "bad", "warn", "dim", "title"]
Severity = Literal["error", "warning", "notice"]


@dataclass(frozen=True, slots=True)
class Cell:
    """A piece of text and its role, which renderers give a style. A page shows `bar` (0 to 1) as a
    bar next to the text.
    """

    text: str
    role: Role = "plain"
    bar: float | None = None


Inline = Union[str, Cell]
Row = tuple[Inline, ...]


@dataclass(frozen=True, slots=True)
class Facts:
    """Label and value pairs, one line each; not aligned if it `is_short`."""

    pairs: tuple[tuple[str, Inline], ...]
    is_short: bool = False


@dataclass(frozen=True, slots=True)
class Column:
    """`role` is the role of plain strings in the column; numbers are aligned right."""

    title: str
    role: Role = "plain"


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under columns. `footer` says what is not shown (``... 33 more (--all)``).

    If `is_listed`, the document's listing has its rows too.
    """

    title: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    footer: str = ""
    is_listed: bool = False

    @property
    def cells(self) -> list[list[Cell]]:
        """The rows; a plain string has the role of its column."""
        roles = [column.role for column in self.columns]
        return [list(map(cell, row, roles)) for row in self.rows]


@dataclass(frozen=True, slots=True)
class Paragraph:
    """One paragraph."""

    text: str
    severity: Severity = "notice"


@dataclass(frozen=True, slots=True)
class Problems:
    """All problems of one severity, each at its key."""

    problems: tuple[Problem, ...]
    severity: Severity = "error"


@dataclass(frozen=True, slots=True)
class Commands:
    """Shell commands that can be pasted."""

    title: str
    commands: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class KeyGroup:
    """Keys that have the heading in common. A row is the key on the left, on the right, and a
    detail, perhaps empty.

    If it `is_full`, no name is shortened.
    """

    heading: str
    rows: tuple[tuple[str, str, str], ...]
    footer: str = ""
    role: Role = "plain"
    is_full: bool = False


@dataclass(frozen=True, slots=True)
class Keys:
    """Groups of keys. If it `is_listed`, the document's listing has its rows too."""

    title: str
    groups: tuple[KeyGroup, ...]
    is_listed: bool = False


Block = Union[Facts, Table, Keys, Paragraph, Problems, Commands]


@dataclass(frozen=True, slots=True)
class Named:
    """A key with the dtype, shape and bytes of its tensor, each empty or None if it is not
    known.
    """

    key: str
    dtype: str = ""
    shape: str = ""
    nbytes: int | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """A finding about the keys of one tensor; `spread` as in `diffing.result.Entry`.

    `place` is the file and line of the hook that is the reason; `fails`: it is a reason for a
    failure.
    """

    status: str
    left: tuple[Named, ...]
    right: tuple[Named, ...] = ()
    why: str = ""
    detail: str = ""
    spread: tuple[tuple[int, int], ...] = ()
    place: tuple[str, int] | None = None
    fails: bool = False

    @property
    def keys(self) -> str:
        return ", ".join(tensor.key for tensor in self.left or self.right)

    @property
    def location(self) -> tuple[str, int] | None:
        """The place as a path that is relative to the working folder, and the line."""
        if self.place is None:
            return None
        file, line = self.place
        return visible(relpath(file) if isabs(file) else file), line


@dataclass(frozen=True, slots=True)
class Listing:
    """Every key, for a reader who searches. `sides` are the names of one side or two.

    `statuses` maps the status of findings to its role, in the order of the report; `quiet` ones are
    hidden at first.
    """

    sides: tuple[str, ...]
    statuses: Mapping[str, Role]
    findings: Callable[[], Iterable[Finding]]
    quiet: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Document:
    """A title, the answer in one line (`ok`: is it good news?), the blocks that support it, and
    every key.

    The blocks of `lead` are the next lines: the reason and what to do.
    """

    title: str
    verdict: str
    ok: bool
    blocks: tuple[Block, ...] = ()
    listing: Listing | None = None
    lead: tuple[Block, ...] = ()

    @property
    def all_blocks(self) -> tuple[Block, ...]:
        return (*self.lead, *self.blocks)

    @property
    def failing(self) -> Iterator[Finding]:
        """Every finding that is a reason for the failure, if the document reports one."""
        if self.ok or self.listing is None:
            return iter(())
        return (finding for finding in self.listing.findings() if finding.fails)


def kind_facts(sentences: Iterable[str]) -> Facts:
    """Return the sentences on the kinds of sections."""
    return Facts(tuple(("kind", sentence) for sentence in sentences), is_short=True)


def facts(*pairs: tuple[str, Inline]) -> Facts:
    """Return the pairs that have a value."""
    return Facts(tuple(pair for pair in pairs if cell(pair[1]).text))


def filled(blocks: Iterable[Block]) -> tuple[Block, ...]:
    """Return the blocks without empty tables, columns and lists."""
    kept: list[Block] = []
    for block in blocks:
        if isinstance(block, Table):
            block = _without_empty_columns(block)
        is_empty_table = isinstance(block, Table) and not block.rows
        is_empty_list = isinstance(block, Keys) and not block.groups
        if not is_empty_table and not is_empty_list:
            kept.append(block)
    return tuple(kept)


def _without_empty_columns(table: Table) -> Table:
    """Return the table without columns in which no row has a text."""
    full: set[int] = set()
    for row in table.cells:
        full.update(index for index, entry in enumerate(row) if entry.text)
    indices = sorted(full)
    columns = [table.columns[index] for index in indices]
    rows: list[Row] = []
    for inlines in table.rows:
        rows.append(tuple(inlines[index] for index in indices))
    return replace(table, columns=tuple(columns), rows=tuple(rows))


def noted(
    notes: Iterable[str], *, quiet: bool = False, names: tuple[str, str] = ("left", "right")
) -> Iterator[Paragraph]:
    """Yield a paragraph for each note: a warning, unless it is `Info`, or the document is
    `quiet`. `names` are the two sides of a diff.
    """
    for note in notes:
        is_notice = quiet or isinstance(note, Info)
        yield Paragraph(with_names(note, names), "notice" if is_notice else "warning")


def with_names(note: str, names: tuple[str, str]) -> str:
    """Return the note with these names for the two sides of a diff."""
    return note.named(*names) if isinstance(note, Note) else note


def warnings_apart(document: Document) -> tuple[Document, tuple[Paragraph | Problems, ...]]:
    """Return the document without its warnings, and the warnings."""
    warnings: list[Paragraph | Problems] = []
    others: list[Block] = []
    for block in document.blocks:
        if isinstance(block, (Paragraph, Problems)) and block.severity == "warning":
            warnings.append(block)
        else:
            others.append(block)
    return replace(document, blocks=tuple(others)), tuple(warnings)


def cell(inline: Inline, role: Role = "plain") -> Cell:
    """Return the cell, or a plain string as a cell of this role."""
    return inline if isinstance(inline, Cell) else Cell(inline, role)


def shortened(table: Table, limit: int | None, option: str = "--all") -> Table:
    """Return the table with at most `limit` rows, and a footer with the `option` that shows the
    others.
    """
    hidden = 0 if limit is None else len(table.rows) - limit
    if hidden <= 0:
        return table
    footer = f"... {number(hidden)} more ({option})"
    return replace(table, rows=table.rows[:limit], footer=footer)


# the keys of one tensor on the left, on the right, and a detail
Pairing = tuple[tuple[str, ...], tuple[str, ...], str]


def key_group(
    heading: str,
    pairs: Sequence[Pairing],
    most: int,
    hidden: str,
    role: Role = "plain",
    first: int | None = None,
) -> KeyGroup:
    """Return at most `most` rows for pairs of keys with their detail; the footer says how many
    pairs are `hidden`.

    The last row takes the place of a footer. Only the `first` pairs are collapsed, all without it.
    """
    groups = list(islice(paired(islice(pairs, first)), most + 1))
    more = len(pairs) - sum(count for _, _, count, _ in groups)
    if more and len(groups) > most:
        *groups, (_, _, count, _) = groups  # its line is for the footer
        more += count
    rows = [(left, right, detail) for left, right, _, detail in groups]
    footer = f"... {number(more)} {hidden}" if more else ""
    return KeyGroup(heading, tuple(rows), footer, role)
