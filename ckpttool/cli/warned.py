"""Warnings of torch and of the user's own code, collected and said once on stderr, however often they were raised."""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ckpttool.words import number, visible


@contextmanager
def collected() -> Iterator[None]:
    """At the end of the block a ``warning:`` line for each place that warned: its first text, and how often."""
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
