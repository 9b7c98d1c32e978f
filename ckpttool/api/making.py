"""Verbs that make something new: a remap, a swap."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, overload

from ckpttool.api.reading import Ckpt, open_checkpoint
from ckpttool.api.takes import takes
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.errors import CkptError
from ckpttool.core.text import a
from ckpttool.distributed.job import current
from ckpttool.formats.registry import MANIFEST
from ckpttool.io import progress as io_progress
from ckpttool.io import sources
from ckpttool.io.files import settle
from ckpttool.operands.checkpoint import split
from ckpttool.remapping.options import RemapOptions
from ckpttool.swap.swap import SwapOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ckpttool.api.keywords import RemapKeywords, SwapKeywords, WriteKeywords
    from ckpttool.io.progress import Progress
    from ckpttool.live.swap import Swappable, Swapped
    from ckpttool.remapping.plan import Remap
    from ckpttool.remapping.undo import Undone
    from ckpttool.swap.swap import Swap


def _with_values(ckpt: Ckpt) -> Checkpoint:
    checkpoint = open_checkpoint(ckpt)
    if checkpoint.format == MANIFEST.name:
        raise CkptError(f"{checkpoint.source} is a manifest: digests, and no values", hint="name the checkpoint itself")
    return checkpoint


@takes(RemapOptions)
def remap(
    ckpt: Ckpt, out: str | None = None, *, progress: Progress | None = None, **options: Unpack[RemapKeywords]
) -> Remap:
    """Rewrites the keys, optimizer ids and format of a checkpoint; writes OUT where one is named.

    `progress` is called with a title and a number of bytes, and gives a context manager of a function that is told how
    many bytes are done. Raises `Refused`, all problems at once, where something would be lost, collide or have to be
    guessed, `CkptError` where something cannot be read or written.
    """
    sources.begin_call()
    return remap_by(ckpt, RemapOptions(out=out, **options), progress)


def remap_by(ckpt: Ckpt, options: RemapOptions, progress: Progress | None = None) -> Remap:
    """`remap`, with its options as a value."""
    from ckpttool.remapping.run import run, undone

    if options.like is not None and not isinstance(options.like, str):
        options = replace(options, like=open_checkpoint(options.like))
    options.check(ckpt if isinstance(ckpt, str) else None)
    if options.undo:
        return undone(ckpt, options)
    if options.in_place and not options.dry_run and isinstance(ckpt, str):
        _settle(ckpt)
    with io_progress.shown(progress):
        return run(_with_values(ckpt), options)


@overload
def swap_weights(
    program: str,
    new: Ckpt,
    out: str | None = None,
    *,
    progress: Progress | None = None,
    **options: Unpack[SwapKeywords],
) -> Swap: ...


@overload
def swap_weights(
    program: Swappable,
    new: Mapping[str, Any],
    *,
    model: Any = None,
    cast: bool = False,
    constants: bool = False,
    keep_constants: bool = False,
    in_place: bool | None = None,
) -> Swapped: ...


@takes(SwapOptions)
def swap_weights(
    program: Any, new: Any, out: str | None = None, *, progress: Progress | None = None, **options: Any
) -> Swap | Swapped:
    """Puts new weights into an exported program: a file, or a program, module or compiled package in memory.

    A file is ``PATH`` or ``PATH::NAME``, and OUT is written where one is named. For what is in memory, `new` is a state
    dict and the options are those of `live.swap_weights`. Raises `Refused`, all problems at once, where the weights do
    not fit.
    """
    if isinstance(program, str):
        sources.begin_call()
        return swap_weights_by(program, new, SwapOptions(out=out, **options), progress)
    if out is not None:
        raise CkptError(f"{a(program)} is in memory: the swap writes no {out}", hint="leave OUT away, or name a file")
    from ckpttool.live import swap_weights as swap_in_memory

    return swap_in_memory(program, new, **options)


def swap_weights_by(program: str, new: Ckpt, options: SwapOptions, progress: Progress | None = None) -> Swap:
    """`swap_weights` into a file, with its options as a value."""
    from ckpttool.swap.swap import run

    options.check()
    if options.in_place and not options.dry_run:
        _settle(split(program)[0])
    with io_progress.shown(progress):
        return run(program, _with_values(new), options)


def _settle(path: str) -> None:
    """Ends what killed runs began with the files, which are to be written: by one rank, before the others look."""
    job = current()
    if job is None:
        settle(path)
    else:
        job.of_first("settled", lambda: settle(path))


def undo(path: str, *, force: bool = False, no_fsync: bool = False) -> Undone:
    """Roll back an interrupted edit of the file or folder, or else take its last in-place edit back.

    `force`: also an edit that was begun on another machine or in another container, whose process has ended. Raises
    `CkptError` if there is nothing to undo, or if the file has changed since.
    """
    from ckpttool.remapping.undo import undo

    sources.begin_call()
    return undo(path, fsync=not no_fsync, force=force)


# The options of a remap that say how the output is written.
WRITTEN = ("force", "dry_run", "verify", "no_fsync", "keep_aliases", "max_shard_size", "torch_format", "link")


@takes(RemapOptions, only=WRITTEN)
def write(checkpoint: Checkpoint, out: str, **options: Unpack[WriteKeywords]) -> None:
    """Write a checkpoint, as `open_checkpoint` or `remap` gave it, to the file or folder OUT, all of it or nothing.

    Raises `CkptError` where OUT exists (`force` overwrites
    it), `Refused` where its format cannot hold what is in the checkpoint.
    """
    from ckpttool.remapping.run import run

    sources.begin_call()
    chosen = RemapOptions(out=out, **options)
    chosen.check(None)
    run(_with_values(checkpoint), chosen, may_copy=True)
