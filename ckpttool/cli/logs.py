"""The log on stderr, for who asks for it: ``CKPTTOOL_LOG=info`` says what was fetched, ``debug`` every request."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from ckpttool.errors import CkptError

LEVELS = ("debug", "info", "warning", "error")


@contextmanager
def logged() -> Iterator[None]:
    """Logs to stderr while the block runs, if ``CKPTTOOL_LOG`` is set. Raises `CkptError` where it is no level."""
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
