"""Opening files for the readers, so that the operating system's errors come out as ours."""

from __future__ import annotations

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
