"""``ckpttool trace``."""

from __future__ import annotations

from typing import Annotated

import typer

from ckpttool import api
from ckpttool.cli.options import All, Materialize, ModelKwargs, Optimizer
from ckpttool.cli.output import Force, Format, Reports, check_new, emit, write_text
from ckpttool.operands.model import parse_kwargs


def command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="package.module:attr, file.py:attr or a .pt2 program.")],
    out: Annotated[
        str | None,
        typer.Option("-o", "--output", metavar="FILE", callback=check_new, help="Write a names file (JSON)."),
    ] = None,
    model_kwargs: ModelKwargs = "{}",
    materialize: Materialize = False,
    optimizer: Optimizer = None,
    all: All = False,
    force: Force = False,
    format: Format = "text",
    report: Reports = None,
) -> None:
    """Every name of every tensor of a model.

    Runs the model's own saving and loading once on the meta device, and says which hook renames or computes which key.
    A names file takes the model's place as --model where its code is not installed.
    """
    from ckpttool.report.documents.names import document
    from ckpttool.report.renderers import json

    names = api.trace(model, model_kwargs=parse_kwargs(model_kwargs), materialize=materialize, optimizer=optimizer)
    data = names.to_json()
    if out is not None:
        write_text(out, json.render(data), force=force)
    emit(lambda: document(names, all=all, written=out), lambda: data, format, report, force=force)
