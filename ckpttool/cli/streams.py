"""stdout and stderr: encoding, `--quiet`, warnings, the log; and the temporary folder that torch
leaves behind.
"""

from __future__ import annotations

import codecs
import json
import os
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from ckpttool.core.errors import CkptError
from ckpttool.core.text import number, visible

_ESCAPES = "ckpttool.escapes"
_LONGEST = 4000  # characters of a line on stderr
_OLD_COMMAND = "##["


def set_up() -> None:
    r"""Write characters that the encoding of a stream lacks as ``\uXXXX``, which JSON reads
    back.
    """
    codecs.register_error(_ESCAPES, _escaped)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors=_ESCAPES)


def _escaped(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end


def for_log(text: str, format: str) -> str:
    """Return the output for the log of a GitHub job, whose runner must not obey a key in it as a
    command.
    """
    if os.environ.get("GITHUB_ACTIONS") != "true" or format == "github":
        return text
    from ckpttool.report.renderers.github import inert

    return text.replace(_OLD_COMMAND, r"##\u005b") if format == "json" else inert(text)


def clipped(line: str) -> str:
    """Return the line; of a very long one the beginning and the end."""
    if len(line) <= _LONGEST:
        return line
    half = _LONGEST // 2
    return f"{line[:half]} … {len(line) - 2 * half:,} characters … {line[-half:]}"


_quiet = False


def is_quiet() -> bool:
    """Return True if `--quiet` was given."""
    return _quiet


@contextmanager
def quiet(is_on: bool = True) -> Iterator[None]:
    """Print errors only while the block runs, if `is_on`."""
    global _quiet
    before, _quiet = _quiet, is_on
    try:
        yield
    finally:
        _quiet = before


LEVELS = ("debug", "info", "warning", "error")


@contextmanager
def logged() -> Iterator[None]:
    """Log while the block runs, if ``CKPTTOOL_LOG`` is set: ``info`` reports fetched bytes,
    ``debug`` every request.

    Raise `CkptError` if it is not a level.
    """
    level = os.environ.get("CKPTTOOL_LOG", "").lower()
    if not level:
        yield
        return
    if level not in LEVELS:
        raise CkptError(
            f"CKPTTOOL_LOG={level}: no such level", hint=f"choose one of {', '.join(LEVELS)}"
        )
    import logging

    from ckpttool.io.remote import log_fetched

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
    """At the end of the block, write a ``warning:`` line for each place of torch or the user's code
    that warned.

    It has the first text of the place, and how often it warned.
    """
    texts: dict[str, str] = {}
    count: Counter[str] = Counter()

    def collect(
        message: Any, category: Any, filename: str, lineno: int, *_: Any, **__: Any
    ) -> None:
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


@contextmanager
def nothing_left() -> Iterator[None]:
    """Remove the empty folder that importing ``torch._dynamo`` leaves among the temporary files, if
    it is new.
    """
    begun = time.time()
    try:
        yield
    finally:
        if "torch" in sys.modules and "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
            import getpass
            import tempfile

            with suppress(OSError, KeyError, ImportError):
                # The same name as in `torch._inductor.runtime.cache_dir_utils.default_cache_dir`.
                user = re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
                folder = os.path.join(tempfile.gettempdir(), f"torchinductor_{user}")
                if os.stat(folder).st_mtime >= begun:
                    os.rmdir(folder)
