"""What goes to stderr beside the reports: warnings, and the log for who asks for it."""

from __future__ import annotations

import os
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ckpttool.core.errors import CkptError
from ckpttool.core.text import number, visible

LEVELS = ("debug", "info", "warning", "error")


@contextmanager
def logged() -> Iterator[None]:
    """Logs while the block runs, if ``CKPTTOOL_LOG`` is set: ``info`` says what was fetched, ``debug`` every request.

    Raises `CkptError` where it is no level.
    """
    level = os.environ.get("CKPTTOOL_LOG", "").lower()
    if not level:
        yield
        return
    if level not in LEVELS:
        raise CkptError(f"CKPTTOOL_LOG={level}: no such level", hint=f"choose one of {', '.join(LEVELS)}")
    import logging

    from ckpttool.io.remote.read import log_fetched

    log, handler = logging.getLogger("ckpttool"), logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    before = log.level
    log.addHandler(handler)
    log.setLevel(level.upper())
    try:
        yield
    finally:
        log_fetched()
        log.removeHandler(handler)
        log.setLevel(before)


@contextmanager
def collected() -> Iterator[None]:
    """At the end of the block a ``warning:`` line for each place of torch or the user's code that warned.

    It has the place's first text, and how often it warned.
    """
    texts: dict[str, str] = {}
    count: Counter[str] = Counter()

    def collect(message: Any, category: Any, filename: str, lineno: int, *_: Any, **__: Any) -> None:
        place = f"{filename}:{lineno}"
        count[place] += 1
        first = next(iter(str(message).strip().splitlines()), "")
        texts.setdefault(place, f"{category.__name__}: {first} ({place})")

    before = warnings.showwarning
    warnings.showwarning = collect
    try:
        yield
    finally:
        warnings.showwarning = before
        for place, text in texts.items():
            more = f", and {number(count[place] - 1)} more from there" if count[place] > 1 else ""
            sys.stderr.write(f"warning: {visible(text)}{more}\n")
