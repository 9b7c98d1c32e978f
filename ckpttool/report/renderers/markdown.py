"""The Markdown report, GitHub-flavored: for pull requests, issues and job summaries."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from ckpttool.core.text import visible
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

_CODE_ROLES = ("key", "dtype", "shape")  # a code span interprets nothing, not even @mentions
_MARKS = {"ok": "**", "bad": "**", "warn": "*", "dim": "*"}
_SPECIAL = re.compile(r"[\\`*\[\]<>|~#&$]|(?<!\w)_|_(?!\w)")
_ALERTS = {"error": "CAUTION", "warning": "WARNING"}


def render(document: Document) -> str:
    """Return the document as Markdown, ending with a newline."""
    parts = [
        f"## {_escape(document.title)}",
        f"{'✅' if document.ok else '❌'} **{_escape(document.verdict)}**",
    ]
    parts += ["\n".join(_lines(block)) for block in document.all_blocks]
    return "\n\n".join(parts) + "\n"


def _lines(block: Block) -> list[str]:
    if isinstance(block, Facts):
        return [
            "| | |",
            "| --- | --- |",
            *(_row([_escape(label), _cell(cell(value))]) for label, value in block.pairs),
        ]
    if isinstance(block, Table):
        rules = ["---:" if column.role == "number" else "---" for column in block.columns]
        header = [_row(_escape(column.title) for column in block.columns), _row(rules)]
        footer = ["", _escape(block.footer)] if block.footer else []
        rows = [_row(map(_cell, row)) for row in block.cells]
        return [f"### {_escape(block.title)}", "", *header, *rows, *footer]
    if isinstance(block, Keys):
        lines = [f"### {_escape(block.title)}", ""] if block.title else []
        for group in block.groups:
            lines += _group(group)
        return lines
    if isinstance(block, Paragraph):
        alert = _ALERTS.get(block.severity)
        return [f"> [!{alert}]", f"> {_escape(block.text)}"] if alert else [_escape(block.text)]
    if isinstance(block, Commands):
        commands = [visible(line) for line in block.commands]
        fence = _fence("\n".join(commands), 3)
        return [_escape(block.title), "", f"{fence}shell", *commands, fence]
    return [
        f"- **{block.severity}:** {_escape(p.problem)} @ {_code_span(p.key)}"
        for p in block.problems
    ]


def _group(group: KeyGroup) -> Iterator[str]:
    yield f"**{_escape(group.heading)}**"
    yield ""
    for left, right, detail in group.rows:
        names = _code_span(left or right)
        if left and right and left != right:
            names = f"{names} -> {_code_span(right)}"
        yield f"- {names}: {_escape(detail)}" if detail else f"- {names}"
    if group.footer:
        yield ""
        yield _escape(group.footer)
    yield ""


def _escape(text: str) -> str:
    return _SPECIAL.sub(r"\\\g<0>", visible(text))


def _code_span(text: str) -> str:
    """Return a code span that holds the text with any backticks in it; an empty one cannot be
    written.
    """
    shown = visible(text)
    if not shown:
        return ""
    fence = _fence(shown, 1)
    pad = " " if shown[0] in "` " or shown[-1] in "` " else ""
    return f"{fence}{pad}{shown}{pad}{fence}"


def _fence(text: str, least: int) -> str:
    return "`" * max(least, 1 + max(map(len, re.findall("`+", text)), default=0))


def _cell(entry: Cell) -> str:
    """Return the cell of a table: a bar ends it, also in a code span, unless there is a backslash
    before it.
    """
    if entry.role in _CODE_ROLES:
        return _code_span(entry.text).replace("|", "\\|")
    mark = _MARKS.get(entry.role, "") if entry.text.strip() == entry.text != "" else ""
    return f"{mark}{_escape(entry.text)}{mark}"


def _row(texts: Iterable[str]) -> str:
    return f"| {' | '.join(texts)} |"
