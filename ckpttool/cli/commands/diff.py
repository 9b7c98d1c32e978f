"""``ckpttool diff``."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from ckpttool import api
from ckpttool.cli.fields import with_options
from ckpttool.cli.output import All, Force, Format, Reports, check_texts, emit, write_text
from ckpttool.errors import CkptError
from ckpttool.io.files import files_of
from ckpttool.operands.checkpoint import split
from ckpttool.options import Argument, option
from ckpttool.queries.diff.options import DiffOptions
from ckpttool.queries.diff.result import Diff


@with_options(DiffOptions)
def command(
    options: DiffOptions,
    operands: Annotated[list[str] | None, Argument("[LEFT RIGHT | CKPT]", "Checkpoints.")] = None,
    suggest: Annotated[
        str | None, option("--suggest", metavar="FILE", help="Write the rules that would mend it to FILE (TOML).")
    ] = None,
    exit_zero: Annotated[bool, option("--exit-zero", help="Status 0 also where they differ; errors stay 2.")] = False,
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
    if suggest is not None and (len(operands or ()) < 2 or options.model is not None):
        raise CkptError("--suggest needs two checkpoints and no model", hint="ckpttool diff LEFT RIGHT --suggest FILE")
    read = [path for operand in operands or () for path in files_of(split(operand)[0])]
    check_texts(report or (), read, force=force)
    left, right = [*(operands or []), None, None][:2]
    result = api.diff_by(left, right, options)
    if suggest is not None:
        result = _written(result, suggest)
    emit(lambda: document(result, all=all), result.to_json, format, report, force=force)
    return 0 if result.passes or exit_zero else 1


def _written(result: Diff, path: str) -> Diff:
    """Writes the rules that the diff suggests, and shows how they are used. Raises `CkptError` for another's file."""
    from ckpttool.edits.rules.mend import by_file

    if result.rules is None:
        note = f"no rules are suggested, and {path} was not written: no rules lead from left to right"
        return replace(result, notes=(*result.notes, note))
    if os.path.exists(path) and Path(path).read_text(encoding="utf-8", errors="replace") != result.rules:
        raise CkptError(f"{path} is there, and has other content", hint="give another FILE, or remove it first")
    write_text(path, result.rules, force=True)  # what is there is the same
    return by_file(result, path)
