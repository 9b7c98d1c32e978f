"""The text report on a terminal: the same blocks as the plain one, in colour, folded to the terminal's width."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from io import StringIO
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table as Grid
from rich.text import Text

from ckpttool.core.text import visible
from ckpttool.report.document import KINDS, Cell, Commands, Document, Facts, Note, Problems, Table, cell, cells

# What each role looks like, in the sixteen colours that the user's own theme sets.
STYLES: dict[str, str] = {
    "plain": "",
    "key": "cyan",
    "number": "",
    "dtype": "magenta",
    "shape": "",
    "ok": "green",
    "bad": "red",
    "warn": "yellow",
    "dim": "dim",
    "title": "bold",
    "command": "bold",
    "error": "bold red",
    "warning": "bold yellow",
    "notice": "",
}

_WIDEST = 4096  # columns that the cells which are never folded may ask for
_FOLD_AT = 32  # columns that a key keeps on the narrowest terminal


def render(document: Document, width: int, color: bool) -> str:
    """The document for a terminal of `width` columns. Keys and commands are folded, never cut."""
    out = StringIO()
    console = Console(
        file=out,
        width=width,
        force_terminal=color,
        color_system="standard" if color else None,
        highlight=False,
        markup=False,
        emoji=False,
        legacy_windows=False,
    )
    _print(console, _text(document.title, "title"))
    _print(console, _text(document.verdict, "ok" if document.ok else "bad"))
    for block in document.blocks:
        console.print()
        for renderable in _BLOCKS[type(block)](block):
            _print(console, renderable)
    return "\n".join(line.rstrip() for line in out.getvalue().split("\n"))


def _print(console: Console, renderable: RenderableType) -> None:
    """Prints without cutting anything off: what is wider than the terminal, the terminal itself wraps.

    So a command that is copied from the terminal is still one line.
    """
    if isinstance(renderable, Grid):
        least = console.measure(renderable, options=console.options.update(max_width=_WIDEST)).minimum
        renderable.width = least if least > console.width else None
        console.print(renderable, crop=False)
    else:
        console.print(renderable, soft_wrap=True)


def _text(text: str, role: str) -> Text:
    return Text(visible(text), style=STYLES[role])


def _cell(entry: Cell) -> Text:
    return _text(entry.text, entry.role)


def _grid() -> Grid:
    return Grid(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", show_edge=False)


def _facts(facts: Facts) -> list[RenderableType]:
    grid = _grid()
    grid.show_header = False
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for label, value in facts.pairs:
        grid.add_row(_text(label, "dim"), _cell(cell(value)))
    return [grid]


def _table(table: Table) -> list[RenderableType]:
    grid, rows = _grid(), cells(table)
    for index, column in enumerate(table.columns):
        fold = column.role in ("key", "plain")
        longest = max(map(len, [column.title, *(row[index].text for row in rows)]))
        grid.add_column(
            _text(column.title, "title"),
            justify="right" if column.role == "number" else "left",
            no_wrap=not fold,
            min_width=min(longest, _FOLD_AT if fold else _WIDEST),
            overflow="fold",
        )
    for row in rows:
        grid.add_row(*map(_cell, row))
    footer: list[RenderableType] = [_text(table.footer, "dim")] if table.footer else []
    return [_text(table.title, "title"), grid, *footer]


def _note(note: Note) -> list[RenderableType]:
    if note.severity == "notice":
        return [_text(note.text, "plain")]
    return [Text.assemble(_text(f"{note.severity}: ", note.severity), _text(note.text, "plain"))]


def _problems(block: Problems) -> list[RenderableType]:
    return [
        Text.assemble(
            _text(f"{block.severity}: ", block.severity), _text(f"{p.problem} @ ", "plain"), _text(p.key, "key")
        )
        for p in block.problems
    ]


def _commands(block: Commands) -> list[RenderableType]:
    return [_text(block.title, "plain"), *(_text(f"  {command}", "command") for command in block.commands)]


_BLOCKS: Mapping[type, Callable[[Any], list[RenderableType]]] = dict(
    zip(KINDS, (_facts, _table, _note, _problems, _commands))
)
