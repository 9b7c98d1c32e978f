"""What the readers share: opening files, so that the operating system's errors come out as ours; large indexes."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

from ckpttool.errors import CkptError


@contextmanager
def opened(path: str) -> Iterator[BinaryIO]:
    """The file, open for reading bytes. Raises `CkptError` where it cannot be opened or read."""
    if "\0" in path:
        raise CkptError(f"cannot read {path!r}: a null byte in the path", hint=_HINT)
    try:
        with open(path, "rb") as file:
            yield file
    except OSError as error:
        raise CkptError(f"cannot read {path}: {error.strerror or error}", hint=_HINT) from error


_HINT = "check the path and its permissions"


@contextmanager
def many_objects() -> Iterator[None]:
    """For making the index of a large file: hundreds of thousands of objects, none of them garbage.

    Python's cycle collector would look through them again and again, and double the time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
