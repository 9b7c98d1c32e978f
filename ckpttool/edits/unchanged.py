"""Refuses a remap that would write what its source already holds: a command that changes nothing is not a success."""

from __future__ import annotations

from ckpttool.checkpoint import Checkpoint, Section
from ckpttool.edits.remap.options import RemapOptions
from ckpttool.edits.remap.remap import remap
from ckpttool.edits.remap.request import RemapRequest
from ckpttool.edits.remap.result import Remap
from ckpttool.errors import CkptError, Problem, Refused
from ckpttool.expression import Ref
from ckpttool.formats.recognise_folder import checkpoint_files
from ckpttool.formats.table import MEMORY
from ckpttool.io.files import is_dir, size
from ckpttool.io.paths import join, parent
from ckpttool.io.pieces import Link, nbytes_of
from ckpttool.naming.model_form import ModelForm
from ckpttool.naming.wrappers.chain import Evidence, infer, is_lightning
from ckpttool.operands.checkpoint import open_operand, split
from ckpttool.operands.output import Target
from ckpttool.operands.printed import operand, outputs
from ckpttool.words import shell

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
    """Return whether the index is that of the file it names, and not what a call from Python made of one."""
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
