"""The HTML report: one page that needs no network, for light and dark, wide and narrow screens.

Everything except the tree of keys, which `page/report.js` builds, can be read without scripts. The
content security policy of the page allows only that script.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable
from html import escape
from importlib.resources import files
from typing import Any

from ckpttool.core.tables import positions
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
    Role,
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
    style = "\n" + folder.joinpath("report.css").read_text(encoding="utf-8")
    script = "\n" + folder.joinpath("report.js").read_text(encoding="utf-8")
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
        parts.append('<section id="browser"></section>')
        parts.append(f'<script type="application/json" id="listing">{text}</script>')
    return "\n".join([*parts, "</main>", f"<script>{script}</script>", "</html>"]) + "\n"


def _origin(listing: Listing | None) -> str:
    """Return the tool, its version and the date; and a digest of the names, dtypes and shapes of
    each side.
    """
    from datetime import datetime, timezone

    from ckpttool import __version__

    today = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    parts = [f"ckpttool {__version__}", today]
    if listing is not None:
        left: list[Named] = []
        right: list[Named] = []
        for finding in listing.findings():
            left += finding.left
            right += finding.right
        for name, tensors in zip(listing.sides, (left, right)):
            parts.append(f"{name}: names {_digest(tensors)}")
    return f'<p class="origin">{" &middot; ".join(map(_escape, parts))}</p>'


def _digest(tensors: Iterable[Named]) -> str:
    """Return the first digits of the SHA-256 of the names, dtypes and shapes in order."""
    from hashlib import sha256  # loads OpenSSL

    lines = {f"{tensor.key} {tensor.dtype} {tensor.shape}" for tensor in tensors}
    text = "\n".join(sorted(lines))
    return sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:_DIGITS]


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

    def source(text: str) -> str:
        digest = hashlib.sha256(text.encode()).digest()
        return f"'sha256-{base64.b64encode(digest).decode()}'"

    return (
        f"default-src 'none'; style-src {source(style)}; script-src {source(script)};"
        " base-uri 'none'; form-action 'none'"
    )


def _data(listing: Listing) -> dict[str, Any]:
    """Return what `report.js` reads, which documents the rows; outlines and reasons are written
    once each.
    """
    outlines: dict[tuple[str, str, int | None], int] = {}
    whys: dict[str, int] = {}
    statuses = positions(listing.statuses)

    def side(tensors: tuple[Named, ...]) -> tuple[list[str], list[int]]:
        numbers = []
        for tensor in tensors:
            outline = (visible(tensor.dtype), tensor.shape, tensor.nbytes)
            numbers.append(outlines.setdefault(outline, len(outlines)))
        return [visible(tensor.key) for tensor in tensors], numbers

    def row(finding: Finding) -> list[Any]:
        why = whys.setdefault(visible(finding.why), len(whys))
        cells: list[Any] = [statuses[finding.status], why]
        left = side(finding.left)
        right = side(finding.right)
        cells += left
        # 0: as on the left
        for before, after in zip(left, right):
            cells.append(0 if after == before else after)
        cells += [visible(finding.detail), finding.spread]
        while not cells[-1] and cells[-1] != []:
            cells.pop()
        return cells

    rows = [row(finding) for finding in listing.findings()]
    roles = []
    for status, role in listing.statuses.items():
        roles.append([status, role, status in listing.quiet])
    return {
        "sides": [visible(name) for name in listing.sides],
        "statuses": roles,
        "outlines": list(outlines),
        "whys": list(whys),
        "rows": rows,
    }


def _escape(text: str) -> str:
    return escape(visible(text))


def _block(block: Block) -> list[str]:
    if isinstance(block, Facts):
        return _facts(block)
    if isinstance(block, Table):
        title = _escape(block.title)
        if not block.is_listed:
            return [f"<h2>{title}</h2>", *_table(block)]
        rows = _table(shortened(block, _LISTED, "in the tree below"))
        return ["<details>", f"<summary>{title}</summary>", *rows, "</details>"]
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
        items.append(f"<li>{label} {_escape(problem.problem)} @ {_name(problem.key)}</li>")
    return ["<ul>", *items, "</ul>"]


def _facts(block: Facts) -> list[str]:
    rows = []
    for label, value in block.pairs:
        rows.append(f"<tr><th>{_escape(label)}</th>{_cell('td', cell(value))}</tr>")
    return ['<div class="scroll"><table>', *rows, "</table></div>"]


def _group(group: KeyGroup, most: int | None) -> list[str]:
    """Return the keys of a group; a list is cut if its rows are in the tree too."""
    rows = []
    for left, right, detail in group.rows[:most]:
        names = [_name(name) for name in dict.fromkeys((left, right)) if name]
        text = " &rarr; ".join(names)
        if detail:
            text += f": {_escape(detail)}"
        rows.append(f"<li>{text}</li>")
    heading = f"<h3>{_escape(group.heading)}</h3>"
    return [heading, '<ul class="names">', *rows, "</ul>", *_footer(group.footer)]


def _name(key: str) -> str:
    return _cell("span", Cell(key, "key"))


def _label(severity: str) -> str:
    return f'<strong class="{severity}">{severity}:</strong>'


def _cell(tag: str, entry: Cell, title: str = "") -> str:
    start = tag
    if entry.role != "plain":
        start += f' class="{entry.role}"'
    if title:
        start += f' data-title="{_escape(title)}"'
    text = _escape(entry.text)
    if entry.role == "key":  # a name is broken after dots only
        text = text.replace(".", ".<wbr>")
    if entry.bar is not None:
        text = f'<meter value="{entry.bar:.3f}"></meter>{text}'
    return f"<{start}>{text}</{tag}>"


def _table(table: Table) -> list[str]:
    """On a narrow screen the cells of a row are below each other, each with the title of its
    column.
    """
    header = ""
    for column in table.columns:
        role: Role = "number" if column.role == "number" else "plain"
        header += _cell("th", Cell(column.title, role))
    kind = ' class="stacked"' if len(table.columns) > _ABREAST else ""
    lines = [f'<div class="scroll"><table{kind}>', f"<thead><tr>{header}</tr></thead>"]
    for row in table.cells:
        cells = ""
        for entry, column in zip(row, table.columns):
            cells += _cell("td", entry, column.title)
        lines.append(f"<tr>{cells}</tr>")
    return [*lines, "</table></div>", *_footer(table.footer)]
