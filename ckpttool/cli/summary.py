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
            seconds = time.monotonic() - begun
            sys.stderr.write(f"{_line(seconds)}\n{_on_tracing(seconds)}")


def _on_tracing(seconds: float) -> str:
    """What saves most of the time, where that went into importing torch and tracing one model."""
    traced = work.counts.traced
    if len(traced) != 1 or sum(traced.values()) < seconds / 2 or not work.counts.files:  # `trace` itself reads no file
        return ""
    ((command, taken),) = traced.items()
    return f"hint: torch and the model's code took {taken:.2f} s; names.json in its place needs neither: {command}\n"


def _line(seconds: float) -> str:
    counts, job = work.counts, current()
    made = f"moved {human_bytes(counts.moved)}, computed {human_bytes(counts.computed)}"
    rank = "" if job is None else f" (rank {job.rank} of {job.size})"
    return (
        f"summary: {seconds:.2f} s; read {human_bytes(counts.read)} of {plural(len(counts.files), 'file')}; "
        f"{made}, wrote {human_bytes(counts.written)}; "
        f"fetched {human_bytes(counts.fetched)} in {plural(counts.requests, 'request')}{rank}"
    )
