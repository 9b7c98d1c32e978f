"""The text report, for files, pipes and terminals.

Without a terminal every row is one line, so that `grep` finds whole keys. On a terminal no line is
wider than it: text is wrapped at spaces, names at dots. Only commands, which must be pasted as they
are, and single segments may be wider.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from unicodedata import combining, east_asian_width

from ckpttool.core.text import visible
from ckpttool.core.values import dataclass
from ckpttool.report.document import (
    Block,
    Cell,
    Commands,
    Document,
    Facts,
    KeyGroup,
    Keys,
    Paragraph,
    Table,
    cell,
)

_PAD_LIMIT = 120  # one endless key must not pad ten thousand rows to its width
_UNLIMITED = 1 << 30
_PIECE = r"[^\s./]+[./]*|[./]+"  # of a text that may be broken after dots and slashes

# ANSI codes of each role, in the sixteen colors of the user's own theme.
_STYLES: dict[str, str] = {
    "key": "36",
    "dtype": "35",
    "ok": "32",
    "bad": "31",
    "warn": "33",
    "dim": "2",
    "title": "1",
    "command": "1",
    "error": "1;31",
    "warning": "1;33",
}


@dataclass(frozen=True, slots=True)
class Terminal:
    """The width of the terminal in columns, and whether it should be in color."""

    width: int
    color: bool = True


_FILE = Terminal(_UNLIMITED, color=False)


def render(document: Document, terminal: Terminal | None = None) -> str:
    """Return the document for a person; `terminal` is None for a file or a pipe."""
    at = terminal or _FILE
    head = _lines(document.verdict, "ok" if document.ok else "bad", at)
    for block in document.lead:
        head += lines(block, at)
    parts = ["\n".join(head)]
    for block in document.blocks:
        parts.append("\n".join(lines(block, at)))
    return "\n\n".join(parts) + "\n"


def lines(block: Block, terminal: Terminal | None = None) -> list[str]:
    at = terminal or _FILE
    if isinstance(block, Facts):
        return _facts(block, at)
    if isinstance(block, Table):
        shown = _lines(block.title, "title", at)
        shown += _table(block, at)
        if block.footer:
            shown += _lines(block.footer, "dim", at, indent=2)
        return shown
    if isinstance(block, Keys):
        shown = _lines(block.title, "title", at) if block.title else []
        for group in block.groups:
            shown += _group(group, at)
        return shown
    if isinstance(block, Paragraph):
        return _labelled(block.severity, block.text, at)
    if isinstance(block, Commands):
        commands = [visible(f"{block.title}: {command}") for command in block.commands]
        return [_styled(command, "command", at) for command in commands]
    shown = []
    for problem in block.problems:
        shown += _labelled(block.severity, str(problem), at)
    return shown


# Words and names


def wrapped(text: str, width: int, hanging: int = 0) -> list[str]:
    """Return lines of at most `width` columns, broken at spaces, and inside longer words after dots
    and slashes; an empty text is one line.

    Lines after the first are indented. A segment that is wider than a line is not broken.
    """
    if _columns(text) <= width:
        return [text]
    lines = []
    line = ""
    for word in re.findall(r"\s*\S+", text):
        pieces = [word]
        if _columns(word.strip()) > width - hanging:
            pieces = re.findall(r"[^./]+[./]*|[./]+", word)
        for piece in pieces:
            if line.strip() and _columns(line + piece) > width:
                lines.append(line)
                line = " " * hanging
                piece = piece.lstrip()
            line += piece
    if line.strip() or not lines:
        lines.append(line)
    return lines


def shortened_name(name: str, width: int) -> str:
    """Return a name of at most `width` columns if possible: an ellipsis replaces segments in the
    middle.
    """
    parts, short = name.split("."), name
    for shown in range(len(parts) - 1, 1, -1):
        if _columns(short) <= width:
            break
        begin = shown // 2
        end = begin - shown
        start, rest = ".".join(parts[:begin]), ".".join(parts[end:])
        short = f"{start}...{rest}"
    return short


def _columns(text: str) -> int:
    if text.isascii():
        return len(text)
    columns = 0
    for char in text:
        if not combining(char):
            columns += 2 if east_asian_width(char) in "WF" else 1
    return columns


def _styled(text: str, role: str, at: Terminal) -> str:
    code = _STYLES.get(role) if at.color else None
    return f"\x1b[{code}m{text}\x1b[0m" if code and text.strip() else text


def _lines(text: str, role: str, at: Terminal, indent: int = 0) -> list[str]:
    margin = " " * indent
    shown = wrapped(visible(text), at.width - indent)
    return [margin + _styled(line, role, at) for line in shown]


def _labelled(severity: str, text: str, at: Terminal) -> list[str]:
    """Return the lines of a paragraph; a warning or an error begins with this word."""
    label = "" if severity == "notice" else f"{severity}: "
    first, *rest = wrapped(label + visible(text), at.width, 2)
    styled = _styled(label, severity, at)
    return [f"{styled}{first[len(label) :]}".rstrip(), *rest]


# Blocks


def _facts(block: Facts, at: Terminal) -> list[str]:
    """Return the pairs as ``label: value`` if the block is short, else in two columns."""
    labels = [visible(label) for label, _ in block.pairs]
    margin = 2
    if not block.is_short:
        margin += max(map(_columns, labels), default=0)
    indent = " " * margin
    shown = []
    for label, (_, inline) in zip(labels, block.pairs):
        value = cell(inline)
        text = visible(value.text)
        if block.is_short:
            start = ""
            first, *rest = wrapped(f"{label}: {text}", at.width, margin)
        else:
            pad = " " * (margin - _columns(label))
            start = _styled(label, "dim", at) + pad
            first, *rest = wrapped(text, max(at.width - margin, 1))
        line = start + _styled(first, value.role, at)
        shown.append(line.rstrip())
        for line in rest:
            shown.append(indent + _styled(line.strip(), value.role, at))
    return shown


def _group(group: KeyGroup, at: Terminal) -> list[str]:
    """Return a heading and its keys: ``old -> new: detail`` on one line, or on two if the line
    would be too long.
    """
    heading = wrapped(visible(group.heading), at.width, 4)
    shown = [_styled(line, group.role, at) for line in heading]
    for left, right, detail in group.rows:
        old, new, why = visible(left), visible(right), visible(detail)
        if not old or new == old:
            old, new = old or new, ""
        names = f"{old} -> {new}" if new else old
        reason = f": {why}" if why else ""
        if _columns(f"  {names}{reason}") <= at.width:
            shown.append(f"  {_styled(names, 'key', at)}{reason}")
            continue
        shown += _name_lines("  ", old, group, at)
        if new:
            shown += _name_lines("    -> ", new, group, at)
        if why:
            for line in wrapped(why, at.width - 4):
                shown.append(f"    {line}")
    if group.footer:
        shown += _lines(group.footer, "dim", at, indent=2)
    return shown


def _name_lines(start: str, name: str, group: KeyGroup, at: Terminal) -> list[str]:
    """Return a name as lines, the first one after `start`; shortened if the group is not full."""
    width = at.width - len(start)
    if not group.is_full and " + " not in name:
        name = shortened_name(name, width)
    shown = []
    for line in wrapped(name, width, 2):
        shown.append(start + _styled(line, "key", at))
        start = " " * len(start)
    return shown


def _table(table: Table, at: Terminal) -> Iterator[str]:
    """Yield the lines of a table: in columns if they fit, else each row as lines of ``column:
    value``.
    """
    header = [Cell(visible(column.title), "title") for column in table.columns]
    rows = [header]
    for row in table.cells:
        rows.append([Cell(visible(entry.text), entry.role) for entry in row])
    widths = _widths(rows, at)
    if not widths:
        for row in rows[1:]:
            yield from _stacked(header, row, at)
        return
    are_numbers = [column.role == "number" for column in table.columns]
    for row in rows:
        # a cell has several lines if it is wider than its column
        columns = [_folded(entry.text, width, at) for entry, width in zip(row, widths)]
        for line in zip_longest(*columns, fillvalue=""):
            cells = []
            for entry, part, width, is_number in zip(row, line, widths, are_numbers):
                pad = " " * max(width - _columns(part), 0)
                shown = _styled(part, entry.role, at)
                cells.append(pad + shown if is_number else shown + pad)
            yield "  " + "  ".join(cells).rstrip()


def _widths(rows: Sequence[Sequence[Cell]], at: Terminal) -> list[int]:
    """Return the width of each column; none if they do not fit into the terminal."""
    natural = []
    least = []
    for column in zip(*rows):
        texts = [entry.text for entry in column]
        widest = max(map(_columns, texts))
        natural.append(min(widest, _PAD_LIMIT))
        least.append(_widest_piece(texts))
    if at.width == _UNLIMITED:
        return natural
    room = at.width - 2 - 2 * (len(natural) - 1)
    return _column_widths(natural, least, room)


def _folded(text: str, width: int, at: Terminal) -> list[str]:
    return [text] if at.width == _UNLIMITED else wrapped(text, width)


def _stacked(header: Sequence[Cell], row: Sequence[Cell], at: Terminal) -> Iterator[str]:
    """Yield a row as lines of ``column: value``, the first one after a dash."""
    mark = "- "
    for title, entry in zip(header, row):
        if entry.text:
            first, *rest = wrapped(f"{title.text}: {entry.text}", at.width - 4, 2)
            yield f"  {mark}{_styled(first, entry.role, at)}"
            for line in rest:
                yield f"    {_styled(line, entry.role, at)}"
            mark = "  "


def _widest_piece(texts: Sequence[str]) -> int:
    """Return the columns of the widest piece that cannot be broken."""
    widest = 0
    for text in texts:
        widest = max(widest, *map(_columns, re.findall(_PIECE, text)), 0)
    return widest


def _column_widths(natural: Sequence[int], least: Sequence[int], room: int) -> list[int]:
    """Return widths that fit into `room`: the widest columns are narrowed first; none if that is
    not enough.
    """
    widths = list(natural)
    while sum(widths) > room:
        wide = [place for place, width in enumerate(widths) if width > least[place]]
        if not wide:
            return []
        widths[max(wide, key=widths.__getitem__)] -= 1
    return widths
