"""Regular expressions of the user's (``re:``), matched for a limited time.

An engine of linear time would need none; but none has Python's syntax and meaning whole, and a rule has to give the
same names wherever it is carried out.
"""

from __future__ import annotations

import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import FrameType

from ckpttool.errors import CkptError
from ckpttool.limits import limits

_SLOW = 0.01  # seconds; what is faster is not counted


class Regex:
    """One expression, and the time that its slow matches have taken in all."""

    def __init__(self, text: str) -> None:
        """Raises `re.error` and OverflowError for what is no expression."""
        self.text = text
        self.pattern = re.compile(text)
        self.seconds = 0.0

    def fullmatch(self, key: str) -> re.Match[str] | None:
        """The match, or None. Raises `CkptError` where it takes too long."""
        start = time.monotonic()
        try:
            with _alarm(limits().rules_seconds - self.seconds, self._too_slow):
                return self.pattern.fullmatch(key)
        finally:
            taken = time.monotonic() - start
            self.seconds += taken if taken > _SLOW else 0.0

    def _too_slow(self) -> CkptError:
        return CkptError(
            f"the regular expression {self.text!r:.200} takes too long: {limits().named('rules_seconds')}",
            hint="repeat no group that repeats something itself, as in (a+)+",
        )


@lru_cache(maxsize=1000)
def compiled(text: str) -> Regex:
    """The expression. Raises ValueError, in words, for what is none."""
    try:
        return Regex(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(str(error)) from None


@contextmanager
def _alarm(seconds: float, failure: Callable[[], CkptError]) -> Iterator[None]:
    """Raises `failure()` inside when the time is over: Python's matcher looks for signals while it runs.

    Signals reach the main thread of a Unix system only; elsewhere the time is not limited.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def over(number: int, frame: FrameType | None) -> None:
        raise failure()

    before = signal.signal(signal.SIGALRM, over)
    try:
        signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.001))
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
