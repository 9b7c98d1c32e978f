"""``ckpttool diff``."""

from __future__ import annotations

from typing import Annotated

import typer

from ckpttool import api
from ckpttool.cli.fields import with_options
from ckpttool.cli.output import All, Force, Format, Reports, check_texts, emit
from ckpttool.errors import CkptError
from ckpttool.io.files import files_of
from ckpttool.operands.checkpoint import split
from ckpttool.queries.diff.run import DiffOptions


@with_options(DiffOptions)
def command(
    options: DiffOptions,
    operands: Annotated[list[str] | None, typer.Argument(metavar="[LEFT RIGHT | CKPT]", help="Checkpoints.")] = None,
    all: All = False,
    force: Force = False,
    format: Format = "text",
    report: Reports = None,
) -> int:
    """What differs, why, and the command that mends it.

    LEFT is what you have, RIGHT what is expected. With --model alone: what state_dict() writes against the runtime
    names. With --model and CKPT: CKPT against what the model loads; status 0 exactly where a strict load succeeds.
    CKPT::optimizer, or --optimizer: the state of optimizers, by the names of their parameters where these are known.
    """
    from ckpttool.report.documents.diff import document

    if len(operands or ()) > 2:
        raise CkptError("nothing to compare: these are more than two checkpoints", hint="ckpttool diff LEFT RIGHT")
    read = [path for operand in operands or () for path in files_of(split(operand)[0])]
    check_texts(report or (), read, force=force)
    left, right = [*(operands or []), None, None][:2]
    result = api.diff_by(left, right, options)
    emit(lambda: document(result, all=all), result.to_json, format, report, force=force)
    return 0 if result.identical else 1
