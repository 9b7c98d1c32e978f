"""The text report. Plain for files and pipes: aligned columns, no colour, one line an entry however long its key is,
so that `grep` finds whole keys. On a terminal, `terminal.py` sets the same blocks in colour.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ckpttool.core.text import visible
from ckpttool.core.values import dataclass
from ckpttool.report.document import KINDS, Block, Cell, Commands, Document, Facts, Note, Problems, Table, cell, cells

_PAD_LIMIT = 120  # one endless key must not pad ten thousand rows to its width


@dataclass(frozen=True, slots=True)
class Terminal:
    """What is known of the terminal that will show the text: its width in columns, and whether it wants colour."""

    width: int
    color: bool = True


def render(document: Document, terminal: Terminal | None = None) -> str:
    """The document for a person; plain where `terminal` is None."""
    if terminal is not None:
        from ckpttool.report.renderers.terminal import render as render_rich

        return render_rich(document, terminal.width, terminal.color)
    parts = [[visible(document.title), visible(document.verdict)]]
    parts += [lines(block) for block in document.blocks]
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def lines(block: Block) -> list[str]:
    """The lines of one block."""
    return _BLOCKS[type(block)](block)


def _facts(facts: Facts) -> list[str]:
    return _grid([[Cell(label), cell(value)] for label, value in facts.pairs])


def _table(table: Table) -> list[str]:
    header = [Cell(column.title, column.role) for column in table.columns]
    footer = [visible(table.footer)] if table.footer else []
    return [visible(table.title), *_indent([*_grid([header, *cells(table)]), *footer])]


def _note(note: Note) -> list[str]:
    return [visible(note.text if note.severity == "notice" else f"{note.severity}: {note.text}")]


def _problems(block: Problems) -> list[str]:
    return [f"{block.severity}: {visible(str(problem))}" for problem in block.problems]


def _commands(block: Commands) -> list[str]:
    return [visible(block.title), *_indent(map(visible, block.commands))]


def _indent(lines: Iterable[str]) -> list[str]:
    return [f"  {line}" for line in lines]


def _grid(rows: Sequence[Sequence[Cell]]) -> list[str]:
    texts = [[visible(entry.text) for entry in row] for row in rows]
    widths = [min(max(map(len, column)), _PAD_LIMIT) for column in zip(*texts)]
    return ["  ".join(map(_pad, row, line, widths)).rstrip() for row, line in zip(rows, texts)]


def _pad(entry: Cell, text: str, width: int) -> str:
    return text.rjust(width) if entry.role == "number" else text.ljust(width)


_BLOCKS: Mapping[type, Callable[[Any], list[str]]] = dict(zip(KINDS, (_facts, _table, _note, _problems, _commands)))
