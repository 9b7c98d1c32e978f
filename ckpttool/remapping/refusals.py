"""Outputs that are refused: nothing changed, or dangerous pickle imports are carried on."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace

from ckpttool.core.checkpoint import Checkpoint, Section, Span
from ckpttool.core.errors import CkptError, Problem, Refused
from ckpttool.core.expression import Ref
from ckpttool.core.pickle_imports import Import, dangerous
from ckpttool.core.text import shell
from ckpttool.formats.dcp.metadata import BytesItem, parse
from ckpttool.formats.detect_folder import DCP_METADATA, checkpoint_files
from ckpttool.formats.registry import MEMORY
from ckpttool.formats.torch.nodes import entries_with_code
from ckpttool.io.files import is_dir, size
from ckpttool.io.paths import join, parent
from ckpttool.io.pieces import Files, Link, nbytes_of
from ckpttool.io.ranges import read_span
from ckpttool.naming.convert import ModelForm
from ckpttool.naming.wrappers import Evidence, infer, is_lightning
from ckpttool.operands.checkpoint import open_operand, split
from ckpttool.operands.output import Target, operand, outputs
from ckpttool.remapping.options import RemapOptions
from ckpttool.remapping.plan import Remap, remap
from ckpttool.remapping.steps import RemapRequest

_WAYS = "--rule, --to FORM, --like CKPT, --drop PATTERN; another ending of OUT converts the format"


def changes_content(source: Checkpoint, done: Remap) -> bool:
    """Return whether the result holds something else than `source`: other names, values, entries or order."""
    plan, result = done.plan, done.result
    if plan.dropped or plan.runs or any(output.source != Ref(output.key) for output in plan.outputs):
        return True
    if result.sections is source.sections:
        return False
    return len(result.sections) != len(source.sections) or not all(map(_same, source.sections, result.sections))


def _same(left: Section, right: Section) -> bool:
    if left is right:
        return True
    modules = [list(own.modules or ()) for own in (left, right)]
    return (
        (left.path, left.kind, left.form, modules[0]) == (right.path, right.kind, right.form, modules[1])
        and left.keys == right.keys
        and left.mapping == right.mapping
    )


def changes_form(source: Checkpoint, target: Target, done: Remap, max_shard_size: int | None) -> bool:
    """Return whether OUT is another kind of file or folder than the source, or has other shards, or is a part of it."""
    path, picked = split(source.source)
    if picked is not None or source.format != target.format.name:
        return True
    if not target.format.folder:
        return is_dir(path) != (target.folder is not None)
    if max_shard_size is None:
        return False
    home = path if is_dir(path) else parent(path)
    files = target.format.layout_files(done.result, target.name, max_shard_size)
    made = {name: content for name, content in files.items() if not name.endswith(".json")}
    present = {name for name in checkpoint_files(home, target.format.endings[0]) if not name.endswith(".json")}
    return made.keys() != present or any(
        not isinstance(content, Link) and nbytes_of(content) != size(join(home, name)) for name, content in made.items()
    )


def is_as_saved(source: Checkpoint) -> bool:
    """Return True if the index is unchanged since it was read from the file it names."""
    if source.format == MEMORY.name:
        return True
    try:
        saved = open_operand(source.source)
    except CkptError:
        return False
    places = [[(entry.key, entry.span) for s in one.sections for entry in s.tensors] for one in (source, saved)]
    return places[0] == places[1]


def already_there(options: RemapOptions) -> str | None:
    """Return what the source already is, if the options name the names that OUT must have; then a copy is an answer."""
    if options.plan is not None:
        return "the plan changes nothing"
    if options.like is not None:
        return "the keys are already those of --like"
    if options.form is not None:
        return f"the keys are already {options.form}"
    if options.to_model is not None:
        return "the keys are already those of --to-model"
    if options.optimizer_keys is not None or options.to_optimizer is not None:
        return "the optimizer is already as requested"
    return None


def refuse_unchanged(source: Checkpoint, options: RemapOptions) -> None:
    """Raise `Refused`, with the wrappers that the keys show and the command that removes them."""
    form, out = options.form, options.target(source.source)
    same = f"{out} would hold what {source.source} holds" if out else "no option asks for a change"
    already = already_there(options) or same
    wrapped = [(section, found) for section in source.state_dicts if (found := _wrappers(source, section)).form]
    command = None if form is ModelForm.SERIALIZED or not wrapped else _unwrapping(source, options)
    problems = [
        Problem(f"wrapper: {path.rpartition('.')[2]}", f"{section.path}.{path}".lstrip("."))
        for section, found in wrapped
        for path in (*found.root, *sorted(found.inside))
    ]
    raise Refused(
        f"nothing to change: {already}" + (f"; their names show wrappers: {wrapped[0][1].form}" if wrapped else ""),
        hint=f"remove the wrappers: {command}" if command else f"say what to change: {_WAYS}",
        problems=problems,
    )


def _wrappers(source: Checkpoint, section: Section) -> Evidence:
    return infer(section.keys, lightning=is_lightning(source))


def _unwrapping(source: Checkpoint, options: RemapOptions) -> str | None:
    """The command that takes the wrappers out; None where it would be refused too."""
    try:
        done = remap(source, RemapRequest(to=ModelForm.SERIALIZED))
    except CkptError:
        return None
    if not changes_content(source, done):
        return None
    named = operand(source.source, source.format)
    out = ["--in-place"] if options.in_place else ["-o", options.out or next(outputs(named, "unwrapped"))]
    return shell("ckpttool", "remap", named, "--to", "serialized", *out)


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
        for place in item.places:
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
