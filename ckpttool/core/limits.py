"""Limits on the cost of an input, which error messages name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from ckpttool.core.errors import CkptError
from ckpttool.core.values import dataclass

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = re.compile(r"(\d{1,15})(?:([KMGT])(?:I?B)?|B)?")
DEFAULT_MEMORY = 1 << 30
# Limits that follow --max-memory, and what part of it each of them is.
_OF_MEMORY = {
    "json_bytes": 1,
    "pickle_bytes": 1,
    "made_bytes": 1,
    "pickle_memory": 8,
    "pickle_opcodes": 32,
}


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits, each with its unit. Those of `_OF_MEMORY` follow `--max-memory`, the others are
    constants.
    """

    json_bytes: int = DEFAULT_MEMORY  # of a names file, an index, a config
    rules_bytes: int = 1 << 20  # of a file of rules
    rules_dots: int = 100  # in a line of it: each level costs as much again as those above
    rules_seconds: int = 2  # of CPU time, for all matches of one regular expression (``re:``)
    pickle_bytes: int = DEFAULT_MEMORY  # of one pickle; a tensor takes about 110
    pickle_opcodes: int = DEFAULT_MEMORY // 32  # of one pickle; a tensor takes about 35
    pickle_memory: int = DEFAULT_MEMORY // 8  # for what pickles make, and 16 for each file byte
    pickle_marks: int = 10_000  # open at a time: as many as containers lie inside each other
    made_bytes: int = DEFAULT_MEMORY  # held while one tensor is made of small ones
    made_times: int = 16  # how often what a tensor is made of may be held while it is computed
    made_parts: int = 1 << 16  # tensors that one operator may give, as `split` does
    remote_seconds: int = 300  # that a store may be silent

    def named(self, name: str, needed: int = 0) -> str:
        """Return the text about the limit for an error, with the option that raises it to `needed`,
        if there is one.
        """
        value = getattr(self, name)
        text = f"the limit {name} is {value:,}"
        if name not in _OF_MEMORY:
            return text
        return (
            f"{text} (--max-memory {_size_text(max(2 * value, needed) * _OF_MEMORY[name])}"
            " raises it)"
        )


def _size_text(nbytes: int) -> str:
    """Return the size as `--max-memory` takes it, rounded up: ``2G``."""
    for unit in "TGMK":
        if nbytes >= _UNITS[unit]:
            return f"{-(-nbytes // _UNITS[unit])}{unit}"
    return str(nbytes)


def with_memory(text: str | None) -> Limits:
    """Return the limits for ``--max-memory SIZE``: a number, perhaps with K, M, G or T; None for
    the default.

    Raises `CkptError` for another text.
    """
    if text is None:
        return Limits()
    size = _SIZE.fullmatch(text.strip().upper())
    if size is None or not int(size[1]):
        raise CkptError(
            f"--max-memory {text}: not a size", hint="as in --max-memory 4G; the default is 1G"
        )
    nbytes = int(size[1]) * _UNITS[size[2] or ""]
    return Limits(**{name: max(1, nbytes // part) for name, part in _OF_MEMORY.items()})


_limits = Limits()
# seconds that each regular expression has taken in this call of the program
spent: dict[str, float] = {}


def limits() -> Limits:
    return _limits


@contextmanager
def limited(to: Limits) -> Iterator[None]:
    global _limits
    before, _limits = _limits, to
    try:
        yield
    finally:
        _limits = before


_TIMES = 16  # bytes of memory for each byte of a file
_spare: ContextVar[list[int] | None] = ContextVar("spare", default=None)


@contextmanager
def one_reading() -> Iterator[None]:
    """Share `Limits.pickle_memory` among all files that are read inside the block; outside, each
    has all of it.
    """
    token = _spare.set([_limits.pickle_memory])
    try:
        yield
    finally:
        _spare.reset(token)


class Memory:
    """The bytes of memory that the index of a file of `nbytes` may take: an upper bound, not
    measured.
    """

    __slots__ = ("_own", "_spare")

    def __init__(self, nbytes: int) -> None:
        self._own = _TIMES * nbytes
        spare = _spare.get()
        self._spare = [_limits.pickle_memory] if spare is None else spare

    @property
    def left(self) -> int:
        return self._own + self._spare[0]

    def take(self, nbytes: int) -> None:
        """Count bytes that are about to be taken. Raises `CkptError`, which names the limit, if
        there are no more.
        """
        from_own = min(self._own, nbytes)
        self._own -= from_own
        self._spare[0] -= nbytes - from_own
        if self._spare[0] < 0:
            raise CkptError(
                f"what its pickle makes takes too much memory: {_limits.named('pickle_memory')}",
                hint="the file is damaged or hostile: download or save it again",
            )
