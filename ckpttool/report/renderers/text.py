"""The text report. Plain for files and pipes: aligned columns, no colors, and one line for each entry, so that `grep`
finds whole keys. On a terminal, `terminal.py` renders the same blocks in color.
"""

from __future__ import annotations

from collections.abc import Sequence

from ckpttool.core.text import visible
from ckpttool.core.values import dataclass
from ckpttool.report.document import Block, Cell, Commands, Document, Facts, Note, Table, cell

_PAD_LIMIT = 120  # one endless key must not pad ten thousand rows to its width


@dataclass(frozen=True, slots=True)
class Terminal:
    """The width of the terminal in columns, and whether it should be in color."""

    width: int
    color: bool = True


def render(document: Document, terminal: Terminal | None = None) -> str:
    """Return the document for a person; plain if `terminal` is None."""
    if terminal is not None:
        from ckpttool.report.renderers.terminal import render as render_rich

        return render_rich(document, terminal.width, terminal.color)
    parts = [[visible(document.title), visible(document.verdict)], *map(lines, document.blocks)]
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def lines(block: Block) -> list[str]:
    """Return the lines of one block."""
    if isinstance(block, Facts):
        return _grid([[Cell(label), cell(value)] for label, value in block.pairs])
    if isinstance(block, Table):
        header = [Cell(column.title, column.role) for column in block.columns]
        rows = [*_grid([header, *block.cells]), *([visible(block.footer)] if block.footer else [])]
        return [visible(block.title), *(f"  {row}" for row in rows)]
    if isinstance(block, Note):
        return [visible(block.text if block.severity == "notice" else f"{block.severity}: {block.text}")]
    if isinstance(block, Commands):
        return [visible(block.title), *(f"  {visible(command)}" for command in block.commands)]
    return [f"{block.severity}: {visible(str(problem))}" for problem in block.problems]


def _grid(rows: Sequence[Sequence[Cell]]) -> list[str]:
    texts = [[visible(entry.text) for entry in row] for row in rows]
    widths = [min(max(map(len, column)), _PAD_LIMIT) for column in zip(*texts)]
    return [
        "  ".join(
            text.rjust(width) if entry.role == "number" else text.ljust(width)
            for entry, text, width in zip(row, line, widths)
        ).rstrip()
        for row, line in zip(rows, texts)
    ]
