"""Tell whether a remap would change anything; if not, say what would."""

from __future__ import annotations

from dataclasses import replace

from ckpttool.core.checkpoint import Checkpoint, Span
from ckpttool.core.errors import CkptError, Problem, Refused
from ckpttool.core.text import Info, dotted
from ckpttool.formats.folders import checkpoint_files
from ckpttool.formats.registry import format_of
from ckpttool.io.files import is_dir, size
from ckpttool.io.paths import join, parent
from ckpttool.io.pieces import Link, nbytes_of
from ckpttool.naming.convert import ModelForm
from ckpttool.naming.wrappers import evidence_in, is_lightning
from ckpttool.operands.checkpoint import open_operand, split
from ckpttool.operands.output import Target, command, outputs
from ckpttool.remapping.options import ConvertOptions, RemapOptions
from ckpttool.remapping.plan import remap as remap_index
from ckpttool.remapping.result import Remap, changes_content
from ckpttool.remapping.steps import Request

_WAYS = "--rule, --to FORM, --like CKPT, --drop PATTERN; another ending of OUT converts the format"


def _changes_form(source: Checkpoint, target: Target, outcome: Remap) -> bool:
    """Return whether OUT is another kind of file or folder than the source, or has other shards, or
    is a part of it.
    """
    path, picked = split(source.source)
    if picked is not None or source.format != target.format.name:
        return True
    if not target.format.folder:
        return is_dir(path) != (target.folder is not None)
    if target.max_shard_size is None:
        return False
    home = path if is_dir(path) else parent(path)
    present = set(checkpoint_files(home, target.format.index))
    files = target.format.layout_files(outcome.result, target.name, target.max_shard_size)
    for name, content in files.items():
        if name.endswith(".json"):
            continue
        if name not in present:
            return True
        present.remove(name)
        if not isinstance(content, Link) and nbytes_of(content) != size(join(home, name)):
            return True
    return any(not name.endswith(".json") for name in present)


def checked_copy(
    outcome: Remap,
    source: Checkpoint,
    target: Target | None,
    options: RemapOptions,
    conversion: ConvertOptions | None,
) -> Remap:
    """Return a result that changes no content, with a note if OUT would be a copy and the options
    say what it must hold. Raise `Refused` if nothing would change otherwise.
    """
    if target is not None and _changes_form(source, target, outcome):
        return outcome
    if outcome.result.metadata != source.metadata or not _is_as_saved(source):
        return outcome
    if conversion is not None:
        if format_of(source).holds_unused_bytes(source):
            return outcome
        raise Refused(
            f"nothing to convert: {outcome.output} would have the format and the shards of"
            f" {source.source}",
            hint="another ending of OUT changes the format, --max-shard-size the shards,"
            " --dtype the dtypes; `ckpttool remap` changes the keys; `cp` copies a file",
        )
    already = _already_there(options)
    if already is None or options.in_place:
        _refuse_unchanged(source, options, already)
    note = Info(f"{already}: nothing renamed", "remap")
    return replace(outcome, notes=(*outcome.notes, note))


def _is_as_saved(source: Checkpoint) -> bool:
    """Return True if the index is unchanged since it was read from the file it names."""
    if source.in_memory:
        return True
    try:
        saved = open_operand(source.source)
    except CkptError:
        return False
    return _spans(source) == _spans(saved)


def _spans(checkpoint: Checkpoint) -> list[tuple[str, Span | None]]:
    spans = []
    for section in checkpoint.sections:
        spans += [(entry.key, entry.span) for entry in section.tensors]
    return spans


def _already_there(options: RemapOptions) -> str | None:
    """Return what the source already is, if the options say what OUT must hold; then a copy is an
    answer.
    """
    if options.like is not None:
        return "the keys are already the keys of --like"
    if options.form is not None:
        return f"the keys are already {options.form}"
    if options.to_model is not None:
        return "the keys are already the keys of --to-model"
    if options.optimizer_keys is not None or options.to_optimizer is not None:
        return "the optimizer is already as requested"
    if options.has_rules:
        return "the tensors are already what the rules make of them"
    return None


def _refuse_unchanged(source: Checkpoint, options: RemapOptions, already: str | None) -> None:
    """Raise `Refused`, with the wrappers that the keys show and the command that removes them."""
    if already is None:
        out = options.target(source.source)
        already = f"{out} would hold what {source.source} holds"
        if not out:
            already = "no option asks for a change"
    forms: list[str] = []
    problems: list[Problem] = []
    for section in source.state_dicts:
        wrappers = evidence_in(section, lightning=is_lightning(source))
        if not wrappers.form:
            continue
        forms.append(wrappers.form)
        for path in (*wrappers.root, *sorted(wrappers.inside)):
            _, _, segment = path.rpartition(".")
            problems.append(Problem(f"wrapper: {segment}", dotted(section.path, path)))
    hint = f"say what to change: {_WAYS}"
    if forms:
        already += f"; their names show wrappers: {forms[0]}"
        command = _unwrapping(source, options)
        if command is not None:
            hint = f"remove the wrappers: {command}"
    raise Refused(f"nothing to change: {already}", hint=hint, problems=problems)


def _unwrapping(source: Checkpoint, options: RemapOptions) -> str | None:
    """Return the command that removes the wrappers; None if it would be refused too."""
    if options.form is ModelForm.SERIALIZED:
        return None
    try:
        outcome = remap_index(source, Request(RemapOptions(to="serialized"), ""))
    except CkptError:
        return None
    if not changes_content(source, outcome):
        return None
    out = None
    if not options.in_place:
        out = options.out or next(outputs(source.source, "unwrapped"))
    unwrapping = RemapOptions(to="serialized", out=out, in_place=options.in_place)
    return command("remap", (source.source,), unwrapping)
