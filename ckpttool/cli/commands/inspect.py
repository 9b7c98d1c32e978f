"""``ckpttool inspect``."""

from __future__ import annotations

from typing import Annotated

from ckpttool import api
from ckpttool.cli.output import Force, Format, Manifest, Reports, check_texts, emit, write_manifest
from ckpttool.io.files import files_of
from ckpttool.operands.checkpoint import split
from ckpttool.options import Argument, option


def command(
    ckpt: Annotated[str, Argument("CKPT", "A checkpoint: file, directory, index, glob or URL.")],
    stats: Annotated[
        bool, option("--stats", help="Read the values too: min, max, mean, zeros, NaN, inf and a hash of each.")
    ] = False,
    all: Annotated[bool, option("--all", help="A line for every tensor, and no list cut short.")] = False,
    force: Force = False,
    format: Format = "text",
    manifest: Manifest = None,
    report: Reports = None,
) -> None:
    """What is in a checkpoint: keys, dtypes, shapes, aliases.

    Reads the index only (--stats reads the values, in chunks): no tensor is loaded, no pickle is run. CKPT::SECTION
    looks at one section.
    """
    from ckpttool.report.documents.inspection import document

    check_texts((manifest, *(report or ())), files_of(split(ckpt)[0]), force=force)
    inspection = api.inspect(ckpt, stats=stats)
    write_manifest(manifest, ckpt, force=force)
    emit(lambda: document(inspection, all=all), inspection.to_json, format, report, force=force)
