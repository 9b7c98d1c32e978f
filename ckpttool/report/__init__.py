"""Reports: a result, as a `Document` and as JSON-able data, becomes text in one of the formats. No one prints here."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from ckpttool.core.errors import CkptError

if TYPE_CHECKING:
    from ckpttool.report.document import Document
    from ckpttool.report.renderers.text import Terminal

# Format name -> the file endings that choose it. The renderer is the module of the same name, imported when it is used.
FORMATS: dict[str, tuple[str, ...]] = {
    "text": (".txt",),
    "json": (".json",),
    "markdown": (".md", ".markdown"),
    "github": (),
    "html": (".html", ".htm"),
}
BY_ENDING = {ending: name for name, endings in FORMATS.items() for ending in endings}


def check_format(name: str) -> str:
    """The name itself. Raises `CkptError` where there is no such format."""
    if name not in FORMATS:
        raise CkptError(f"unknown format {name!r}", hint=f"--format takes one of {', '.join(FORMATS)}")
    return name


def format_of(path: str) -> str:
    """The format that the ending of a report file chooses. Raises `CkptError` where it chooses none."""
    ending = PurePath(path).suffix.lower()
    if ending not in BY_ENDING:
        raise CkptError(
            f"the ending of report file {path!r} names no format",
            hint=f"end it with one of {', '.join(BY_ENDING)}, or redirect the output: --format github > FILE",
        )
    return BY_ENDING[ending]


def render(name: str, document: Document, data: Mapping[str, Any], terminal: Terminal | None = None) -> str:
    """The result in format `name`: JSON from `data`, all else from `document`. `terminal` is for text only."""
    module = import_module(f"ckpttool.report.renderers.{check_format(name)}")
    if name == "json":
        return str(module.render(data))
    return str(module.render(document, terminal) if name == "text" else module.render(document))
