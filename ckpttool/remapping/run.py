"""All of `remap`: from options to a written checkpoint."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.options import expand_options
from ckpttool.core.text import Info, Note, listed, plural, some
from ckpttool.formats.fit import check_in_place
from ckpttool.io import progress as io_progress
from ckpttool.io import sources
from ckpttool.operands.checkpoint import Ckpt, open_checkpoint, split
from ckpttool.operands.model import ModelOperand, operand_of
from ckpttool.operands.output import Target, target_for
from ckpttool.remapping.carried_code import CarriesCode
from ckpttool.remapping.loads import LoadAnswer, how_model_loads, loaded_by
from ckpttool.remapping.options import ConvertOptions, RemapOptions
from ckpttool.remapping.output import (
    check_other_files,
    command_without,
    fitted,
    with_metadata,
    with_recorded_names,
    write_output,
)
from ckpttool.remapping.planning import plan_remap
from ckpttool.remapping.resolve import loading_model
from ckpttool.remapping.result import Remap
from ckpttool.remapping.unchanged import checked_copy
from ckpttool.remapping.write import Writer, recover_source

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
        The plan, the new index, and how it was written.

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
        **options: `force` overwrites OUT; `max_shard_size` is a text: ``5GB``, or ``5000`` bytes.

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
    path, _ = split(source.source)
    writer = Writer(path, options, options.in_place)
    out, target = options.target(source.source), None
    if out is not None:
        target = target_for(out, source, None if conversion is None else conversion.shard_size)
        _check_target(target, source, options, writer)
    model = model or operand_of(options)
    to_model = loading_model(options, model)
    dtype = None if conversion is None else conversion.dtype
    outcome = planned or plan_remap(source, options, model, to_model, dtype)
    if conversion is not None and target is not None:
        outcome = with_metadata(outcome, conversion.pairs, target)
    if dtype is not None:
        outcome = replace(outcome, notes=(*outcome.notes, *_not_cast(outcome.result, dtype)))
    outcome = replace(outcome, source=source.source, output=out or "", dry_run=options.dry_run)
    is_copy_of_what_loads = may_copy and planned is not None
    if not is_copy_of_what_loads:
        outcome = _checked_by_model(outcome, options, model, to_model)
    if not may_copy and not outcome.changes_content:
        outcome = checked_copy(outcome, source, target, options, conversion)
    if target is None:
        return outcome
    output = fitted(outcome, target, options, to_model or model)
    outcome = with_recorded_names(outcome, target)
    check_other_files(source.source, target, output, options, conversion)
    try:
        return write_output(source, output, options, writer, target, outcome, to_model, lays_out)
    except CarriesCode as error:
        if error.paths:
            line = command_without(error.paths, source.source, options, conversion)
            error.hint = f"to leave it out: {line}; {error.hint}"
        raise


def _check_target(
    target: Target, source: Checkpoint, options: RemapOptions, writer: Writer
) -> None:
    """Raise `CkptError` if OUT cannot or must not be written, or not in place."""
    if options.in_place:
        check_in_place(source, target.format)
    if options.dry_run:
        return
    like = options.like
    if isinstance(like, Checkpoint):
        like = like.source
    others = [split(like)[0]] if isinstance(like, str) else []
    writer.check(target, *others)


def _not_cast(result: Checkpoint, dtype: str) -> list[Note]:
    """Return a note on what a conversion to `dtype` leaves as it is."""
    dtypes: Counter[str] = Counter()
    for section in result.state_dicts:
        dtypes.update(entry.dtype for entry in section.tensors if entry.dtype != dtype)
    rest = [plural(count, f"{name} tensor") for name, count in dtypes.items()]
    if result.optimizers:
        rest.append("the optimizer state")
    return [Info(f"not cast: {listed(rest)}", "remap")] if rest else []


def _checked_by_model(
    outcome: Remap, options: RemapOptions, model: ModelOperand | None, to_model: ModelOperand | None
) -> Remap:
    """Return the result with notes on how a model loads it. Raise `Refused`, all problems at once,
    if it does not.
    """
    answer = how_model_loads(outcome, options, loaded_by(options, model, to_model))
    if answer is None:
        named = to_model or model
        answer = LoadAnswer("the model" if named is None else named.title, outcome.missing)
    answer.check(options.partial)
    notes = [*outcome.notes]
    if answer.missing:
        count = plural(len(answer.missing), "key")
        notes.append(f"missing {count} of the model: {some(answer.missing, 20)}")
    return replace(outcome, missing=answer.missing, notes=(*notes, *answer.notes))
