"""Write the result of a remap, or edit the source in place."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from ckpttool.containers.pickle_write import dangerous_written
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.errors import Problem, Refused, same_problem
from ckpttool.core.names import SERIALIZED
from ckpttool.core.pickle_imports import dangerous
from ckpttool.core.text import Info, dotted, shell, some, title_of
from ckpttool.distributed.job import only_first
from ckpttool.evaluate.compare import fingerprints
from ckpttool.formats.fit import (
    fit,
    holds_tensors_only,
    loses_versions,
    losses,
    recorded_aliases,
)
from ckpttool.io.paths import name as name_of
from ckpttool.io.pieces import Edited, Files, Piece
from ckpttool.io.undo import edit, not_in_place
from ckpttool.naming.convert import ModelForm
from ckpttool.operands.model import ModelOperand
from ckpttool.operands.output import Target, command, outputs
from ckpttool.remapping.carried_code import check_code, copied_imports
from ckpttool.remapping.companions import Companions, companions_of
from ckpttool.remapping.options import ConvertOptions, RemapOptions
from ckpttool.remapping.result import Remap, Undo
from ckpttool.remapping.write import Cost, Decided, Writer, cost_of


def with_metadata(outcome: Remap, pairs: Mapping[str, str], target: Target) -> Remap:
    """Return the result with more metadata. Raise `Refused` if the output has no place for it, or
    if a pair would be read as a second name of a tensor.
    """
    if not pairs:
        return outcome
    if not target.format.holds.metadata:
        raise Refused(
            f"{target.format.title} has no place for --metadata",
            hint="choose an output that ends in .safetensors",
        )
    keys: set[str] = set()
    for section in outcome.result.state_dicts:
        keys.update(section.keys)
    problems = []
    for key, value in pairs.items():
        if value in keys:
            problems.append(Problem(f"{value} is a tensor: {key} would be its second name", key))
    if problems:
        raise Refused("metadata would name tensors", hint="choose another VALUE", problems=problems)
    result = replace(outcome.result, metadata={**outcome.result.metadata, **pairs})
    return replace(outcome, result=result)


def fitted(
    outcome: Remap, target: Target, options: RemapOptions, loads: ModelOperand | None
) -> Checkpoint:
    """Return the result as the output can hold it; `loads` will load it. Raise `Refused` if the
    output cannot.
    """
    # no model loads such names
    runtime = isinstance(options.form, ModelForm) and options.form.names != SERIALIZED
    if loads is not None and not runtime and loses_versions(outcome.result, target.format):
        _check_versions(loads, f"{target.format.title} has", "choose an output that ends in .pt")
    return fit(outcome.result, target.format, keep_aliases=options.keep_aliases)


def with_recorded_names(outcome: Remap, target: Target) -> Remap:
    """Return the remap with the second names that the metadata of the source records, if the output
    has a place for them.
    """
    aliases = recorded_aliases(outcome.result)
    if not aliases or holds_tensors_only(target.format):
        return outcome
    by_place = {output.place: output for output in outcome.plan.outputs}
    (section,) = outcome.result.sections
    added = []
    for name, key in aliases.items():
        output = by_place.get((section.path, key))
        if output is not None:
            added.append(replace(output, key=name))
    plan = replace(outcome.plan, outputs=(*outcome.plan.outputs, *added))
    return replace(outcome, plan=plan)


def check_other_files(
    source: str,
    target: Target,
    output: Checkpoint,
    options: RemapOptions,
    conversion: ConvertOptions | None,
) -> None:
    """Raise `Refused`, with the command that leaves them out, if the output has no place for other
    files of the folder.
    """
    names = target.without_place(output)
    if not names or options.in_place:
        return
    line = command_without(_patterns(names, output), source, options, conversion)
    raise Refused(
        "not everything would be written",
        hint=f"to leave {'it' if len(names) == 1 else 'them'} out: {line}",
        problems=same_problem("a file of the folder, which OUT has no place for", names),
    )


def command_without(
    patterns: Sequence[str],
    source: str,
    options: RemapOptions,
    conversion: ConvertOptions | None,
) -> str:
    """Return the command that drops keys and does the same otherwise; two for a conversion that no
    remap does.
    """
    without = replace(options, drop=(*(options.drop or ()), *patterns))
    if conversion is None or not (conversion.dtype or conversion.metadata):
        return command("remap", (source,), without)
    *_, rest = outputs(source, "rest")
    first = command("remap", (source,), replace(without, out=rest))
    return f"{first} && {command('convert', (rest,), conversion)}"


def _patterns(names: Sequence[str], output: Checkpoint) -> list[str]:
    """Return names of files with ``*`` for numbers; the names if that would match anything else."""
    patterns = list(dict.fromkeys(re.sub(r"\d+", "*", name) for name in names))
    kept = list(output.others)
    for section in output.sections:
        kept += [dotted(section.path, key) for key in section.keys]
    for path in kept:
        if any(fnmatchcase(path, pattern) for pattern in patterns):
            return list(names)
    return patterns


def _check_versions(model: ModelOperand, target: str, hint: str) -> None:
    """Raise `Refused` if `model`, which will load the output, needs module versions, which `target`
    cannot hold.
    """
    versions = model.names().versions
    if versions is None:
        return
    raise Refused(
        f"{model.title} loads other values where module versions (_metadata) are absent, and"
        f" {target} no place for "
        "them",
        hint=hint,
        problems=[Problem("saved with a version", title_of(path)) for path in versions],
    )


def write_output(
    source: Checkpoint,
    output: Checkpoint,
    options: RemapOptions,
    writer: Writer,
    target: Target,
    outcome: Remap,
    to_model: ModelOperand | None,
    lays_out: bool,
) -> Remap:
    """Write the output, unless it is a dry run. Return the result with notes on what the output
    does not hold.
    """
    notes = [*outcome.notes, *losses(outcome.result, target.format)]
    if target.max_shard_size is not None and not target.format.sharded:
        notes.append(
            f"--max-shard-size changes nothing: {target.path} has no shards (OUT/ is"
            " a folder of them)"
        )
    new_base: list[str] = []
    if options.to_model is not None and to_model is not None:
        new_base = [tensor.canonical for tensor in to_model.names().runtime]
    described = options.form is ModelForm.PRETRAINED
    companions = companions_of(source, outcome.plan, outcome.result, target, new_base, described)
    outcome = replace(
        outcome,
        result=output,
        notes=(*notes, *companions.notes),
        companions=companions if str(companions) else None,
        format=target.format.title,
    )
    if options.in_place:
        return _edit_in_place(source, options, writer, target, outcome, companions)
    if not lays_out and target.format.check_holds(output):
        _check_code(options, output, set(), companions)
        return outcome
    files = _laid_out(options, target, output, companions)
    if options.dry_run:
        return replace(outcome, cost=cost_of(files))
    writer.target(target, files, _decided(outcome))
    if not options.verify:
        return outcome
    return replace(outcome, verified=writer.prove(target.path, output))


_PICKLES = (".bin", ".pt", ".pth", ".pkl")  # of the other files of a folder


def _laid_out(
    options: RemapOptions, target: Target, output: Checkpoint, companions: Companions
) -> Files:
    """Return the files of the output. Raise `Refused` if loading them would run code, unless that
    is requested.

    What is laid out inside of a program is written later, so everything that the program imports
    counts.
    """
    with dangerous_written() as names:
        files = target.lay_out(output, companions.files)
    names |= copied_imports(output, target.format, files)
    if target.format.holds.programs:
        names |= {imported.name for imported in dangerous(output.imports)}
    _check_code(options, output, names, companions)
    return files


def _check_code(
    options: RemapOptions, output: Checkpoint, names: set[str], companions: Companions
) -> None:
    """Raise `Refused` if loading the output, which imports `names`, or a pickle next to it would
    run code, unless that is requested.
    """
    if options.keep_pickled_code:
        return
    pickles = []
    for path in companions.files.values():
        if isinstance(path, str) and path.endswith(_PICKLES):
            pickles.append(path)
    check_code(output, names, pickles)


def _edit_in_place(
    source: Checkpoint,
    options: RemapOptions,
    writer: Writer,
    target: Target,
    outcome: Remap,
    companions: Companions,
) -> Remap:
    """Change the source where it is, unless it is a dry run. Raise `Refused` if more than names
    would change.
    """
    only_first()
    path, output = target.path, outcome.result
    files = _layout_in_place(source, options, target, output)
    edited: dict[str, Edited] = {}
    for name, content in companions.files.items():
        if isinstance(content, bytes):
            edited[name] = Edited([Piece(content)], companions.before[name], content)
    edited.update(files)
    expected = fingerprints(output) if options.verify and not options.dry_run else None
    written = edit(edited, target.home, fsync=not options.no_fsync, dry_run=options.dry_run)
    undo = Undo.of(path, written.kept) if written.nbytes else None
    outcome = replace(outcome, written=written, undo=undo)
    if options.dry_run:
        return replace(outcome, cost=Cost(0, written.nbytes, 0))
    if expected is not None:
        outcome = replace(outcome, verified=writer.prove(path, expected))
    if outcome.plan.dropped:
        kept_bytes = f"{path} still holds the bytes of what was left out"
        if target.format.drops_unused_bytes:
            copy = shell("ckpttool", "convert", path, "-o", next(outputs(path, "copy")))
            kept_bytes += f"; a copy does not: {copy}"
        outcome = replace(outcome, notes=(*outcome.notes, Info(kept_bytes, "remap")))
    return outcome


def _layout_in_place(
    source: Checkpoint, options: RemapOptions, target: Target, output: Checkpoint
) -> Mapping[str, Edited]:
    """Return the edits of the weights. Raise `Refused` if more than names would change, or if
    loading them would run code, unless that is requested.
    """
    with dangerous_written() as names:
        files = target.format.layout_in_place(output, target.name or name_of(target.path))
    if files is None:
        raise not_in_place(
            target.path, "more than names would change, or the format has no place for new ones"
        )
    gone = [name for name in source.other_files if name not in output.other_files]
    if gone:
        raise not_in_place(target.path, f"other files of the folder would be removed: {some(gone)}")
    if not options.keep_pickled_code:
        if target.format.links_pickles:  # pickles in data files stay where they are
            files_of_all = target.format.layout_files(output, target.name)
            names |= copied_imports(output, target.format, files_of_all)
        check_code(output, names)
    return files


def _decided(outcome: Remap) -> Decided | None:
    return None if outcome.plan.runs else outcome.plan.to_json
