"""``ckpttool diff``."""

from __future__ import annotations

from typing import Annotated

import typer

from ckpttool import api
from ckpttool.cli.options import All, Materialize, Model, ModelKwargs, Optimizer
from ckpttool.cli.output import Force, Format, Reports, emit
from ckpttool.errors import CkptError
from ckpttool.operands.model import parse_kwargs


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
        raise CkptError("diff takes two checkpoints", hint="ckpttool diff LEFT RIGHT")
    result = api.diff(
        *(operands or ()),
        model=model,
        model_kwargs=parse_kwargs(model_kwargs),
        materialize=materialize,
        optimizer=optimizer,
        values=values,
        rtol=rtol,
        atol=atol,
        ignore_dtype=ignore_dtype,
    )
    emit(lambda: document(result, all=all), result.to_json, format, report, force=force)
    return 0 if result.identical else 1
