"""``ckpttool trace``."""

from __future__ import annotations

from typing import Annotated

import ckpttool
from ckpttool.cli.output import All, Report, write_text
from ckpttool.core.options import Argument, OptimizerOptions, Option, keywords_of


def command(
    # One of the options, which is required here.
    model: Annotated[
        str, Argument("MODEL", "package.module:attr, file.py:attr or a .pt2 program.")
    ],
    options: OptimizerOptions,
    report: Report,
    out: Annotated[
        str | None, Option("-o, --output FILE", "Write a names file (JSON).", "Output")
    ] = None,
    all: All = False,
) -> None:
    """Every name of every tensor of a model.

    Runs the model's own saving and loading once on the meta device, and says which hook renames or
    computes which key. A names file takes the model's place as --model where its code is not
    installed.

    \b
    Examples:
      ckpttool trace model.py:build -o names.json
      ckpttool trace 'model.py:build(layers=4)'
      ckpttool trace model.py:build --optimizer model.py:optimizer
    """
    from ckpttool.report.documents.names import document
    from ckpttool.report.renderers import json

    report.check((), out)
    names = ckpttool.trace(**keywords_of(options))
    data = names.to_json()
    if out is not None:
        write_text(out, json.render(data), force=report.force)
    report.emit(lambda: document(names, all=all, written=out), lambda: data)
