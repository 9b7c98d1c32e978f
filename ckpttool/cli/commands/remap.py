"""``ckpttool remap``."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import ckpttool
from ckpttool.cli.output import Manifest, Report, write_manifest, write_text
from ckpttool.core.errors import CkptError
from ckpttool.core.options import Argument, keywords_of
from ckpttool.core.text import shell
from ckpttool.io.files import files_of
from ckpttool.operands.checkpoint import split
from ckpttool.remapping.options import RemapOptions


def command(
    options: RemapOptions,
    report: Report,
    ckpt: Annotated[str | None, Argument("CKPT", "The checkpoint to read; CKPT::SECTION takes one section.")] = None,
    manifest: Manifest = None,
) -> None:
    """Rewrite the keys, optimizer ids and format of a checkpoint.

    The ending of OUT decides the format; a folder becomes what CKPT is, or sharded safetensors. What would lose,
    collide or have to be guessed is refused, and nothing is written.

    \b
    Examples:
      ckpttool remap old.pt -o new.pt --rule 'encoder.{x*} => backbone.{x*}'
      ckpttool remap train.pt -o runtime.pt --model model.py:build --to runtime
      ckpttool remap train.pt -o ema.safetensors --like other.safetensors --dry-run
      ckpttool remap train.pt --in-place --drop 'head.*'
      ckpttool remap --rules list
    """
    if ckpt is None:
        if options.plan is not None:
            raise CkptError("no checkpoint named", hint=_with_checkpoint(options))
        _list_sets(options, report)
        return
    from ckpttool.report.documents.remap import document
    from ckpttool.report.renderers import json

    out = ckpt if options.undo else options.target(ckpt)
    if out is None and not (options.dry_run or options.save_plan):
        raise CkptError("no output named", hint="-o OUT, --in-place, or --dry-run to see the plan")
    report.check(files_of(split(ckpt)[0]), options.save_plan, manifest, out=out)
    done = ckpttool.remap(ckpt, **keywords_of(options))
    if out is not None and not options.dry_run:
        write_manifest(manifest, out, force=options.force)
    if options.save_plan is not None:
        write_text(options.save_plan, json.render(done.plan.to_json()), force=options.force)
    report.emit(partial(document, done), done.to_json)


def _with_checkpoint(options: RemapOptions) -> str:
    """Return the same command with CKPT: a plan does not name the file."""
    out = ["--in-place"] if options.in_place else ["-o", options.out or "OUT"]
    words = shell("ckpttool", "remap", "CKPT", "--plan", str(options.plan), *out)
    return f"name the checkpoint that the plan is for: {words}"


def _list_sets(options: RemapOptions, report: Report) -> None:
    """List the preset rules. Raise `CkptError` for anything else without a checkpoint."""
    from ckpttool.report.documents.remap import ready_sets
    from ckpttool.ruleset.parse import LIST, SETS, presets

    if options.rules != LIST:
        raise CkptError("no checkpoint named", hint="ckpttool remap CKPT -o OUT; ckpttool remap --rules list: the sets")
    found = presets()
    report.check(())
    report.emit(lambda: ready_sets(found), lambda: SETS.write([found]))
