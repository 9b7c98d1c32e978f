"""Byte counters and progress of the current task."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import field
from typing import Literal, Union

from ckpttool.core.values import dataclass

# Told of each long piece of work: its title and its bytes, None where nobody knows them; then of bytes that are done.
Progress = Callable[[str, Union[int, None]], AbstractContextManager[Callable[[int], object]]]

By = Literal["read", "written"]  # what tells how far a piece of work is


@dataclass(slots=True)
class Counts:
    """Bytes since `begin`. `read` are those of `files` on this machine, `fetched` those behind URLs, in `requests`.

    Of the outputs, `moved` are bytes as they lie in a source, also those that were shared or copied by a store, and
    `computed` values that were put together; `written` are all, names and headers too. `traced` are seconds that went
    into torch and models' code, by the command that writes down what came of it.
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
class _Work:
    """A piece of work: what is `done` by reading or writing; `room` is what a part of it may still count as.

    `before` are the bytes that were written before it.
    """

    by: By
    advance: Callable[[int], object]
    before: int
    room: int | None = None

    def take(self, nbytes: int) -> None:
        if self.room is not None:
            nbytes = min(nbytes, self.room)
            self.room -= nbytes
        self.advance(nbytes)


def _unseen(title: str, total: int | None) -> AbstractContextManager[Callable[[int], object]]:
    return nullcontext(lambda count: None)


counts = Counts()
_show: Progress = _unseen
_at_hand: _Work | None = None


def begin() -> None:
    """A new command begins."""
    global counts
    counts = Counts()


@contextmanager
def shown(progress: Progress | None) -> Iterator[None]:
    """Inside, work is told to `progress`; None: to whom it was told before."""
    global _show
    before, _show = _show, progress or _show
    try:
        yield
    finally:
        _show = before


@contextmanager
def doing(title: str, total: int | None, by: By = "read") -> Iterator[None]:
    """Inside, `total` bytes are to be read or written; a piece of work within another one is a part of that."""
    global _at_hand
    if _at_hand is not None:
        yield
        return
    with _show(title, total) as advance:
        _at_hand = _Work(by, advance, counts.written)
        try:
            yield
        finally:
            _at_hand = None


@contextmanager
def part(nbytes: int) -> Iterator[None]:
    """Inside, of the work at hand `nbytes` are done, however many are read for it: none twice, none left at its end."""
    work = _at_hand
    if work is None or work.room is not None:
        yield
        return
    work.room = nbytes
    try:
        yield
        work.advance(work.room)
    finally:
        work.room = None


def advance(nbytes: int) -> None:
    """Bytes of the work at hand that are done, and that were not read or written here."""
    if _at_hand is not None and nbytes:
        _at_hand.advance(nbytes)


def written() -> int:
    """Bytes that the work at hand has written so far, such as those of a folder's other files."""
    return 0 if _at_hand is None else counts.written - _at_hand.before


def _is_done(nbytes: int, by: By) -> None:
    if _at_hand is not None and _at_hand.by == by:
        _at_hand.take(nbytes)


def has_opened(path: str) -> None:
    """A file of this machine is read from now on."""
    counts.files.add(os.path.abspath(path))


def has_read(nbytes: int) -> None:
    """Bytes of a file of this machine were read."""
    counts.read += nbytes
    _is_done(nbytes, "read")


def has_fetched(nbytes: int, requests: int) -> None:
    """A store answered."""
    counts.fetched += nbytes
    counts.requests += requests
    _is_done(nbytes, "read")


def has_written(nbytes: int) -> None:
    """Bytes of an output are where they belong."""
    counts.written += nbytes
    _is_done(nbytes, "written")


def has_made(moved: int, computed: int) -> None:
    """An output was made of so many bytes of its sources."""
    counts.moved += moved
    counts.computed += computed
