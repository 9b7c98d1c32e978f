"""Reports: a `Document`, or the data of the JSON report, becomes text in one of the formats."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from ckpttool.core.errors import CkptError
from ckpttool.core.tables import owners

if TYPE_CHECKING:
    from ckpttool.report.document import Document
    from ckpttool.report.renderers.text import Terminal

# Format -> the file endings that choose it. The renderer is the module of the same name.
FORMATS: dict[str, tuple[str, ...]] = {
    "text": (".txt",),
    "json": (".json",),
    "markdown": (".md", ".markdown"),
    "github": (),
    "html": (".html", ".htm"),
    "junit": (".xml",),
}
BY_ENDING = owners(FORMATS)


def check_format(name: str) -> str:
    """Return the name. Raises `CkptError` for an unknown format."""
    if name not in FORMATS:
        raise CkptError(f"unknown format {name!r}", hint=f"use one of {', '.join(FORMATS)}")
    return name


def format_of(path: str) -> str:
    """Return the format that the ending of a report file chooses. Raises `CkptError` for an unknown
    ending.
    """
    ending = PurePath(path).suffix.lower()
    if ending not in BY_ENDING:
        raise CkptError(
            f"report file {path!r} has no known ending",
            hint=f"use one of {', '.join(BY_ENDING)}, or redirect the output: --format github >"
            " FILE",
        )
    return BY_ENDING[ending]


def render(
    name: str, document: Document, data: Mapping[str, Any], terminal: Terminal | None = None
) -> str:
    """Return the result in format `name`: JSON from `data`, all others from `document`. `terminal`
    is for text.
    """
    module = import_module(f"ckpttool.report.renderers.{check_format(name)}")
    if name == "json":
        return str(module.render(data))
    if name == "text":
        return str(module.render(document, terminal))
    return str(module.render(document))


# Class -> module and function of its document.
_DOCUMENTS = {
    "Checks": ("names", "check_document"),
    "Diff": ("diff", "document"),
    "Explanation": ("names", "explained"),
    "Inspection": ("inspection", "document"),
    "Names": ("names", "document"),
    "Plan": ("remap", "planned"),
    "Remap": ("remap", "document"),
    "Swap": ("remap", "swapped"),
}


def html(result: Any) -> str | None:
    """Return the report of a result as HTML without scripts or styles, or None for a class without
    a report.
    """
    from ckpttool.report.renderers.html import fragment

    if type(result).__name__ == "Checkpoint":
        from ckpttool.inspection.inspect import inspect

        result = inspect(result)
    document = _document_of(result)
    return None if document is None else fragment(document)


def text(result: Any) -> str | None:
    """Return the lines that the command line prints for a result, the warnings last; None for a
    class without a report.
    """
    from ckpttool.report.document import warnings_apart
    from ckpttool.report.renderers.text import lines

    document = _document_of(result)
    if document is None:
        return None
    shown, warnings = warnings_apart(document)
    parts = [render("text", shown, {}).rstrip("\n")]
    for block in warnings:
        parts += lines(block)
    return "\n".join(parts)


def _document_of(result: Any) -> Document | None:
    place = _DOCUMENTS.get(type(result).__name__)
    if place is None:
        return None
    module, function = place
    make = getattr(import_module(f"ckpttool.report.documents.{module}"), function)
    document: Document = make(result)
    return _in_python(document)


_CUT = "(--all)"  # ends a cell that does not show everything


def _in_python(document: Document) -> Document:
    """Return the document with keywords instead of flags. Commands and text from files stay as they
    are.
    """
    from dataclasses import replace

    from ckpttool.core.options import in_python
    from ckpttool.report.document import Block, Facts, Inline, Keys, Paragraph, Table, cell

    def shortened_cell(inline: Inline) -> Inline:
        shown = cell(inline)
        if not shown.text.endswith(_CUT):
            return inline
        return replace(shown, text=shown.text.removesuffix(_CUT) + in_python(_CUT))

    def changed(block: Block) -> Block:
        if isinstance(block, Paragraph):
            return replace(block, text=in_python(block.text))
        if isinstance(block, Table):
            rows = [tuple(map(shortened_cell, row)) for row in block.rows]
            return replace(block, rows=tuple(rows), footer=in_python(block.footer))
        if isinstance(block, Facts):
            pairs = []
            for label, value in block.pairs:
                pairs.append((label, in_python(value) if isinstance(value, str) else value))
            return replace(block, pairs=tuple(pairs))
        if isinstance(block, Keys):
            groups = []
            for group in block.groups:
                heading, footer = in_python(group.heading), in_python(group.footer)
                groups.append(replace(group, heading=heading, footer=footer))
            return replace(block, groups=tuple(groups))
        return block

    return replace(
        document,
        verdict=in_python(document.verdict),
        lead=tuple(map(changed, document.lead)),
        blocks=tuple(map(changed, document.blocks)),
    )
