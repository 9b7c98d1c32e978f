"""The HTML report: one page that needs no network, for light and dark, wide and narrow screens.

Everything except the tree of keys, which `page/report.js` builds, can be read without scripts. The
content security policy of the page allows only that script.
"""

from __future__ import annotations

import base64
import json
import re
from html import escape
from importlib.resources import files
from typing import Any

from ckpttool.core.text import visible
from ckpttool.report.document import (
    Block,
    Cell,
    Commands,
    Document,
    Facts,
    Finding,
    KeyGroup,
    Keys,
    Listing,
    Named,
    Paragraph,
    Table,
    cell,
    shortened,
)

_ABREAST = 3  # columns that fit on a narrow screen
_DIGITS = 12  # of a digest
_LISTED = 200  # rows of a table whose rows are in the tree too


def render(document: Document) -> str:
    """Return the document as one HTML page, ending with a newline."""
    title = _escape(document.title)
    verdict = f'<p class="verdict {"ok" if document.ok else "bad"}">{_escape(document.verdict)}</p>'
    folder = files("ckpttool.report.renderers").joinpath("page")
    style, script = (
        "\n" + folder.joinpath(name).read_text(encoding="utf-8")
        for name in ("report.css", "report.js")
    )
    parts = [
        "<!doctype html>",
        '<html lang="en">',
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_policy(style, script)}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{title}</title>",
        f"<style>{style}</style>",
        f"<header><div><h1>{title}</h1>{verdict}{_origin(document.listing)}</div></header>",
        "<main>",
    ]
    for block in document.all_blocks:
        # the line that says where a terminal shows more
        is_details = isinstance(block, Facts) and [label for label, _ in block.pairs] == ["details"]
        if not is_details:
            parts += _block(block)
    data = None if document.listing is None else _data(document.listing)
    if data is not None and data["rows"]:
        # "<" is escaped, so that the JSON cannot end the script
        text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        text = text.replace("<", "\\u003c")
        parts += [
            '<section id="browser"></section>',
            f'<script type="application/json" id="listing">{text}</script>',
        ]
    return "\n".join([*parts, "</main>", f"<script>{script}</script>", "</html>"]) + "\n"


def _origin(listing: Listing | None) -> str:
    """Return the tool, its version and the date; and a digest of the names, dtypes and shapes of
    each side.
    """
    from datetime import datetime, timezone
    from hashlib import sha256

    from ckpttool import __version__

    parts = [f"ckpttool {__version__}", datetime.now(timezone.utc).strftime("%Y-%m-%d")]
    if listing is not None:
        sides: list[set[str]] = [set() for _ in listing.sides]
        for finding in listing.findings():
            for names, keys in zip(sides, (finding.left, finding.right)):
                names.update(f"{tensor.key} {tensor.dtype} {tensor.shape}" for tensor in keys)
        for name, names in zip(listing.sides, sides):
            text = "\n".join(sorted(names)).encode("utf-8", "backslashreplace")
            parts.append(f"{name}: names {sha256(text).hexdigest()[:_DIGITS]}")
    return f'<p class="origin">{" &middot; ".join(map(_escape, parts))}</p>'


def fragment(document: Document) -> str:
    """Return the document's blocks as HTML for a notebook: without page, script or tree."""
    parts = [f"<p><strong>{_escape(document.title)}</strong>: {_escape(document.verdict)}</p>"]
    for block in document.all_blocks:
        parts += _block(block)
    return "\n".join(["<div>", *parts, "</div>"])


def _footer(text: str) -> list[str]:
    """Return a footer without the option of the command line that shows more."""
    text = re.sub(r" \(--[^)]*\)$", "", text)
    return [f"<footer>{_escape(text)}</footer>"] if text else []


def _policy(style: str, script: str) -> str:
    """Allow nothing but this style and this script, by their hashes."""
    import hashlib  # loads OpenSSL

    sources = []
    for kind, text in (("style", style), ("script", script)):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        sources.append(f"{kind}-src 'sha256-{digest}'")
    return "; ".join(["default-src 'none'", *sources, "base-uri 'none'", "form-action 'none'"])


def _data(listing: Listing) -> dict[str, Any]:
    """Return what `report.js` reads, which documents the rows; outlines and reasons are written
    once each.
    """
    outlines: dict[tuple[str, str, int | None], int] = {}
    whys: dict[str, int] = {}
    statuses = {status: place for place, status in enumerate(listing.statuses)}

    def side(tensors: tuple[Named, ...]) -> tuple[list[str], list[int]]:
        numbers = []
        for tensor in tensors:
            outline = (visible(tensor.dtype), tensor.shape, tensor.nbytes)
            numbers.append(outlines.setdefault(outline, len(outlines)))
        return [visible(tensor.key) for tensor in tensors], numbers

    def row(finding: Finding) -> list[Any]:
        left, right = side(finding.left), side(finding.right)
        why = whys.setdefault(visible(finding.why), len(whys))
        other = [0 if after == before else after for before, after in zip(left, right)]
        end = [visible(finding.detail), finding.spread]
        cells = [statuses[finding.status], why, *left, *other, *end]
        while not cells[-1] and cells[-1] != []:
            cells.pop()
        return cells

    rows = [row(finding) for finding in listing.findings()]
    return {
        "sides": [visible(name) for name in listing.sides],
        "statuses": [
            [status, role, status in listing.quiet] for status, role in listing.statuses.items()
        ],
        "outlines": list(outlines),
        "whys": list(whys),
        "rows": rows,
    }


def _escape(text: str) -> str:
    return escape(visible(text))


def _block(block: Block) -> list[str]:
    if isinstance(block, Facts):
        rows = (
            f"<tr><th>{_escape(label)}</th>{_cell('td', cell(value))}</tr>"
            for label, value in block.pairs
        )
        return ['<div class="scroll"><table>', *rows, "</table></div>"]
    if isinstance(block, Table):
        if not block.is_listed:
            return [f"<h2>{_escape(block.title)}</h2>", *_table(block)]
        shown = _table(shortened(block, _LISTED, "in the tree below"))
        return ["<details>", f"<summary>{_escape(block.title)}</summary>", *shown, "</details>"]
    if isinstance(block, Keys):
        shown = [f"<h2>{_escape(block.title)}</h2>"] if block.title else []
        for group in block.groups:
            shown += _group(group, _LISTED if block.is_listed else None)
        return shown
    if isinstance(block, Paragraph):
        label = "" if block.severity == "notice" else f"{_label(block.severity)} "
        return [f"<p>{label}{_escape(block.text)}</p>"]
    if isinstance(block, Commands):
        lines = "\n".join(map(_escape, block.commands))
        return [f"<h2>{_escape(block.title)}</h2>", f'<div class="code"><pre>{lines}</pre></div>']
    label = _label(block.severity)
    items = []
    for problem in block.problems:
        key = _cell("span", Cell(problem.key, "key"))
        items.append(f"<li>{label} {_escape(problem.problem)} @ {key}</li>")
    return ["<ul>", *items, "</ul>"]


def _group(group: KeyGroup, most: int | None) -> list[str]:
    """Return the keys of a group; a list is cut if its rows are in the tree too."""
    rows = []
    for left, right, detail in group.rows[:most]:
        names = [_cell("span", Cell(name, "key")) for name in dict.fromkeys((left, right)) if name]
        rows.append(f"<li>{' &rarr; '.join(names)}{f': {_escape(detail)}' if detail else ''}</li>")
    return [
        f"<h3>{_escape(group.heading)}</h3>",
        '<ul class="names">',
        *rows,
        "</ul>",
        *_footer(group.footer),
    ]


def _label(severity: str) -> str:
    return f'<strong class="{severity}">{severity}:</strong>'


def _cell(tag: str, entry: Cell, title: str = "") -> str:
    role = "" if entry.role == "plain" else f' class="{entry.role}"'
    data = f' data-title="{_escape(title)}"' if title else ""
    text = _escape(entry.text)
    # a name is broken after dots only
    text = text.replace(".", ".<wbr>") if entry.role == "key" else text
    bar = "" if entry.bar is None else f'<meter value="{entry.bar:.3f}"></meter>'
    return f"<{tag}{role}{data}>{bar}{text}</{tag}>"


def _table(table: Table) -> list[str]:
    """On a narrow screen the cells of a row are below each other, each with the title of its
    column.
    """
    header = ""
    for column in table.columns:
        header += _cell("th", Cell(column.title, "number" if column.role == "number" else "plain"))
    rows = []
    for row in table.cells:
        cells = (_cell("td", entry, column.title) for entry, column in zip(row, table.columns))
        rows.append(f"<tr>{''.join(cells)}</tr>")
    kind = ' class="stacked"' if len(table.columns) > _ABREAST else ""
    head = [f'<div class="scroll"><table{kind}>', f"<thead><tr>{header}</tr></thead>"]
    return [*head, *rows, "</table></div>", *_footer(table.footer)]
