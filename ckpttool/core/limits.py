"""Limits on the cost of an input, which error messages name."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields, replace

from ckpttool.core.errors import CkptError
from ckpttool.core.values import dataclass

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_VALUE = re.compile(r"(\d{1,15})([KMGT]?)")


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits, each with its unit."""

    json_bytes: int = 1 << 30  # of a plan, a names file, an index, a config
    rules_bytes: int = 1 << 20  # of a file of rules
    rules_dots: int = 100  # in a line of it, outside of strings: each level costs as much again as those above
    rules_seconds: int = 2  # of CPU time, for all matches of one regular expression (``re:``)
    pickle_bytes: int = 1 << 30  # of one pickle; a tensor takes about 110, and 1 kB of memory
    pickle_opcodes: int = 32_000_000  # of one pickle; a tensor takes about 35
    pickle_memory: int = 1 << 27  # bytes for what pickles expand to, on top of 16 for each byte of their files
    pickle_marks: int = 10_000  # open at a time: as many as containers lie inside each other
    made_bytes: int = 1 << 30  # held while one tensor is computed, where what it is made of is not large itself
    made_times: int = 16  # how often what a tensor is made of may be held while it is computed
    made_parts: int = 1 << 16  # tensors that one operator may give, as `split` does
    remote_seconds: int = 300  # that a store may be silent
    remote_requests: int = 4  # at a time for large tensors; each holds 8 MiB

    def named(self, name: str) -> str:
        """Return the text about the limit for an error, with the option that raises it."""
        value = getattr(self, name)
        return f"the limit {name} is {value:,} (--limit {name}={2 * value} raises it)"


_limits = Limits()
spent: dict[str, float] = {}  # seconds that each regular expression has taken in this call of the program


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


def raised(texts: Sequence[str]) -> Limits:
    """Return the limits with each ``NAME=VALUE`` applied; VALUE is a number, perhaps with K, M, G or T.

    Raises `CkptError` for an invalid limit.
    """
    result, known = Limits(), [field.name for field in fields(Limits)]
    for text in texts:
        name, _, value = text.partition("=")
        found = _VALUE.fullmatch(value)
        if name not in known or found is None:
            raise CkptError(
                f"not a limit: {text!r}", hint=f"as in --limit json_bytes=4G; the limits are {', '.join(known)}"
            )
        result = replace(result, **{name: int(found[1]) * _UNITS[found[2]]})
    return result


_TIMES = 16  # bytes of memory for each byte of a file
_spare: ContextVar[list[int] | None] = ContextVar("spare", default=None)


@contextmanager
def one_reading() -> Iterator[None]:
    """Share `Limits.pickle_memory` among all files that are read inside the block; outside, each has all of it."""
    token = _spare.set([_limits.pickle_memory])
    try:
        yield
    finally:
        _spare.reset(token)


class Memory:
    """The bytes of memory that the index of a file of `nbytes` may take: an upper bound, not measured."""

    __slots__ = ("_own", "_spare")

    def __init__(self, nbytes: int) -> None:
        self._own = _TIMES * nbytes
        spare = _spare.get()
        self._spare = [_limits.pickle_memory] if spare is None else spare

    @property
    def left(self) -> int:
        return self._own + self._spare[0]

    def take(self, nbytes: int) -> None:
        """Count bytes that are about to be taken. Raises `CkptError`, which names the limit, if there are no more."""
        own = min(self._own, nbytes)
        self._own -= own
        self._spare[0] -= nbytes - own
        if self._spare[0] < 0:
            raise CkptError(
                f"what its pickle makes takes too much memory: {_limits.named('pickle_memory')}",
                hint="the file is damaged or hostile: download or save it again",
            )
