"""``ckpttool convert``."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import ckpttool
from ckpttool.cli.output import Report
from ckpttool.core.errors import CkptError
from ckpttool.core.options import Argument, keywords_of
from ckpttool.remapping.options import ConvertOptions


def command(
    ckpt: Annotated[
        str, Argument("CKPT", "The checkpoint to read; CKPT::SECTION takes one section.")
    ],
    options: ConvertOptions,
    report: Report,
) -> None:
    """Write a checkpoint in another format, dtype or shards.

    Keys stay, and without --dtype also values. The ending of OUT decides the format: .safetensors,
    .pt, .dcp (torch.distributed.checkpoint), or OUT/ for a folder of shards. Status 0 if it is
    written, 1 if nothing would change or something would be lost.

    \b
    Examples:
      ckpttool convert train.pt::model -o train.safetensors
      ckpttool convert model.safetensors -o sharded/ --max-shard-size 5GB
      ckpttool convert model.safetensors -o half.safetensors --dtype bfloat16
    """
    from ckpttool.report.documents.remap import document

    out = options.target(ckpt)
    if out is None:
        raise CkptError("no output named", hint="-o OUT, or --dry-run to see what would be written")
    report.check([ckpt], out=out)
    outcome = ckpttool.convert(ckpt, **keywords_of(options))
    report.emit(partial(document, outcome, "convert"), outcome.to_json)
