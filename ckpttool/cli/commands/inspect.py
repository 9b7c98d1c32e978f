"""``ckpttool inspect``."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import ckpttool
from ckpttool.cli.output import Report
from ckpttool.core.errors import CkptError
from ckpttool.core.options import Argument, Option
from ckpttool.distributed.job import only_first

ORDERS = ("name", "bytes")


def _check_sort(word: str) -> None:
    if word not in ORDERS:
        raise CkptError(f"--sort {word}: no such order", hint="name, as in the file, or bytes")


def command(
    ckpt: Annotated[str, Argument("CKPT", "A checkpoint: file, directory, index, glob or URL.")],
    report: Report,
    stats: Annotated[
        bool,
        Option(
            "--stats", "Read the values too: min, max, mean, zeros, NaN, inf and a hash of each."
        ),
    ] = False,
    depth: Annotated[
        int | None,
        Option(
            "--depth N", "The tree of modules, N levels deep, not the tensors.", "Reports", least=0
        ),
    ] = None,
    sort: Annotated[
        str | None,
        Option(
            "--sort name|bytes",
            "bytes: the largest first.",
            "Reports",
            check=_check_sort,
            choices=ORDERS,
        ),
    ] = None,
    filter: Annotated[
        str | None,
        Option("--filter PATTERN", "Only tensors whose keys it names: 'layers.*'.", "Reports"),
    ] = None,
    all: Annotated[
        bool, Option("--all", "A line for every tensor, and no list cut short.", "Reports")
    ] = False,
) -> None:
    """Show what is in a checkpoint: keys, dtypes, shapes, aliases.

    Reads the index only (--stats reads the values, in chunks): no tensor is loaded, no pickle is
    run. CKPT::SECTION looks at one section.

    \b
    Examples:
      ckpttool inspect train.pt
      ckpttool inspect train.pt::optimizer --all
      ckpttool inspect train.pt --depth 3 --sort bytes
      ckpttool inspect s3://bucket/model.safetensors --format json
    """
    from ckpttool.report.documents.inspection import document

    if not stats:
        only_first()
    report.check([ckpt])
    inspection = ckpttool.inspect(ckpt, stats=stats, filter=filter)
    shown = partial(document, inspection, all=all, depth=depth, by_bytes=sort == "bytes")
    report.emit(shown, inspection.to_json)
