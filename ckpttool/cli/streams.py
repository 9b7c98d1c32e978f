"""What stdout and stderr are besides text: an encoding, the log of a GitHub job; and what a process leaves behind."""

from __future__ import annotations

import codecs
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ckpttool.report.renderers.github import unobeyed

_ESCAPES = "ckpttool.escapes"
_LONGEST = 4000  # characters of a line on stderr
_OLD_COMMAND = "##["


def set_up() -> None:
    r"""A key that the encoding of a stream has not is written as ``\uXXXX``, which JSON reads back, and is no error."""
    codecs.register_error(_ESCAPES, _escaped)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors=_ESCAPES)


def _escaped(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end


def for_log(text: str, format: str) -> str:
    """The output as the log of a GitHub job may have it: no key in it is obeyed as a command of the runner's."""
    if os.environ.get("GITHUB_ACTIONS") != "true" or format == "github":
        return text
    return text.replace(_OLD_COMMAND, r"##\u005b") if format == "json" else unobeyed(text)


def clipped(line: str) -> str:
    """The line, or of an endless one its beginning and its end."""
    if len(line) <= _LONGEST:
        return line
    half = _LONGEST // 2
    return f"{line[:half]} … {len(line) - 2 * half:,} characters … {line[-half:]}"


_quiet = False


def is_quiet() -> bool:
    """Whether the command is to print errors only."""
    return _quiet


@contextmanager
def quiet(asked: bool = True) -> Iterator[None]:
    """Inside, nothing but errors is printed, where that is asked for."""
    global _quiet
    before, _quiet = _quiet, asked
    try:
        yield
    finally:
        _quiet = before


@contextmanager
def nothing_left() -> Iterator[None]:
    """Removes the empty folder that importing ``torch._dynamo`` leaves among the temporary files, where it was not."""
    begun = time.time()
    try:
        yield
    finally:
        folder = _folder_of_inductor() if "torch" in sys.modules else None
        if folder is not None:
            with suppress(OSError):
                if os.stat(folder).st_mtime >= begun:
                    os.rmdir(folder)


def _folder_of_inductor() -> str | None:
    """As ``torch._inductor.runtime.cache_dir_utils.default_cache_dir`` has it; None where the user names another."""
    import getpass
    import tempfile

    if "TORCHINDUCTOR_CACHE_DIR" in os.environ:
        return None
    try:
        user = re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
    except (OSError, KeyError, ImportError):
        return None
    return os.path.join(tempfile.gettempdir(), f"torchinductor_{user}")
