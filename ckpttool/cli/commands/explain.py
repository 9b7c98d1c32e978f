"""``ckpttool explain``."""

from __future__ import annotations

from typing import Annotated

import ckpttool
from ckpttool.cli.output import Report
from ckpttool.core.codes import CODES
from ckpttool.core.errors import CkptError
from ckpttool.core.options import Argument, OptimizerOptions, keywords_of
from ckpttool.core.text import shell


def command(
    name: Annotated[
        str,
        Argument("NAME", "The tensor's name in any form, or a code of a report.", CODES),
    ],
    options: OptimizerOptions,
    report: Report,
) -> None:
    """One tensor: all its names, and the hook that renames it.

    Without --model: what a code of a report means, and what to do about it.

    \b
    Examples:
      ckpttool explain layers.3.norm.weight --model model.py:build
      ckpttool explain layers.3.norm.weight --model names.json --format json
      ckpttool explain wrapper-prefix
    """
    from ckpttool.report.documents.names import explained, explained_code

    report.check(())
    if options.model is None:
        if name not in CODES:
            raise CkptError(
                f"no code is called {name!r}",
                hint=f"{shell('ckpttool', 'explain', name, '--model', 'MODEL')} explains a tensor",
            )
        report.emit(lambda: explained_code(CODES[name]), CODES[name].to_json)
        return
    explanation = ckpttool.explain(name, **keywords_of(options))
    report.emit(lambda: explained(explanation), explanation.to_json)
