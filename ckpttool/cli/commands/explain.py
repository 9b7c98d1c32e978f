"""``ckpttool explain``."""

from __future__ import annotations

from typing import Annotated

import typer

from ckpttool import api
from ckpttool.cli.options import Materialize, ModelKwargs, Optimizer
from ckpttool.cli.output import Force, Format, Reports, emit
from ckpttool.operands.model import parse_kwargs


def command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The tensor's name in any form.")],
    model: Annotated[str, typer.Option("--model", metavar="MODEL", help="The model that has the tensor.")],
    model_kwargs: ModelKwargs = "{}",
    materialize: Materialize = False,
    optimizer: Optimizer = None,
    force: Force = False,
    format: Format = "text",
    report: Reports = None,
) -> None:
    """One tensor: all its names, and the hook that renames it."""
    from ckpttool.report.documents.names import explained

    kwargs = parse_kwargs(model_kwargs)
    found = api.explain(name, model, model_kwargs=kwargs, materialize=materialize, optimizer=optimizer)
    emit(lambda: explained(found), found.to_json, format, report, force=force)
