"""All of `remap`: from options to a written checkpoint."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from ckpttool.containers.pickle_write import dangerous_written
from ckpttool.core.checkpoint import Checkpoint, Span
from ckpttool.core.errors import CkptError, Problem, Refused
from ckpttool.core.names import SERIALIZED
from ckpttool.core.options import expand_options
from ckpttool.core.pickle_imports import dangerous
from ckpttool.core.text import Info, Note, dotted, listed, plural, shell, some
from ckpttool.distributed.job import only_first
from ckpttool.evaluate.compare import fingerprints
from ckpttool.formats.fit import check_in_place, fit, loses_versions, losses
from ckpttool.formats.folders import checkpoint_files
from ckpttool.formats.registry import format_of
from ckpttool.io import progress as io_progress
from ckpttool.io import sources
from ckpttool.io.files import is_dir, size
from ckpttool.io.paths import join, parent
from ckpttool.io.paths import name as name_of
from ckpttool.io.pieces import Edited, Files, Link, Piece, nbytes_of
from ckpttool.io.undo import edit, not_in_place
from ckpttool.naming.convert import ModelForm
from ckpttool.naming.wrappers import evidence_in, is_lightning
from ckpttool.operands.checkpoint import (
    Ckpt,
    open_checkpoint,
    open_operand,
    split,
)
from ckpttool.operands.model import ModelOperand, operand_of
from ckpttool.operands.output import Target, command, outputs, target_for
from ckpttool.remapping.companions import Companions, companions_of
from ckpttool.remapping.loads import Loading, loaded_by, loading
from ckpttool.remapping.options import ConvertOptions, RemapOptions
from ckpttool.remapping.plan import remap as remap_index
from ckpttool.remapping.planning import changes_content, plan_remap
from ckpttool.remapping.resolve import loading_model
from ckpttool.remapping.result import Remap
from ckpttool.remapping.steps import Request
from ckpttool.remapping.write import (
    CarriesCode,
    Cost,
    Decided,
    Writer,
    check_code,
    copied_imports,
    cost_of,
    recover_source,
    undo_of,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ckpttool.io.progress import Progress
    from ckpttool.keywords import ConvertKeywords, RemapKeywords, WriteKeywords


@expand_options(RemapOptions)
def remap(
    ckpt: Ckpt,
    out: str | None = None,
    *,
    progress: Progress | None = None,
    **options: Unpack[RemapKeywords],
) -> Remap:
    """Rewrite the keys, optimizer ids and format of a checkpoint, and write OUT if it is named.

    Args:
        ckpt: Anything that `open_checkpoint` takes.
        out: The path to write; its ending chooses the format.
        progress: Is called with a title and a number of bytes, and gives a context manager of a
            function that is told how many bytes are done.
        **options: `rule`, `rules`, `drop`, `select`, `to`, `model` and the others of
            ``ckpttool remap --help``.

    Returns:
        The plan, the new index, and what was written.

    Raises:
        Refused: Something would be lost, collide or have to be guessed; all problems at once.
        CkptError: Something cannot be read or written.

    Example::

        result = ckpttool.remap("wrapped.pt", "plain.safetensors", rule=["module.{x*} => {x*}"])
        print(result.counts["renamed"], result.written)
    """
    return remap_by(ckpt, RemapOptions(out=out, **options), progress)


def remap_by(
    ckpt: Ckpt,
    options: RemapOptions,
    progress: Progress | None = None,
    model: ModelOperand | None = None,
) -> Remap:
    """Return what `remap` returns. `model` is the model of the options, if its names may be read
    already.
    """
    sources.begin_call()
    if options.like is not None and not isinstance(options.like, str):
        options = replace(options, like=open_checkpoint(options.like))
    return _checked_run(ckpt, options, progress, model=model)


def copy_by(
    ckpt: Ckpt, options: RemapOptions, progress: Progress | None, model: ModelOperand
) -> Remap:
    """Return what `remap_by` returns for a checkpoint that `model` loads as it is: OUT is a copy.

    Nothing is written in place. Raise `Refused` if the format of OUT cannot hold the checkpoint, or
    what the model needs of it.
    """
    sources.begin_call()
    options.check(ckpt if isinstance(ckpt, str) else None)
    source, plain = open_checkpoint(ckpt), replace(options, in_place=False)
    planned = plan_remap(source, plain, None, None)
    if options.in_place:
        return replace(planned, source=source.source, output=source.source)
    with io_progress.shown(progress):
        return run(source, plain, may_copy=True, model=model, planned=planned)


@expand_options(ConvertOptions)
def convert(
    ckpt: Ckpt,
    out: str | None = None,
    *,
    progress: Progress | None = None,
    **options: Unpack[ConvertKeywords],
) -> Remap:
    """Write a checkpoint in another format, dtype or with other shards; its keys stay.

    Args:
        ckpt: Anything that `open_checkpoint` takes.
        out: The path to write; its ending chooses the format.
        progress: As for `remap`.
        **options: `dtype` casts the floating-point tensors of all state dicts. `metadata` are texts
            ``KEY=VALUE`` for the header of safetensors. `model` is needed for files of FSDP1 ranks.

    Returns:
        What `remap` returns.

    Raises:
        Refused: Nothing would change, or the format cannot hold it.
        CkptError: Something cannot be read or written.

    Example::

        ckpttool.convert("good.pt", "half.safetensors", dtype="bfloat16")
    """
    sources.begin_call()
    chosen = ConvertOptions(out=out, **options)
    chosen.check()
    return _checked_run(ckpt, chosen.as_remap, progress, chosen)


def _checked_run(
    ckpt: Ckpt,
    options: RemapOptions,
    progress: Progress | None,
    conversion: ConvertOptions | None = None,
    model: ModelOperand | None = None,
) -> Remap:
    options.check(ckpt if isinstance(ckpt, str) else None)
    if options.in_place and not options.dry_run and isinstance(ckpt, str):
        recover_source(ckpt)
    with io_progress.shown(progress):
        return run(open_checkpoint(ckpt), options, conversion=conversion, model=model)


# the options of `write`
WRITTEN = ("force", "dry_run", "verify", "no_fsync", "keep_aliases", "max_shard_size")


@expand_options(ConvertOptions, only=WRITTEN)
def write(checkpoint: Checkpoint, out: str, **options: Unpack[WriteKeywords]) -> None:
    """Write a checkpoint to the file or folder OUT, all or nothing.

    Args:
        checkpoint: What `open_checkpoint` or `remap` returned.
        out: The path to write; its ending chooses the format.
        **options: `force` overwrites OUT; `max_shard_size` is in bytes, or a text such as ``5GB``.

    Raises:
        Refused: The format cannot hold the checkpoint.
        CkptError: OUT exists, or cannot be written.

    Example::

        checkpoint = ckpttool.open_checkpoint("good.pt")
        ckpttool.write(checkpoint, "good.safetensors", force=True)
    """
    sources.begin_call()
    chosen = ConvertOptions(out=out, **options)
    run(open_checkpoint(checkpoint), chosen.as_remap, may_copy=True, conversion=chosen)


def run(
    source: Checkpoint,
    options: RemapOptions,
    *,
    may_copy: bool = False,
    conversion: ConvertOptions | None = None,
    model: ModelOperand | None = None,
    planned: Remap | None = None,
    lays_out: bool = True,
) -> Remap:
    """Return the result of `options` for `source`, written if they name an output and request no
    dry run.

    A `conversion` changes the format, the shards, dtypes and metadata only. `model` is the model of
    the options, if its names may be read already; `planned` is the result of `plan_remap` for these
    options, if it is known; if it `may_copy` too, it is known to load. A dry run that need not know
    its cost `lays_out` nothing.

    Raise `Refused`, all problems at once, if the remap would lose, collide, guess, or change
    nothing (unless it `may_copy`), and `CkptError` if an operand cannot be read or OUT cannot be
    written. Then nothing is written.
    """
    writer = Writer(split(source.source)[0], options, options.in_place)
    out, target = options.target(source.source), None
    if out is not None:
        target = target_for(out, source, None if conversion is None else conversion.shard_size)
        if options.in_place:
            check_in_place(source, target.format)
        if not options.dry_run:
            like = options.like.source if isinstance(options.like, Checkpoint) else options.like
            writer.check(target, *([split(like)[0]] if isinstance(like, str) else []))
    model = model or operand_of(options)
    to_model = loading_model(options, model)
    dtype = None if conversion is None else conversion.dtype
    outcome = planned or plan_remap(source, options, model, to_model, dtype)
    if conversion is not None and target is not None:
        outcome = _with_metadata(outcome, conversion.pairs, target)
    if dtype is not None:
        outcome = replace(outcome, notes=(*outcome.notes, *_not_cast(outcome.result, dtype)))
    outcome = replace(outcome, source=source.source, output=out or "", dry_run=options.dry_run)
    is_copy_of_what_loads = may_copy and planned is not None
    if not is_copy_of_what_loads:
        outcome = _checked_by_model(outcome, options, model, to_model)
    if not (may_copy or outcome.changes_content):
        is_new = target is not None and changes_form(source, target, outcome)
        is_new = is_new or (conversion is not None and format_of(source).holds_unused_bytes(source))
        is_new = is_new or outcome.result.metadata != source.metadata
        if not is_new and is_as_saved(source):
            if conversion is not None:
                raise Refused(
                    f"nothing to convert: {out} would have the format and the shards of"
                    f" {source.source}",
                    hint="another ending of OUT changes the format, --max-shard-size the shards,"
                    " --dtype the dtypes; `ckpttool remap` changes the keys; `cp` copies a file",
                )
            already = already_there(options)
            if already is None or options.in_place:
                refuse_unchanged(source, options)
            outcome = replace(
                outcome, notes=(*outcome.notes, Info(f"{already}: nothing renamed", "remap"))
            )
    if target is None:
        return outcome
    output = fitted(outcome, target, options, to_model or model)
    _check_other_files(source.source, target, output, options, conversion)
    try:
        return _write(source, output, options, writer, target, outcome, to_model, lays_out)
    except CarriesCode as error:
        if error.paths:
            line = _command_without(error.paths, source.source, options, conversion)
            error.hint = f"to leave it out: {line}; {error.hint}"
        raise


def _not_cast(result: Checkpoint, dtype: str) -> list[Note]:
    """Return a note on what a conversion to `dtype` leaves as it is."""
    dtypes: Counter[str] = Counter()
    for section in result.state_dicts:
        dtypes.update(entry.dtype for entry in section.tensors if entry.dtype != dtype)
    rest = [plural(count, f"{name} tensor") for name, count in dtypes.items()]
    if result.optimizers:
        rest.append("the optimizer state")
    return [Info(f"not cast: {listed(rest)}", "remap")] if rest else []


def _with_metadata(outcome: Remap, pairs: Mapping[str, str], target: Target) -> Remap:
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
    keys = {key for section in outcome.result.state_dicts for key in section.keys}
    problems = []
    for key, value in pairs.items():
        if value in keys:
            problems.append(Problem(f"{value} is a tensor: {key} would be its second name", key))
    if problems:
        raise Refused("metadata would name tensors", hint="choose another VALUE", problems=problems)
    result = replace(outcome.result, metadata={**outcome.result.metadata, **pairs})
    return replace(outcome, result=result)


def _checked_by_model(
    outcome: Remap, options: RemapOptions, model: ModelOperand | None, to_model: ModelOperand | None
) -> Remap:
    """Return the result with notes on how a model loads it. Raise `Refused`, all problems at once,
    if it does not.
    """
    loads = loaded_by(options, model, to_model)
    answer = loading(outcome, options, loads)
    if answer is None:
        named = to_model or model
        answer = Loading("the model" if named is None else named.title, outcome.missing)
    answer.check(options.partial)
    notes = outcome.notes
    if answer.missing:
        count = plural(len(answer.missing), "key")
        notes = (*notes, f"missing {count} of the model: {some(answer.missing, 20)}")
    return replace(outcome, missing=answer.missing, notes=(*notes, *answer.notes))


# Writing


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


def _check_other_files(
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
    line = _command_without(_patterns(names, output), source, options, conversion)
    raise Refused(
        "not everything would be written",
        hint=f"to leave {'it' if len(names) == 1 else 'them'} out: {line}",
        problems=[Problem("a file of the folder, which OUT has no place for", n) for n in names],
    )


def _command_without(
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
    kept = [dotted(section.path, key) for section in output.sections for key in section.keys]
    for path in (*kept, *output.others):
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
        problems=[Problem("saved with a version", path or "(root)") for path in versions],
    )


def _write(
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
    notes = (*outcome.notes, *losses(outcome.result, target.format))
    if target.max_shard_size is not None and not target.format.sharded:
        notes = (
            *notes,
            f"--max-shard-size changes nothing: {target.path} has no shards (OUT/ is"
            " a folder of them)",
        )
    loaded_by_other = None if options.to_model is None else to_model
    new_base = (
        []
        if loaded_by_other is None
        else [tensor.canonical for tensor in loaded_by_other.names().runtime]
    )
    described = options.form is ModelForm.PRETRAINED
    companions = companions_of(source, outcome.plan, outcome.result, target, new_base, described)
    notes = (*notes, *companions.notes)
    outcome = replace(
        outcome,
        result=output,
        notes=notes,
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
    return (
        replace(outcome, verified=writer.prove(target.path, output)) if options.verify else outcome
    )


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
    pickles = (
        path
        for path in companions.files.values()
        if isinstance(path, str) and path.endswith(_PICKLES)
    )
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
    output = outcome.result
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
    new = {
        name: content for name, content in companions.files.items() if isinstance(content, bytes)
    }
    files = {
        **{
            name: Edited([Piece(text)], companions.before[name], text) for name, text in new.items()
        },
        **files,
    }
    expected = fingerprints(output) if options.verify and not options.dry_run else None
    written = edit(files, target.home, fsync=not options.no_fsync, dry_run=options.dry_run)
    outcome = replace(
        outcome,
        written=written,
        undo=undo_of(target.path, written.kept) if written.nbytes else None,
    )
    if options.dry_run:
        return replace(outcome, cost=Cost(0, written.nbytes, 0))
    if expected is not None:
        outcome = replace(outcome, verified=writer.prove(target.path, expected))
    if outcome.plan.dropped:
        kept_bytes = f"{target.path} still holds the bytes of what was left out"
        if target.format.drops_unused_bytes:
            copy = shell(
                "ckpttool", "convert", target.path, "-o", next(outputs(target.path, "copy"))
            )
            kept_bytes += f"; a copy does not: {copy}"
        outcome = replace(outcome, notes=(*outcome.notes, Info(kept_bytes, "remap")))
    return outcome


def _decided(outcome: Remap) -> Decided | None:
    return None if outcome.plan.runs else outcome.plan.to_json


# Nothing to change

_WAYS = "--rule, --to FORM, --like CKPT, --drop PATTERN; another ending of OUT converts the format"


def changes_form(source: Checkpoint, target: Target, outcome: Remap) -> bool:
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
    files = target.format.layout_files(outcome.result, target.name, target.max_shard_size)
    shards = {name: content for name, content in files.items() if not name.endswith(".json")}
    present = {
        name for name in checkpoint_files(home, target.format.index) if not name.endswith(".json")
    }
    if shards.keys() != present:
        return True
    for name, content in shards.items():
        if not isinstance(content, Link) and nbytes_of(content) != size(join(home, name)):
            return True
    return False


def is_as_saved(source: Checkpoint) -> bool:
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


def already_there(options: RemapOptions) -> str | None:
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


def refuse_unchanged(source: Checkpoint, options: RemapOptions) -> None:
    """Raise `Refused`, with the wrappers that the keys show and the command that removes them."""
    form, out = options.form, options.target(source.source)
    same = f"{out} would hold what {source.source} holds" if out else "no option asks for a change"
    already = already_there(options) or same
    forms: list[str] = []
    problems: list[Problem] = []
    for section in source.state_dicts:
        wrappers = evidence_in(section, lightning=is_lightning(source))
        if not wrappers.form:
            continue
        forms.append(wrappers.form)
        for path in (*wrappers.root, *sorted(wrappers.inside)):
            text = f"wrapper: {path.rpartition('.')[2]}"
            problems.append(Problem(text, dotted(section.path, path)))
    may_unwrap = forms and form is not ModelForm.SERIALIZED
    command = _unwrapping(source, options) if may_unwrap else None
    raise Refused(
        f"nothing to change: {already}"
        + (f"; their names show wrappers: {forms[0]}" if forms else ""),
        hint=f"remove the wrappers: {command}" if command else f"say what to change: {_WAYS}",
        problems=problems,
    )


def _unwrapping(source: Checkpoint, options: RemapOptions) -> str | None:
    """The command that takes the wrappers out; None where it would be refused too."""
    try:
        outcome = remap_index(source, Request(RemapOptions(to="serialized"), ""))
    except CkptError:
        return None
    if not changes_content(source, outcome):
        return None
    out = None if options.in_place else options.out or next(outputs(source.source, "unwrapped"))
    asked = RemapOptions(to="serialized", out=out, in_place=options.in_place)
    return command("remap", (source.source,), asked)
