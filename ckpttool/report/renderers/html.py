"""The HTML report: one page that needs nothing else, no script and no network, for light and dark screens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from html import escape
from typing import Any

from ckpttool.report.document import Cell, Code, Commands, Document, Facts, Note, Problems, Table, cell, cells
from ckpttool.words import visible

_STYLE = """
:root {
  color-scheme: light dark;
  --ink: #1d2125; --soft: #626b75; --paper: #fdfdfc; --line: #dfe2e6; --shade: #f3f4f5;
  --ok: #1a7f37; --bad: #c0262d; --warn: #946200; --key: #0b5c8a; --dtype: #7a3e9d;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ink: #e3e6e9; --soft: #9aa4ae; --paper: #15181b; --line: #333a41; --shade: #1e2327;
    --ok: #56c271; --bad: #ff7b72; --warn: #e0b04c; --key: #79c0ff; --dtype: #d2a8ff;
  }
}
body {
  max-width: 76rem; margin: 3rem auto; padding: 0 1.5rem; color: var(--ink); background: var(--paper);
  font: 15px/1.5 system-ui, sans-serif;
}
h1 { font-size: 1.35rem; font-weight: 600; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1rem; font-weight: 600; margin: 2rem 0 .4rem; }
.verdict { font-size: 1.1rem; margin: .3rem 0 1.5rem; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; vertical-align: top; padding: .25rem 1.5rem .25rem 0; border-bottom: 1px solid var(--line); }
th { font-weight: 600; color: var(--soft); white-space: nowrap; }
.key, .dtype, .shape, pre { font-family: ui-monospace, monospace; font-size: .9em; }
.key { color: var(--key); overflow-wrap: anywhere; }
.dtype { color: var(--dtype); }
.number { text-align: right; white-space: nowrap; }
.ok { color: var(--ok); } .bad, .error { color: var(--bad); } .warn, .warning { color: var(--warn); }
.dim, footer { color: var(--soft); }
ul { list-style: none; padding: 0; }
pre { background: var(--shade); padding: .8rem 1rem; border-radius: 4px; overflow-x: auto; }
""".strip()


def render(document: Document) -> str:
    """The document as one HTML page, ending with a newline."""
    title = _escape(document.title)
    body = [f"<h1>{title}</h1>", f'<p class="verdict {_mood(document)}">{_escape(document.verdict)}</p>']
    for block in document.blocks:
        body += _BLOCKS[type(block)](block)
    head = [
        "<!doctype html>",
        '<html lang="en">',
        '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{title}</title>",
        f"<style>\n{_STYLE}\n</style>",
    ]
    return "\n".join([*head, *body, "</html>"]) + "\n"


def _mood(document: Document) -> str:
    return "ok" if document.ok else "bad"


def _escape(text: str) -> str:
    return escape(visible(text))


def _span(entry: Cell) -> str:
    return f'<span class="{entry.role}">{_escape(entry.text)}</span>'


def _cell(tag: str, entry: Cell) -> str:
    kind = "" if entry.role == "plain" else f' class="{entry.role}"'
    return f"<{tag}{kind}>{_escape(entry.text)}</{tag}>"


def _row(row: Iterable[str]) -> str:
    return f"<tr>{''.join(row)}</tr>"


def _grid(rows: Iterable[str]) -> list[str]:
    return ['<div class="scroll"><table>', *rows, "</table></div>"]


def _facts(facts: Facts) -> list[str]:
    return _grid(_row([f"<th>{_escape(label)}</th>", _cell("td", cell(value))]) for label, value in facts.pairs)


def _table(table: Table) -> list[str]:
    header = _row(_cell("th", Cell(c.title, "number" if c.role == "number" else "plain")) for c in table.columns)
    rows = (_row(_cell("td", entry) for entry in row) for row in cells(table))
    footer = [f"<footer>{_escape(table.footer)}</footer>"] if table.footer else []
    return [f"<h2>{_escape(table.title)}</h2>", *_grid([header, *rows]), *footer]


def _note(note: Note) -> list[str]:
    if note.severity == "notice":
        return [f"<p>{_escape(note.text)}</p>"]
    return [f'<p><strong class="{note.severity}">{note.severity}:</strong> {_escape(note.text)}</p>']


def _problems(block: Problems) -> list[str]:
    label = f'<strong class="{block.severity}">{block.severity}:</strong>'
    items = [f"<li>{label} {_escape(p.problem)} @ {_span(Cell(p.key, 'key'))}</li>" for p in block.problems]
    return ["<ul>", *items, "</ul>"]


def _code(code: Code) -> list[str]:
    return [f"<pre>{chr(10).join(map(_escape, code.lines))}</pre>"]


def _commands(block: Commands) -> list[str]:
    return [f"<h2>{_escape(block.title)}</h2>", *_code(Code(block.commands))]


_BLOCKS: Mapping[type, Callable[[Any], list[str]]] = {
    Facts: _facts,
    Table: _table,
    Note: _note,
    Problems: _problems,
    Code: _code,
    Commands: _commands,
}
