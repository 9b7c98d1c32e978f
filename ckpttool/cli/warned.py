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
    """A ``warning:`` line for each text that was warned of while the block ran, with how often, at its end."""
    found: Counter[str] = Counter()

    def collect(message: Any, category: Any, filename: str, lineno: int, *_: Any) -> None:
        first = next(iter(str(message).strip().splitlines()), "")
        found[f"{category.__name__}: {first} ({filename}:{lineno})"] += 1

    before = warnings.showwarning
    warnings.showwarning = collect
    try:
        yield
    finally:
        warnings.showwarning = before
        for text, count in found.items():
            times = f" ({number(count)} times)" if count > 1 else ""
            sys.stderr.write(f"warning: {visible(text)}{times}\n")
