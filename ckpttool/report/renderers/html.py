"""The HTML report: one page that needs no network, for light and dark screens, wide and narrow ones.

What is not `page/report.js`, whose tree of every key is made where it is seen, can be read without any script. The
content security policy of the page lets nothing run but that script.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from html import escape
from importlib.resources import files
from typing import Any

from ckpttool.core.text import visible
from ckpttool.report.document import (
    KINDS,
    Cell,
    Commands,
    Document,
    Facts,
    Finding,
    Listing,
    Named,
    Note,
    Problems,
    Table,
    cell,
    cells,
    shortened,
)

_ABREAST = 3  # columns that a narrow screen has room for
_LISTED = 200  # rows of a table whose rows the tree has, too


def render(document: Document) -> str:
    """The document as one HTML page, ending with a newline."""
    title = _escape(document.title)
    verdict = f'<p class="verdict {"ok" if document.ok else "bad"}">{_escape(document.verdict)}</p>'
    style, script = (f"\n{_page(name)}" for name in ("report.css", "report.js"))
    parts = [
        "<!doctype html>",
        '<html lang="en">',
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_policy(style, script)}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{title}</title>",
        f"<style>{style}</style>",
        f"<header><div><h1>{title}</h1>{verdict}</div></header>",
        "<main>",
    ]
    for block in document.blocks:
        parts += _BLOCKS[type(block)](block)
    data = None if document.listing is None else _data(document.listing)
    if data is not None and data["rows"]:
        parts += [
            '<section id="browser"></section>',
            f'<script type="application/json" id="listing">{_json(data)}</script>',
        ]
    return "\n".join([*parts, "</main>", f"<script>{script}</script>", "</html>"]) + "\n"


def fragment(document: Document) -> str:
    """Return the document's blocks as HTML to be shown in a notebook: no page around them, no script, no tree."""
    parts = [f"<p><strong>{_escape(document.title)}</strong>: {_escape(document.verdict)}</p>"]
    for block in document.blocks:
        parts += _BLOCKS[type(block)](block)
    return "\n".join(["<div>", *parts, "</div>"])


def _page(name: str) -> str:
    return files("ckpttool.report.renderers").joinpath("page").joinpath(name).read_text(encoding="utf-8")


def _policy(style: str, script: str) -> str:
    """Nothing but this style and this script, by their hashes."""
    import hashlib  # loads OpenSSL

    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (style, script))
    sources = (f"{kind}-src 'sha256-{digest}'" for kind, digest in zip(("style", "script"), digests))
    return "; ".join(["default-src 'none'", *sources, "base-uri 'none'", "form-action 'none'"])


def _data(listing: Listing) -> dict[str, Any]:
    """What `report.js` reads, which says how a row is written; outlines and reasons once each."""
    outlines: dict[tuple[str, str, int | None], int] = {}
    whys: dict[str, int] = {}
    statuses = {status: place for place, status in enumerate(listing.statuses)}

    def side(found: tuple[Named, ...]) -> tuple[list[str], list[int]]:
        told = [(visible(one.dtype), one.shape, one.nbytes) for one in found]
        return [visible(one.key) for one in found], [outlines.setdefault(one, len(outlines)) for one in told]

    def row(found: Finding) -> list[Any]:
        left, right = side(found.left), side(found.right)
        why = whys.setdefault(visible(found.why), len(whys))
        other = [theirs if theirs != mine else 0 for mine, theirs in zip(left, right)]
        whole = [statuses[found.status], why, *left, *other, visible(found.detail), found.spread]
        while not whole[-1] and whole[-1] != []:
            whole.pop()
        return whole

    rows = [row(found) for found in listing.findings()]
    return {
        "sides": [visible(name) for name in listing.sides],
        "statuses": [[status, role, status in listing.quiet] for status, role in listing.statuses.items()],
        "outlines": list(outlines),
        "whys": list(whys),
        "rows": rows,
    }


def _json(data: Mapping[str, Any]) -> str:
    """JSON that ends no script."""
    return json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _escape(text: str) -> str:
    return escape(visible(text))


def _cell(tag: str, entry: Cell, title: str = "") -> str:
    kind = "" if entry.role == "plain" else f' class="{entry.role}"'
    told = f' data-title="{_escape(title)}"' if title else ""
    return f"<{tag}{kind}{told}>{_escape(entry.text)}</{tag}>"


def _row(row: Iterable[str]) -> str:
    return f"<tr>{''.join(row)}</tr>"


def _grid(kind: str, rows: Iterable[str]) -> list[str]:
    told = f' class="{kind}"' if kind else ""
    return [f'<div class="scroll"><table{told}>', *rows, "</table></div>"]


def _facts(facts: Facts) -> list[str]:
    rows = (_row([f"<th>{_escape(label)}</th>", _cell("td", cell(value))]) for label, value in facts.pairs)
    return _grid("", rows)


def _table(table: Table) -> list[str]:
    if table.is_listed:
        return [
            "<details>",
            f"<summary>{_escape(table.title)}</summary>",
            *_rows(shortened(table, _LISTED, "in the tree below")),
            "</details>",
        ]
    return [f"<h2>{_escape(table.title)}</h2>", *_rows(table)]


def _rows(table: Table) -> list[str]:
    """On a narrow screen the cells of a row stand below each other, each behind the title of its column."""
    header = _row(_cell("th", Cell(c.title, "number" if c.role == "number" else "plain")) for c in table.columns)
    titles = [c.title for c in table.columns]
    rows = (_row(map(partial(_cell, "td"), row, titles)) for row in cells(table))
    footer = [f"<footer>{_escape(table.footer)}</footer>"] if table.footer else []
    return [*_grid("stacked" if len(titles) > _ABREAST else "", [f"<thead>{header}</thead>", *rows]), *footer]


def _note(note: Note) -> list[str]:
    if note.severity == "notice":
        return [f"<p>{_escape(note.text)}</p>"]
    return [f'<p><strong class="{note.severity}">{note.severity}:</strong> {_escape(note.text)}</p>']


def _problems(block: Problems) -> list[str]:
    label = f'<strong class="{block.severity}">{block.severity}:</strong>'
    items = [f"<li>{label} {_escape(p.problem)} @ {_cell('span', Cell(p.key, 'key'))}</li>" for p in block.problems]
    return ["<ul>", *items, "</ul>"]


def _commands(block: Commands) -> list[str]:
    lines = "\n".join(map(_escape, block.commands))
    return [f"<h2>{_escape(block.title)}</h2>", f'<div class="code"><pre>{lines}</pre></div>']


_BLOCKS: Mapping[type, Callable[[Any], list[str]]] = dict(zip(KINDS, (_facts, _table, _note, _problems, _commands)))
