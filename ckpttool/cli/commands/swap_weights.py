"""``ckpttool swap-weights``."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import ckpttool
from ckpttool.cli.output import Report
from ckpttool.core.errors import CkptError
from ckpttool.core.options import Argument, keywords_of
from ckpttool.operands.checkpoint import split
from ckpttool.swap.options import SwapOptions


def command(
    program: Annotated[
        str, Argument("PROGRAM", "The exported program (.pt2), or a TorchScript archive.")
    ],
    new: Annotated[str, Argument("NEW", "The checkpoint with the new weights.")],
    options: SwapOptions,
    report: Report,
) -> None:
    """Put new weights into an exported program.

    The graph is not read, so the machine needs neither the program's custom operators nor its torch
    version. Refused, with nothing written: weights that are missing, left over, of another shape or
    dtype, or tied and different.

    \b
    Examples:
      ckpttool swap-weights deployed.pt2 train.pt -o swapped.pt2 --model model.py:build
      ckpttool swap-weights deployed.pt2 train.pt --dry-run
      ckpttool swap-weights scripted.pt train.pt -o swapped.pt
    """
    from ckpttool.report.documents.remap import swapped as document

    out = options.target(split(program)[0])
    if out is None and not options.dry_run:
        raise CkptError("no output named", hint="-o OUT")
    report.check((program, new), out=out)
    swapped = ckpttool.swap_weights(program, new, **keywords_of(options))
    report.emit(partial(document, swapped), swapped.to_json)
