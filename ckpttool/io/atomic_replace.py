"""Put a staged file or folder in place of the old one, in one step where the system has one."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path

from ckpttool.core.errors import CkptError
from ckpttool.io import reflink

_RENAME_NOREPLACE, _RENAME_EXCHANGE = 1, 2  # linux/fs.h


def put(staged: Path, place: Path, *, replace: bool) -> None:
    """Makes the staged file the one at `place`. Without `replace`, of two processes exactly one succeeds.

    Raises FileExistsError where there is a file and `replace` is not set, and any other OSError.
    """
    if replace:
        os.replace(staged, place)
        return
    try:
        os.link(staged, place, follow_symlinks=False)
    except FileExistsError:
        raise
    except OSError as error:
        if error.errno not in reflink.NOT_HERE:
            raise
        _rename_new(staged, place)
        return
    with suppress(OSError):  # it is there; a second name that stays is litter, and known as such
        os.unlink(staged)


def _rename_new(staged: Path, place: Path) -> None:
    """A rename that replaces nothing, on file systems without hard links."""
    try:
        reflink.renameat2(staged, place, _RENAME_NOREPLACE)
    except OSError as error:
        if error.errno not in reflink.NOT_HERE:
            raise
        if os.path.lexists(place):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), os.fspath(place)) from error
        os.rename(staged, place)


def exchange(left: Path, right: Path) -> None:
    """Lets two files or folders change places at once. Raises OSError, of `kernel.NOT_HERE` where that cannot be."""
    reflink.renameat2(left, right, _RENAME_EXCHANGE)


def sync_folder(folder: Path) -> None:
    """Makes what was renamed in the folder durable, where the platform lets a folder be flushed. Raises OSError."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in reflink.NOT_HERE:
            raise
    finally:
        os.close(descriptor)


def confirm(out: str, folder: Path) -> None:
    """Flushes the folder that `out` was moved into. Raises `CkptError` that says what then is true."""
    try:
        sync_folder(folder)
    except OSError as error:
        raise CkptError(
            f"{out} is written and complete, but the disk does not confirm that it stays: {error.strerror}",
            hint="check the disk; until it has flushed its caches, a loss of power could bring the old state back",
        ) from error
