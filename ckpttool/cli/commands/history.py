"""``ckpttool history``."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import ckpttool
from ckpttool.cli.output import All, ExitZero, Report
from ckpttool.core.options import Argument, keywords_of
from ckpttool.diffing.options import CompareOptions


def command(
    run: Annotated[list[str], Argument("RUN...", "The folder of a run, or its checkpoints.")],
    options: CompareOptions,
    report: Report,
    exit_zero: ExitZero = False,
    all: All = False,
) -> int:
    """Which step of a run changed keys, dtypes, optimizers.

    Each checkpoint is compared with the one before it. Paths that differ only in numbers are compared in the order of
    the numbers, others in the order given. Status 0 if no step changed anything, 1 if one did.

    \b
    Examples:
      ckpttool history runs/7
      ckpttool history step-1.pt step-2.pt step-3.pt --values
    """
    from ckpttool.report.documents.diff import history_document

    report.check(run)
    result = ckpttool.history(run if len(run) > 1 else run[0], **keywords_of(options))
    report.emit(partial(history_document, result, all=all), result.to_json)
    return 0 if result.passes or exit_zero else 1
