"""``ckpttool diff3``."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import ckpttool
from ckpttool.cli.output import All, ExitZero, Report
from ckpttool.core.options import Argument, keywords_of
from ckpttool.diffing.options import Diff3Options


def command(
    base: Annotated[str, Argument("BASE", "The checkpoint that LEFT and RIGHT both came from.")],
    left: Annotated[str, Argument("LEFT", "A checkpoint.")],
    right: Annotated[str, Argument("RIGHT", "Another checkpoint.")],
    options: Diff3Options,
    report: Report,
    exit_zero: ExitZero = False,
    all: All = False,
) -> int:
    """What two checkpoints each changed since a common base.

    Status 0 if the changes can be merged, 1 if two of them conflict.

    \b
    Examples:
      ckpttool diff3 pretrained.pt ours.pt theirs.pt
      ckpttool diff3 pretrained.pt ours.pt theirs.pt --values --all
    """
    from ckpttool.report.documents.diff import three_way_document

    report.check((base, left, right))
    result = ckpttool.diff3(base, left, right, **keywords_of(options))
    report.emit(partial(three_way_document, result, all=all), result.to_json)
    return 0 if result.passes or exit_zero else 1
