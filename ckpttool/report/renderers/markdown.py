"""The Markdown report, GitHub-flavoured: for pull requests, issues and job summaries."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ckpttool.core.text import visible
from ckpttool.report.document import KINDS, Cell, Commands, Document, Facts, Note, Problems, Table, cell, cells

_CODE_ROLES = ("key", "dtype", "shape")  # a code span interprets nothing, not even @mentions
_MARKS = {"ok": "**", "bad": "**", "warn": "*", "dim": "*"}
_SPECIAL = re.compile(r"[\\`*\[\]<>|~#&$]|(?<!\w)_|_(?!\w)")
_ALERTS = {"error": "CAUTION", "warning": "WARNING"}


def render(document: Document) -> str:
    """The document as Markdown, ending with a newline."""
    parts = [f"## {_escape(document.title)}", f"{'✅' if document.ok else '❌'} **{_escape(document.verdict)}**"]
    parts += ["\n".join(_BLOCKS[type(block)](block)) for block in document.blocks]
    return "\n\n".join(parts) + "\n"


def _escape(text: str) -> str:
    return _SPECIAL.sub(r"\\\g<0>", visible(text))


def _code_span(text: str) -> str:
    """A code span that holds the text whatever backticks are in it; an empty one cannot be written."""
    shown = visible(text)
    if not shown:
        return ""
    fence = _fence(shown, 1)
    pad = " " if shown[0] in "` " or shown[-1] in "` " else ""
    return f"{fence}{pad}{shown}{pad}{fence}"


def _fence(text: str, least: int) -> str:
    return "`" * max(least, 1 + max(map(len, re.findall("`+", text)), default=0))


def _cell(entry: Cell) -> str:
    """In a table a bar ends the cell, in a code span too, unless a backslash stands before it."""
    if entry.role in _CODE_ROLES:
        return _code_span(entry.text).replace("|", "\\|")
    mark = _MARKS.get(entry.role, "") if entry.text.strip() == entry.text != "" else ""
    return f"{mark}{_escape(entry.text)}{mark}"


def _row(texts: Iterable[str]) -> str:
    return f"| {' | '.join(texts)} |"


def _facts(facts: Facts) -> list[str]:
    return ["| | |", "| --- | --- |", *(_row([_escape(label), _cell(cell(value))]) for label, value in facts.pairs)]


def _table(table: Table) -> list[str]:
    rules = ["---:" if column.role == "number" else "---" for column in table.columns]
    lines = [f"### {_escape(table.title)}", "", _row(_escape(column.title) for column in table.columns), _row(rules)]
    lines += [_row(map(_cell, row)) for row in cells(table)]
    return [*lines, "", _escape(table.footer)] if table.footer else lines


def _note(note: Note) -> list[str]:
    alert = _ALERTS.get(note.severity)
    return [f"> [!{alert}]", f"> {_escape(note.text)}"] if alert else [_escape(note.text)]


def _problems(block: Problems) -> list[str]:
    return [f"- **{block.severity}:** {_escape(p.problem)} @ {_code_span(p.key)}" for p in block.problems]


def _commands(block: Commands) -> list[str]:
    shown = [visible(line) for line in block.commands]
    fence = _fence("\n".join(shown), 3)
    return [_escape(block.title), "", f"{fence}shell", *shown, fence]


_BLOCKS: Mapping[type, Callable[[Any], list[str]]] = dict(zip(KINDS, (_facts, _table, _note, _problems, _commands)))
