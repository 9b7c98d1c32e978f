"""Refuse to write dangerous imports into an output, unless the user asks for it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace

from ckpttool.checkpoint import Checkpoint, Span
from ckpttool.errors import Problem, Refused
from ckpttool.formats.dcp.items import BytesItem
from ckpttool.formats.dcp.metadata import parse
from ckpttool.formats.recognise_folder import DCP_METADATA
from ckpttool.formats.torch.pickled_code import entries_with_code
from ckpttool.imports import Import, dangerous
from ckpttool.io.pieces import Files, Link
from ckpttool.io.ranges import read_span
from ckpttool.words import shell

KEEP = "--keep-pickled-code"


def copied(output: Checkpoint, files: Files) -> set[str]:
    """Return the names of the dangerous imports whose pickles are copied into the files byte for byte."""
    found = dangerous(output.imports)
    if not found:
        return set()
    linked = {name: os.path.realpath(content.path) for name, content in files.items() if isinstance(content, Link)}
    listed = _listed(found, files, linked) if DCP_METADATA in files else None
    links = set(linked.values()) if listed is None else set()
    spans = [
        piece.data
        for content in files.values()
        if not isinstance(content, Link)
        for piece in content
        if isinstance(piece.data, Span)
    ]
    return {
        one.name for one in found if os.path.realpath(one.file) in links or any(_overlaps(one, span) for span in spans)
    } | (listed or set())


def _listed(found: tuple[Import, ...], files: Files, linked: dict[str, str]) -> set[str]:
    """Return the names of those imports that are in a linked data file of torch.distributed.checkpoint and are read.

    The bytes of dropped entries stay in such a file, and ``.metadata`` does not list them. Equal objects are read once,
    so an object's own bytes tell what it imports.
    """
    content = files[DCP_METADATA]
    assert not isinstance(content, Link)
    text = b"".join(piece.data for piece in content if isinstance(piece.data, bytes))
    pickles = {one: bytes(read_span(Span(one.file, one.start, one.end - one.start))) for one in found}
    names = set()
    for item in parse(text, DCP_METADATA).items.values():
        for place in [item.place] if isinstance(item, BytesItem) else [chunk.place for chunk in item.chunks]:
            if place.name not in linked:
                continue
            span = Span(linked[place.name], place.offset, place.length)
            raw = bytes(read_span(span)) if isinstance(item, BytesItem) else b""
            names |= {
                one.name
                for one, pickle in pickles.items()
                if pickle in raw or _overlaps(replace(one, file=os.path.realpath(one.file)), span)
            }
    return names


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
