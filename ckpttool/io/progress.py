"""Byte counters and progress of the current task."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import field
from typing import Literal, Union

from ckpttool.core.values import dataclass

# Called for each long task with its title and its bytes (None: unknown); yields a function that
# takes the bytes done.
Progress = Callable[[str, Union[int, None]], AbstractContextManager[Callable[[int], object]]]

By = Literal["read", "written"]  # which bytes a task counts


@dataclass(slots=True)
class Counts:
    """Bytes since `begin`: `read` from `files` of this machine, `fetched` from URLs in `requests`.

    Bytes of the outputs: `moved` from a source (also shared, or copied by a store), `computed`, and
    `written` in all, names and headers too. `traced`: seconds in torch and models' code, by the
    command that would save them.
    """

    read: int = 0
    files: set[str] = field(default_factory=set)
    fetched: int = 0
    requests: int = 0
    moved: int = 0
    computed: int = 0
    written: int = 0
    traced: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class _Task:
    """The task that counts bytes `by` reading or writing.

    `before`: bytes that were written before it. `room`: bytes that the current part may still
    count.
    """

    by: By
    advance: Callable[[int], object]
    before: int
    room: int | None = None


counts = Counts()
_show: Progress = lambda title, total: nullcontext(lambda count: None)  # noqa: E731
_task: _Task | None = None


def begin() -> None:
    global counts
    counts = Counts()


@contextmanager
def shown(progress: Progress | None) -> Iterator[None]:
    """Report tasks inside the block to `progress`; None: as before."""
    global _show
    before, _show = _show, progress or _show
    try:
        yield
    finally:
        _show = before


@contextmanager
def doing(title: str, total: int | None, by: By = "read") -> Iterator[None]:
    """Count the block as a task of `total` bytes, or as a part of the task that it is inside."""
    global _task
    if _task is not None:
        yield
        return
    with _show(title, total) as advance:
        _task = _Task(by, advance, counts.written)
        try:
            yield
        finally:
            _task = None


@contextmanager
def part(nbytes: int) -> Iterator[None]:
    """Count the block as exactly `nbytes` of the task, however many are read for it."""
    task = _task
    if task is None or task.room is not None:
        yield
        return
    task.room = nbytes
    try:
        yield
        task.advance(task.room)
    finally:
        task.room = None


def advance(nbytes: int) -> None:
    """Count bytes of the task that were done, but not read or written here."""
    if _task is not None and nbytes:
        _task.advance(nbytes)


def written() -> int:
    """Return the bytes that the task has written so far, with the other files of a folder."""
    return 0 if _task is None else counts.written - _task.before


def _count(nbytes: int, by: By) -> None:
    if _task is not None and _task.by == by:
        if _task.room is not None:
            nbytes = min(nbytes, _task.room)
            _task.room -= nbytes
        _task.advance(nbytes)


def count_opened(path: str) -> None:
    counts.files.add(os.path.abspath(path))


def count_read(nbytes: int) -> None:
    counts.read += nbytes
    _count(nbytes, "read")


def count_fetched(nbytes: int, requests: int) -> None:
    counts.fetched += nbytes
    counts.requests += requests
    _count(nbytes, "read")


def count_written(nbytes: int) -> None:
    counts.written += nbytes
    _count(nbytes, "written")


def count_made(moved: int, computed: int) -> None:
    """Count bytes of an output by where they come from."""
    counts.moved += moved
    counts.computed += computed
