"""``ckpttool rules``."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import ckpttool
from ckpttool.cli.output import Report
from ckpttool.core.options import Argument
from ckpttool.remapping.options import presets


def command(
    report: Report,
    name: Annotated[
        str | None, Argument("[NAME]", "A preset; without it all of them are listed.", presets)
    ] = None,
) -> None:
    """List the preset rules; with NAME print one as TOML.

    A preset is used by its name, as in `ckpttool remap CKPT -o OUT --rules NAME`. To change its
    rules, print them to a file and name the file instead.

    \b
    Examples:
      ckpttool rules
      ckpttool rules llama-torchtune-to-hf
    """
    from ckpttool.report.documents.remap import presets_document
    from ckpttool.ruleset.parse import SETS

    report.check(())
    presets = ckpttool.rules(name)
    text = None if name is None else presets[0].toml
    report.emit(partial(presets_document, presets), lambda: SETS.write([presets]), text)
