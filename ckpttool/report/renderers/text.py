"""The text report, for files, pipes and terminals.

Without a terminal every row is one line, so that `grep` finds whole keys. On a terminal no line is
wider than it: text is wrapped at spaces, names at dots. Only commands, which must be pasted as they
are, and single segments may be wider.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
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
    Note,
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
    parts = [head, *(lines(block, at) for block in document.blocks)]
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def lines(block: Block, terminal: Terminal | None = None) -> list[str]:
    at = terminal or _FILE
    if isinstance(block, Facts):
        return _facts(block, at)
    if isinstance(block, Table):
        footer = _lines(block.footer, "dim", at, indent=2) if block.footer else []
        return [*_lines(block.title, "title", at), *_table(block, at), *footer]
    if isinstance(block, Keys):
        title = _lines(block.title, "title", at) if block.title else []
        return [*title, *(line for group in block.groups for line in _group(group, at))]
    if isinstance(block, Note):
        return _labelled(block.severity, block.text, at)
    if isinstance(block, Commands):
        return [_styled(visible(f"{block.title}: {one}"), "command", at) for one in block.commands]
    return [
        line for problem in block.problems for line in _labelled(block.severity, str(problem), at)
    ]


# Words and names


def wrapped(text: str, width: int, hanging: int = 0) -> list[str]:
    """Return lines of at most `width` columns, broken at spaces, and inside longer words after dots
    and slashes.

    Lines after the first are indented. A segment that is wider than a line is not broken.
    """
    if _columns(text) <= width:
        return [text]
    found, line = [], ""
    for word in re.findall(r"\s*\S+", text):
        inner = width - hanging
        pieces = (
            [word] if _columns(word.strip()) <= inner else re.findall(r"[^./]+[./]*|[./]+", word)
        )
        for piece in pieces:
            if line.strip() and _columns(line + piece) > width:
                found.append(line)
                line, piece = " " * hanging, piece.lstrip()
            line += piece
    return [*found, line] if line.strip() else found


def shortened_name(name: str, width: int) -> str:
    """Return a name of at most `width` columns if possible: an ellipsis replaces segments in the
    middle.
    """
    parts, short = name.split("."), name
    for shown in range(len(parts) - 1, 1, -1):
        if _columns(short) <= width:
            break
        short = (
            ".".join(parts[: shown // 2]) + "..." + ".".join(parts[len(parts) - (shown + 1) // 2 :])
        )
    return short


def _columns(text: str) -> int:
    if text.isascii():
        return len(text)
    return sum(
        0 if combining(char) else 2 if east_asian_width(char) in "WF" else 1 for char in text
    )


def _styled(text: str, role: str, at: Terminal) -> str:
    code = _STYLES.get(role) if at.color else None
    return f"\x1b[{code}m{text}\x1b[0m" if code and text.strip() else text


def _lines(text: str, role: str, at: Terminal, indent: int = 0) -> list[str]:
    found = wrapped(visible(text), at.width - indent)
    return [" " * indent + _styled(line, role, at) for line in found] or [""]


def _labelled(severity: str, text: str, at: Terminal) -> list[str]:
    label = "" if severity == "notice" else f"{severity}: "
    first, *rest = wrapped(label + visible(text), at.width, 2) or [label]
    shown = _styled(label, severity, at) + first[len(label) :] if label else first
    return [shown.rstrip() if not label else shown, *rest]


# Blocks


def _facts(block: Facts, at: Terminal) -> list[str]:
    found = []
    wide = max((_columns(visible(label)) for label, _ in block.pairs), default=0)
    for label, value in block.pairs:
        one = cell(value)
        first, *rest = wrapped(visible(one.text), max(at.width - wide - 2, 1)) or [""]
        start = visible(label) + (":" if block.is_short else "")
        pad = " " * (1 if block.is_short else wide + 2 - _columns(start))
        if block.is_short:
            first, *rest = wrapped(f"{start} {visible(one.text)}", at.width, 2)
            start, pad = "", ""
        found.append((_styled(start, "dim", at) + pad + _styled(first, one.role, at)).rstrip())
        found += [
            " " * (2 if block.is_short else wide + 2) + _styled(line.strip(), one.role, at)
            for line in rest
        ]
    return found


def _group(group: KeyGroup, at: Terminal) -> list[str]:
    """Return a heading and its keys: ``old -> new: detail`` on one line, or on two if the line
    would be too long.
    """
    found = [_styled(line, group.role, at) for line in wrapped(visible(group.heading), at.width, 4)]
    for left, right, detail in group.rows:
        old, new, why = visible(left), visible(right), visible(detail)
        names = f"{old} -> {new}" if old and new and old != new else old or new
        line = f"  {names}: {why}" if why else f"  {names}"
        if _columns(line) <= at.width:
            found.append(f"  {_styled(names, 'key', at)}{line[2 + len(names) :]}")
            continue
        for start, name in (
            (("  ", old), ("    -> ", new if new != old else "")) if old else (("  ", new),)
        ):
            width = at.width - len(start)
            if name and not group.is_full and " + " not in name:
                name = shortened_name(name, width)
            shown = wrapped(name, width, 2) if name else []
            starts = (start, *[" " * len(start)] * len(shown))
            found += [space + _styled(one, "key", at) for space, one in zip(starts, shown)]
        found += [f"    {one}" for one in wrapped(why, at.width - 4)] if why else []
    return [*found, *_lines(group.footer, "dim", at, indent=2)] if group.footer else found


def _table(table: Table, at: Terminal) -> Iterator[str]:
    """Yield the lines of a table: in columns if they fit, else each row as lines of ``column:
    value``.
    """
    header: list[Cell] = [Cell(column.title, "title") for column in table.columns]
    rows: list[list[Cell]] = table.cells
    texts = [[visible(entry.text) for entry in row] for row in (header, *rows)]
    room = at.width - 2
    natural = [min(max(map(_columns, column)), _PAD_LIMIT) for column in zip(*texts)]
    least = [
        max(_columns(piece) for text in column for piece in re.findall(_PIECE, text) or [""])
        for column in zip(*texts)
    ]
    widths = (
        _column_widths(natural, least, room - 2 * (len(natural) - 1))
        if at.width != _UNLIMITED
        else natural
    )
    if widths is None:
        for row, own in zip(rows, texts[1:]):
            mark = "- "
            for title, entry, text in zip(texts[0], row, own):
                if text:
                    first, *rest = wrapped(f"{title}: {text}", room - 2, 2)
                    yield f"  {mark}{_styled(first, entry.role, at)}"
                    yield from (f"    {_styled(line, entry.role, at)}" for line in rest)
                    mark = "  "
        return
    right = [column.role == "number" for column in table.columns]
    for row, own in zip((header, *rows), texts):
        folded = [
            [text] if at.width == _UNLIMITED else wrapped(text, width) or [""]
            for text, width in zip(own, widths)
        ]
        for number in range(max(map(len, folded))):
            cells = []
            for entry, parts, width, is_number in zip(row, folded, widths, right):
                part = parts[number] if number < len(parts) else ""
                pad = " " * max(width - _columns(part), 0)
                shown = _styled(part, entry.role, at)
                cells.append(pad + shown if is_number else shown + pad)
            yield "  " + "  ".join(cells).rstrip()


def _column_widths(natural: Sequence[int], least: Sequence[int], room: int) -> list[int] | None:
    """Return widths that fit into `room`: the widest columns are narrowed first; None if that is
    not enough.
    """
    widths = list(natural)
    while sum(widths) > room:
        wide = [place for place, width in enumerate(widths) if width > least[place]]
        if not wide:
            return None
        widths[max(wide, key=widths.__getitem__)] -= 1
    return widths
