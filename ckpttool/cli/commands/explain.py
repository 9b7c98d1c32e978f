"""``ckpttool explain``."""

from __future__ import annotations

from typing import Annotated

import ckpttool
from ckpttool.cli.output import Report
from ckpttool.core.options import Argument, OptimizerOptions, keywords_of, option


def command(
    name: Annotated[str, Argument("NAME", "The tensor's name in any form.")],
    # One of the options, which is required here.
    model: Annotated[str, option("--model", metavar="MODEL", help="The model that has the tensor.")],
    options: OptimizerOptions,
    report: Report,
) -> None:
    """One tensor: all its names, and the hook that renames it.

    \b
    Examples:
      ckpttool explain layers.3.norm.weight --model model.py:build
      ckpttool explain layers.3.norm.weight --model names.json --format json
    """
    from ckpttool.report.documents.names import explained

    report.check(())
    explanation = ckpttool.explain(name, **keywords_of(options))
    report.emit(lambda: explained(explanation), explanation.to_json)
