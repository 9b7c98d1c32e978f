"""Refuse to write dangerous imports into an output, unless the user asks for it."""

from __future__ import annotations

import os
from collections.abc import Iterable

from ckpttool.checkpoint import Checkpoint, Span
from ckpttool.errors import Problem, Refused
from ckpttool.formats.torch.pickled_code import entries_with_code
from ckpttool.imports import Import, dangerous
from ckpttool.io.pieces import Files, Link
from ckpttool.words import shell

KEEP = "--keep-pickled-code"


def copied(imports: tuple[Import, ...], files: Files) -> set[str]:
    """Return the names of the dangerous imports whose pickles are copied into the files byte for byte."""
    found = dangerous(imports)
    if not found:
        return set()
    links = {os.path.realpath(content.path) for content in files.values() if isinstance(content, Link)}
    spans = [
        piece.data
        for content in files.values()
        if not isinstance(content, Link)
        for piece in content
        if isinstance(piece.data, Span)
    ]
    return {
        one.name for one in found if os.path.realpath(one.file) in links or any(_overlaps(one, span) for span in spans)
    }


def _overlaps(one: Import, span: Span) -> bool:
    return span.path == one.file and span.offset < one.end and one.start < span.offset + span.length


def check_code(output: Checkpoint, names: Iterable[str]) -> None:
    """Raise `Refused` if the output carries dangerous imports with these names."""
    left = set(names)
    if not left:
        return
    by_path: dict[str, list[str]] = {}
    for path, name in entries_with_code(output):
        by_path.setdefault(path or "(root)", []).append(name)
        left.discard(name)
    problems = [Problem(f"imports {', '.join(dict.fromkeys(own))}", path) for path, own in by_path.items()]
    problems += [Problem("a dangerous import of the file's pickle", name) for name in sorted(left)]
    drop = shell(*(word for path in by_path for word in ("--drop", path)))
    out = f"leave it out: {drop}; or carry it on: {KEEP}" if drop and not left else f"carry it on: {KEEP}"
    raise Refused("the output would run code when it is loaded: dangerous pickle imports", hint=out, problems=problems)
