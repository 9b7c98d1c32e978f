"""``ckpttool fix``."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import ckpttool
from ckpttool.cli.output import Report
from ckpttool.core.errors import CkptError
from ckpttool.core.options import BECOMES, Argument, FixOptions, Option, keywords_of


def command(
    ckpt: Annotated[
        str, Argument("CKPT", "The checkpoint to read; CKPT::SECTION takes one section.")
    ],
    # One of the options, which is required here.
    model: Annotated[str, Option("--model MODEL", "The model that will load OUT.", BECOMES)],
    options: FixOptions,
    report: Report,
) -> None:
    """Write a checkpoint with the fix that `diff` suggests.

    `ckpttool diff CKPT --model MODEL` shows the fix; it is applied only if it was tried and nothing
    differs after it. A checkpoint that already fits is copied. Status 0 if OUT is written; 1 if no
    command fixes all of it.

    \b
    Examples:
      ckpttool fix train.pt --model model.py:build -o fixed.pt
      ckpttool fix train.pt --model model.py:build --optimizer model.py:optimizer -o fixed.pt
    """
    from ckpttool.report.documents.remap import document

    out = options.target(ckpt)
    if out is None and not options.dry_run:
        raise CkptError("no output named", hint="-o OUT, --in-place, or --dry-run to see the plan")
    report.check([ckpt], out=out)
    outcome = ckpttool.fix(ckpt, **keywords_of(options))
    report.emit(partial(document, outcome, "fix"), outcome.to_json)
