"""``ckpttool remap``."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import ckpttool
from ckpttool.cli.output import Report
from ckpttool.core.errors import CkptError
from ckpttool.core.options import Argument, keywords_of
from ckpttool.remapping.options import RemapOptions


def command(
    ckpt: Annotated[
        str, Argument("CKPT", "The checkpoint to read; CKPT::SECTION takes one section.")
    ],
    options: RemapOptions,
    report: Report,
) -> None:
    """Rewrite the keys, optimizer ids and format of a checkpoint.

    The ending of OUT decides the format; a folder becomes what CKPT is, or sharded safetensors.
    What would lose, collide or have to be guessed is refused, and nothing is written.

    \b
    Examples:
      ckpttool remap old.pt -o new.pt --rule 'encoder.{x*} => backbone.{x*}'
      ckpttool remap train.pt -o runtime.pt --model model.py:build --to runtime
      ckpttool remap train.pt::model -o ema.safetensors --like other.safetensors --dry-run
      ckpttool remap old.pt --in-place --rule 'encoder.{x*} => backbone.{x*}'
      ckpttool remap hf/ -o native.pt --using convert.py:from_hf
      ckpttool remap text.pt --model model.py:build --fill-from vision.pt -o all.pt
    """
    from ckpttool.report.documents.remap import document

    out = options.target(ckpt)
    if out is None and not options.dry_run:
        raise CkptError("no output named", hint="-o OUT, --in-place, or --dry-run to see the plan")
    report.check([ckpt], out=out)
    outcome = ckpttool.remap(ckpt, **keywords_of(options))
    report.emit(partial(document, outcome), outcome.to_json)
