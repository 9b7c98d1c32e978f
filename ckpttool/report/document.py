"""Documents: what a command has to say, before anyone has chosen a format. Values in, no format known here.

Texts are raw: renderers pass every one of them through `words.visible` before it leaves the program. Keep the words
around them ASCII, so that the plain rendering can be read on any terminal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Literal, Union, get_args

from ckpttool.core.errors import Problem
from ckpttool.core.text import Info
from ckpttool.core.values import dataclass

Role = Literal["plain", "key", "number", "dtype", "shape", "ok", "bad", "warn", "dim"]
Severity = Literal["error", "warning", "notice"]


@dataclass(frozen=True, slots=True)
class Cell:
    """A piece of text and what it is; a renderer's own table says what that looks like."""

    text: str
    role: Role = "plain"


Inline = Union[str, Cell]


@dataclass(frozen=True, slots=True)
class Facts:
    """Label and value pairs, one line each."""

    pairs: tuple[tuple[str, Inline], ...]


@dataclass(frozen=True, slots=True)
class Column:
    """`role` is that of the column's bare strings; columns of numbers are set flush right."""

    title: str
    role: Role = "plain"


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under columns. `footer` says what is not shown (``... 33 more (--all)``).

    What the rows of an `is_listed` one say, the document's listing says too.
    """

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Inline, ...], ...]
    footer: str = ""
    is_listed: bool = False


@dataclass(frozen=True, slots=True)
class Note:
    """One paragraph."""

    text: str
    severity: Severity = "notice"


@dataclass(frozen=True, slots=True)
class Problems:
    """Everything of one severity that is wrong, each at its key."""

    problems: tuple[Problem, ...]
    severity: Severity = "error"


@dataclass(frozen=True, slots=True)
class Commands:
    """Shell commands that can be pasted: what mends it. The last block of a document."""

    title: str
    commands: tuple[str, ...]


Block = Union[Facts, Table, Note, Problems, Commands]
KINDS = get_args(Block)  # in the order in which renderers list what they do with each


def facts(*pairs: tuple[str, Inline]) -> Facts:
    """The pairs, but for those of which nothing is known."""
    return Facts(tuple(pair for pair in pairs if cell(pair[1]).text))


def filled(blocks: Iterable[Block]) -> tuple[Block, ...]:
    """The blocks, but for tables that have no rows."""
    return tuple(block for block in blocks if not (isinstance(block, Table) and not block.rows))


@dataclass(frozen=True, slots=True)
class Named:
    """A key, and what is told of its tensor: dtype, shape and bytes, each empty or None where it is not known."""

    key: str
    dtype: str = ""
    shape: str = ""
    nbytes: int | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """What is found of the keys of one tensor, on one side or both; `spread` as in `queries.diff.result.Entry`.

    `place` are file and line of the hook that is the reason; `fails` is whether it is a reason of bad news.
    """

    status: str
    left: tuple[Named, ...]
    right: tuple[Named, ...] = ()
    why: str = ""
    detail: str = ""
    spread: tuple[tuple[int, int], ...] = ()
    place: tuple[str, int] | None = None
    fails: bool = False


@dataclass(frozen=True, slots=True)
class Listing:
    """Every key there is, for a reader who searches. `sides` are called so: one, or left and right.

    `statuses` are those of the findings with their roles, in the order in which they are shown; `quiet` ones are
    hidden at first. The findings are made where they are shown.
    """

    sides: tuple[str, ...]
    statuses: Mapping[str, Role]
    findings: Callable[[], Iterable[Finding]]
    quiet: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Document:
    """A title, the answer in one line (`ok`: is it good news?), the blocks that support it, and every key."""

    title: str
    verdict: str
    ok: bool
    blocks: tuple[Block, ...] = ()
    listing: Listing | None = None


def noted(notes: Iterable[str], *, quiet: bool = False) -> Iterator[Note]:
    """Yield a paragraph for each note: a warning, unless it is `Info`, or the document is `quiet`."""
    return (Note(note, "notice" if quiet or isinstance(note, Info) else "warning") for note in notes)


def warnings_apart(document: Document) -> tuple[Document, tuple[Note | Problems, ...]]:
    """The document without its warnings, and these."""
    warnings = tuple(b for b in document.blocks if isinstance(b, (Note, Problems)) and b.severity == "warning")
    return replace(document, blocks=tuple(block for block in document.blocks if block not in warnings)), warnings


def cell(inline: Inline, role: Role = "plain") -> Cell:
    """The cell itself, or a bare string as a cell of `role`."""
    return inline if isinstance(inline, Cell) else Cell(inline, role)


def cells(table: Table) -> list[list[Cell]]:
    """The rows of the table, every bare string in the role of its column."""
    return [[cell(inline, column.role) for column, inline in zip(table.columns, row)] for row in table.rows]


def shortened(table: Table, limit: int | None, option: str = "--all") -> Table:
    """The table with at most `limit` rows and a footer that says how many more `option` shows; None leaves out none."""
    hidden = 0 if limit is None else len(table.rows) - limit
    if hidden <= 0:
        return table
    return replace(table, rows=table.rows[:limit], footer=f"... {hidden:,} more ({option})")
