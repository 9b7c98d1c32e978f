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
        lines = ["| | |", "| --- | --- |"]
        for label, value in block.pairs:
            lines.append(_row([_escape(label), _cell(cell(value))]))
        return lines
    if isinstance(block, Table):
        return _table(block)
    if isinstance(block, Keys):
        lines = [f"### {_escape(block.title)}", ""] if block.title else []
        for group in block.groups:
            lines += _group(group)
        return lines
    if isinstance(block, Paragraph):
        text = _escape(block.text)
        alert = _ALERTS.get(block.severity)
        return [f"> [!{alert}]", f"> {text}"] if alert else [text]
    if isinstance(block, Commands):
        commands = [visible(line) for line in block.commands]
        fence = _fence("\n".join(commands), 3)
        return [_escape(block.title), "", f"{fence}shell", *commands, fence]
    lines = []
    for problem in block.problems:
        key = _code_span(problem.key)
        lines.append(f"- **{block.severity}:** {_escape(problem.problem)} @ {key}")
    return lines


def _table(table: Table) -> list[str]:
    titles = []
    rules = []
    for column in table.columns:
        titles.append(_escape(column.title))
        rules.append("---:" if column.role == "number" else "---")
    lines = [f"### {_escape(table.title)}", "", _row(titles), _row(rules)]
    for row in table.cells:
        lines.append(_row(map(_cell, row)))
    if table.footer:
        lines += ["", _escape(table.footer)]
    return lines


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
    """Return more backticks than there are together in the text, and at least so many."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    return "`" * max(least, 1 + longest)


def _cell(entry: Cell) -> str:
    """Return the cell of a table: a bar ends it, also in a code span, unless there is a backslash
    before it.
    """
    if entry.role in _CODE_ROLES:
        return _code_span(entry.text).replace("|", "\\|")
    text = _escape(entry.text)
    # Markdown ignores a mark next to a space
    if not entry.text or entry.text.strip() != entry.text:
        return text
    mark = _MARKS.get(entry.role, "")
    return f"{mark}{text}{mark}"


def _row(texts: Iterable[str]) -> str:
    return f"| {' | '.join(texts)} |"
