"""What a command did with bytes, in one line on stderr, where ``-v`` asks for it."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from ckpttool.cli.progress import bar
from ckpttool.cli.streams import is_quiet
from ckpttool.io import work
from ckpttool.io.together.job import current
from ckpttool.words import human_bytes, plural


@contextmanager
def watched(verbose: bool) -> Iterator[None]:
    """Inside, what takes long has a bar on a terminal; at the end, however it comes, the counts are said."""
    work.begin()
    begun = time.monotonic()
    try:
        with work.shown(bar):
            yield
    finally:
        if verbose and not is_quiet():
            sys.stderr.write(f"{_line(time.monotonic() - begun)}\n")


def _line(seconds: float) -> str:
    counts, job = work.counts, current()
    made = f"moved {human_bytes(counts.moved)}, computed {human_bytes(counts.computed)}"
    rank = "" if job is None else f" (rank {job.rank} of {job.size})"
    return (
        f"summary: {seconds:.2f} s; read {human_bytes(counts.read)} of {plural(len(counts.files), 'file')}; "
        f"{made}, wrote {human_bytes(counts.written)}; "
        f"fetched {human_bytes(counts.fetched)} in {plural(counts.requests, 'request')}{rank}"
    )
