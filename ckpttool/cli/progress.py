"""A bar on stderr, where that is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_WORTH_A_BAR = 256 << 20  # bytes; less is written before anyone looks


@contextmanager
def bar(title: str, total: int) -> Iterator[Callable[[int], object]]:
    """A `Progress`: shows how many of `total` bytes are written, how fast, and the time left."""
    if total < _WORTH_A_BAR or not sys.stderr.isatty():
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    told = DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn()
    columns = ("{task.description}", BarColumn(), *told)
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(title, total=total)
        yield lambda count: progress.advance(task, count)
