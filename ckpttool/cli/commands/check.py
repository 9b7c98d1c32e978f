"""``ckpttool check``."""

from __future__ import annotations

from typing import Annotated

import ckpttool
from ckpttool.cli.output import Report
from ckpttool.core.options import Argument, OptimizerOptions, Option, keywords_of


def command(
    files: Annotated[list[str], Argument("FILE...", "Names files, rules and checkpoints.")],
    options: OptimizerOptions,
    report: Report,
    allow: Annotated[
        list[str] | None,
        Option("--allow NAME", "An import that pickles may have: 'argparse.*'. Repeatable."),
    ] = None,
) -> int:
    """Files of a repository: names, rules, pickles.

    A names file is compared with --model; a checkpoint fails for dangerous and unknown imports
    of its pickles that --allow does not name; rules are read completely. Status 1 where something
    is wrong with one of them.

    \b
    Examples:
      ckpttool check names.json rules.toml train.pt
      ckpttool check old.ckpt --allow 'argparse.*'
    """
    from ckpttool.report.documents.names import check_document

    report.check(files)
    result = ckpttool.check(files, allow=allow or (), **keywords_of(options))
    report.emit(lambda: check_document(result), result.to_json)
    return 0 if result.ok else 1
