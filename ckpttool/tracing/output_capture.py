"""What the user's code prints, on stderr, each line once: a model is built several times over, of many layers.

What torch logs meanwhile is a warning like any other.
"""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import warnings
from collections.abc import Iterator


class Once(io.TextIOBase):
    """Lines that have been written are not written again."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._begun = ""

    def write(self, text: str) -> int:
        """Passes on the lines that are new; a line is a line when it ends."""
        *lines, self._begun = (self._begun + text).split("\n")
        for line in lines:
            if line not in self._seen:
                self._seen.add(line)
                sys.stderr.write(f"{line}\n")
        return len(text)

    def finish(self) -> None:
        """Writes the line that has no end yet."""
        if self._begun:
            self.write("\n")


_PRINTED = Once()


@contextlib.contextmanager
def prints_once() -> Iterator[None]:
    """What is printed to stdout while the block runs goes to stderr, unless it has been said before."""
    with contextlib.redirect_stdout(_PRINTED), logs_as_warnings():
        try:
            yield
        finally:
            _PRINTED.finish()


@contextlib.contextmanager
def logs_as_warnings() -> Iterator[None]:
    """Hands what torch would log to stderr while the block runs to `warnings.showwarning`, whatever the filters are."""
    names = [name for name in logging.root.manager.loggerDict if f"{name}.".startswith("torch.")]
    logs = map(logging.getLogger, names)
    handlers = [handler for log in logs for handler in log.handlers if _shown not in handler.filters]
    for handler in handlers:
        handler.addFilter(_shown)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(_shown)


def _shown(record: logging.LogRecord) -> bool:
    if record.levelno < logging.WARNING:
        return True
    warnings.showwarning(UserWarning(record.getMessage()), UserWarning, record.pathname, record.lineno)
    return False
