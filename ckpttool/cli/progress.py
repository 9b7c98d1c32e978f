"""A bar on stderr, where that is a terminal, for all that takes more than a moment."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ckpttool.cli.streams import is_quiet

PATIENCE = 1.0  # seconds before anything is shown


@contextmanager
def bar(title: str, total: int | None) -> Iterator[Callable[[int], object]]:
    """A `Progress`: shows how many of `total` bytes are done, how fast, and the time left."""
    if is_quiet() or not sys.stderr.isatty():
        yield lambda count: None
        return
    shown = _Bar(title, total)
    try:
        yield shown.advance
    finally:
        shown.close()


class _Bar:
    """Counts from the start, and appears by itself after `PATIENCE`: also while nothing is told."""

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
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import TransferSpeedColumn as Rate

    time = TimeRemainingColumn() if knows_the_end else TimeElapsedColumn()
    columns = ("{task.description}", BarColumn(), DownloadColumn(binary_units=True), Rate(), time)
    return Progress(*columns, console=Console(stderr=True), transient=True)
