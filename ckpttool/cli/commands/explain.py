"""``ckpttool explain``."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from ckpttool.api import reading
from ckpttool.cli.fields import with_options
from ckpttool.cli.output import Force, Format, Reports, check_texts, emit
from ckpttool.options import Argument, OptimizerOptions, option


@with_options(OptimizerOptions, without=["model"])
def command(
    name: Annotated[str, Argument("NAME", "The tensor's name in any form.")],
    model: Annotated[str, option("--model", metavar="MODEL", help="The model that has the tensor.")],
    options: OptimizerOptions,
    force: Force = False,
    format: Format = "text",
    report: Reports = None,
) -> None:
    """One tensor: all its names, and the hook that renames it.

    \b
    Examples:
      ckpttool explain layers.3.norm.weight --model model.py:build
      ckpttool explain layers.3.norm.weight --model names.json --format json
    """
    from ckpttool.report.documents.names import explained

    check_texts(report or (), (), force=force)
    found = reading.explain_by(name, replace(options, model=model))
    emit(lambda: explained(found), found.to_json, format, report, force=force)
