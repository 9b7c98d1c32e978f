"""The text report on a terminal: the same blocks as the plain one, in color, folded to the width of the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from io import StringIO

from rich.console import Console, RenderableType
from rich.table import Table as Grid
from rich.text import Text

from ckpttool.core.text import visible
from ckpttool.report.document import Block, Commands, Document, Facts, Note, Table, cell

# The style of each role, in the sixteen colors of the user's own theme.
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

_WIDEST = 4096  # columns for cells that are never folded
_FOLD_AT = 32  # columns that a key keeps on the narrowest terminal


def render(document: Document, width: int, color: bool) -> str:
    """Return the document for a terminal of `width` columns. Keys and commands are folded, never cut."""
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
        for renderable in _renderables(block):
            _print(console, renderable)
    return "\n".join(line.rstrip() for line in out.getvalue().split("\n"))


def _print(console: Console, renderable: RenderableType) -> None:
    """Print without cutting anything off: the terminal itself wraps what is too wide.

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


def _renderables(block: Block) -> Iterator[RenderableType]:
    if isinstance(block, Facts):
        grid = Grid(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_edge=False, show_header=False)
        grid.add_column(no_wrap=True)
        grid.add_column(overflow="fold")
        for label, value in block.pairs:
            entry = cell(value)
            grid.add_row(_text(label, "dim"), _text(entry.text, entry.role))
        yield grid
    elif isinstance(block, Table):
        yield _text(block.title, "title")
        yield _table(block)
        if block.footer:
            yield _text(block.footer, "dim")
    elif isinstance(block, Note):
        severity = [] if block.severity == "notice" else [_text(f"{block.severity}: ", block.severity)]
        yield Text.assemble(*severity, _text(block.text, "plain"))
    elif isinstance(block, Commands):
        yield _text(block.title, "plain")
        yield from (_text(f"  {command}", "command") for command in block.commands)
    else:
        for problem in block.problems:
            yield Text.assemble(
                _text(f"{block.severity}: ", block.severity),
                _text(f"{problem.problem} @ ", "plain"),
                _text(problem.key, "key"),
            )


def _table(table: Table) -> Grid:
    grid = Grid(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", show_edge=False)
    rows = table.cells
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
        grid.add_row(*(_text(entry.text, entry.role) for entry in row))
    return grid
