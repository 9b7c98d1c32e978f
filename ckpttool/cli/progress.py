"""A progress bar on stderr, and with ``-v`` one line on the bytes that were read, moved and
written.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ckpttool.cli.streams import is_quiet
from ckpttool.core.text import human_bytes, plural
from ckpttool.distributed.job import current
from ckpttool.io import progress

PATIENCE = 1.0  # seconds before anything is shown


@contextmanager
def watched(verbose: bool) -> Iterator[None]:
    """Show a bar for long work on a terminal while the block runs; at its end print the counts, if
    `verbose`.
    """
    progress.begin()
    begun = time.monotonic()
    try:
        with progress.shown(_bar):
            yield
    finally:
        if verbose and not is_quiet():
            seconds = time.monotonic() - begun
            sys.stderr.write(f"{_line(seconds)}\n{_on_tracing(seconds)}")


@contextmanager
def _bar(title: str, total: int | None) -> Iterator[Callable[[int], object]]:
    """Show on a terminal how many of `total` bytes are done, how fast, and the time left: a
    `Progress`.
    """
    if is_quiet() or not sys.stderr.isatty():
        yield lambda count: None
        return
    shown = _Bar(title, total)
    try:
        yield shown.advance
    finally:
        shown.close()


class _Bar:
    """A bar that counts from the start, and appears after `PATIENCE`, also if nothing has been
    counted.
    """

    def __init__(self, title: str, total: int | None) -> None:
        from threading import Lock, Timer

        self._title, self._total, self._done = title, total, 0
        self._lock, self._progress, self._is_over = Lock(), None, False
        self._timer = Timer(PATIENCE, self._appear)
        self._timer.daemon = True
        self._timer.start()

    def advance(self, count: int) -> None:
        self._done += count
        if self._progress is not None:
            self._progress.update(self._task, completed=self._done)

    def close(self) -> None:
        self._timer.cancel()
        with self._lock:
            self._is_over = True
            if self._progress is not None:
                self._progress.stop()

    def _appear(self) -> None:
        with self._lock:
            if not self._is_over:
                progress = _rich(self._total is not None)
                progress.start()
                self._task = progress.add_task(self._title, total=self._total, completed=self._done)
                self._progress = progress


def _rich(knows_the_end: bool) -> Any:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.progress import TransferSpeedColumn as Rate

    left = TimeRemainingColumn() if knows_the_end else TimeElapsedColumn()
    columns = ("{task.description}", BarColumn(), DownloadColumn(binary_units=True), Rate(), left)
    return Progress(*columns, console=Console(stderr=True), transient=True)


def _on_tracing(seconds: float) -> str:
    """Return a hint if most of the time went into importing torch and tracing one model."""
    traced = progress.counts.traced
    if not progress.counts.files:  # as `trace` itself
        return ""
    if len(traced) != 1 or sum(traced.values()) < seconds / 2:
        return ""
    ((command, taken),) = traced.items()
    return (
        f"hint: torch and the model's code took {taken:.2f} s; names.json in its place needs"
        f" neither: {command}\n"
    )


def _line(seconds: float) -> str:
    counts, job = progress.counts, current()
    rank = "" if job is None else f" (rank {job.rank} of {job.size})"
    return (
        f"summary: {seconds:.2f} s; read {human_bytes(counts.read)} of"
        f" {plural(len(counts.files), 'file')};"
        f" moved {human_bytes(counts.moved)}, computed {human_bytes(counts.computed)},"
        f" wrote {human_bytes(counts.written)};"
        f" fetched {human_bytes(counts.fetched)} in {plural(counts.requests, 'request')}{rank}"
    )
