"""``ckpttool trace``."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from ckpttool.api import reading
from ckpttool.cli.fields import with_options
from ckpttool.cli.output import All, Force, Format, Reports, check_texts, emit, write_text
from ckpttool.options import Argument, OptimizerOptions, option


@with_options(OptimizerOptions, without=["model"])
def command(
    model: Annotated[str, Argument("MODEL", "package.module:attr, file.py:attr or a .pt2 program.")],
    options: OptimizerOptions,
    out: Annotated[str | None, option("-o", "--output", metavar="FILE", help="Write a names file (JSON).")] = None,
    all: All = False,
    force: Force = False,
    format: Format = "text",
    report: Reports = None,
) -> None:
    """Every name of every tensor of a model.

    Runs the model's own saving and loading once on the meta device, and says which hook renames or computes which key.
    A names file takes the model's place as --model where its code is not installed.

    \b
    Examples:
      ckpttool trace model.py:build -o names.json
      ckpttool trace model.py:build --model-kwargs '{"layers": 4}'
      ckpttool trace model.py:build --optimizer model.py:optimizer
    """
    from ckpttool.report.documents.names import document
    from ckpttool.report.renderers import json

    check_texts((out, *(report or ())), (), force=force)
    names = reading.trace_by(replace(options, model=model))
    data = names.to_json()
    if out is not None:
        write_text(out, json.render(data), force=force)
    emit(lambda: document(names, all=all, written=out), lambda: data, format, report, force=force)
