"""``ckpttool diff``."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from ckpttool import api
from ckpttool.checkpoint import Checkpoint
from ckpttool.cli.options import All, Materialize, Model, ModelKwargs, Optimizer
from ckpttool.cli.output import Format, Reports, emit, write_report
from ckpttool.edits.rules.mend import suggestion, with_rules
from ckpttool.errors import CkptError
from ckpttool.operands.model import parse_kwargs
from ckpttool.queries.diff.result import Diff


def command(
    operands: Annotated[list[str] | None, typer.Argument(metavar="[LEFT RIGHT | CKPT]", help="Checkpoints.")] = None,
    model: Model = None,
    model_kwargs: ModelKwargs = "{}",
    materialize: Materialize = False,
    optimizer: Optimizer = None,
    values: Annotated[bool, typer.Option("--values", help="Compare the bytes of the tensors too.")] = False,
    rtol: Annotated[float, typer.Option("--rtol", min=0, help="Relative tolerance of --values.")] = 0.0,
    atol: Annotated[float, typer.Option("--atol", min=0, help="Absolute tolerance of --values.")] = 0.0,
    ignore_dtype: Annotated[bool, typer.Option("--ignore-dtype", help="Another dtype is no difference.")] = False,
    suggest: Annotated[
        str | None, typer.Option("--suggest", metavar="FILE", help="Write the rules that would mend it to FILE (TOML).")
    ] = None,
    all: All = False,
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
        raise CkptError("diff takes two checkpoints", hint="ckpttool diff LEFT RIGHT")
    if suggest is not None and (len(operands or ()) < 2 or model is not None):
        raise CkptError("--suggest needs two checkpoints and no model", hint="ckpttool diff LEFT RIGHT --suggest FILE")
    checkpoints = [api.open_checkpoint(operand) for operand in operands or ()]
    result = api.diff(
        *checkpoints,
        model=model,
        model_kwargs=parse_kwargs(model_kwargs),
        materialize=materialize,
        optimizer=optimizer,
        values=values,
        rtol=rtol,
        atol=atol,
        ignore_dtype=ignore_dtype,
    )
    if suggest is not None:
        result = _written(result, checkpoints[0], checkpoints[1], suggest)
    emit(lambda: document(result, all=all), result.to_json, format, report)
    return 0 if result.identical else 1


def _written(result: Diff, left: Checkpoint, right: Checkpoint, path: str) -> Diff:
    """Writes the rules that the diff suggests, and shows how they are used. Raises `CkptError` for another's file."""
    found = suggestion(result, left, right)
    if found is None:
        note = f"no rules are suggested, and {path} was not written: no rules lead from left to right"
        return replace(result, notes=(*result.notes, note))
    text = found.text()
    if os.path.exists(path) and Path(path).read_text(encoding="utf-8", errors="replace") != text:
        raise CkptError(f"{path} is there, and has other content", hint="give another FILE, or remove it first")
    write_report(path, text)
    return with_rules(result, left, right, file=path)
