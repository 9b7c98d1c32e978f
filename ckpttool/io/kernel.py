"""Linux's calls that Python's `os` lacks. Each raises OSError, with one of `NOT_HERE` where there is no such call."""

from __future__ import annotations

import errno
import os
import sys
from contextlib import suppress
from pathlib import Path

# What a file system or platform says of a call that it does not have.
NOT_HERE = frozenset({errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EPERM, errno.EMLINK})

_AT_FDCWD = -100
_WRITE = 2  # linux/fs.h: SYNC_FILE_RANGE_WRITE


def renameat2(old: Path, new: Path, flags: int) -> None:
    """Moves the file or folder; `flags` say what may happen to what is there."""
    try:
        _call("renameat2", _AT_FDCWD, os.fsencode(old), _AT_FDCWD, os.fsencode(new), flags)
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.fspath(old), None, os.fspath(new)) from None


def fallocate(descriptor: int, mode: int, offset: int, length: int) -> None:
    """Gives the file blocks, or puts some between its own, or takes some out."""
    import ctypes

    _call("fallocate", descriptor, mode, ctypes.c_int64(offset), ctypes.c_int64(length))


def reserve(descriptor: int, offset: int, length: int) -> None:
    """Gives the file its blocks before they are written, where the file system can: a full disk is noticed at once."""
    try:
        fallocate(descriptor, 0, offset, length)
    except OSError as error:
        if error.errno not in (*NOT_HERE, errno.EINTR):
            raise


def write_back(descriptor: int, offset: int, length: int) -> None:
    """Has the disk begin with these bytes of the file, and does not wait; what fails is said by `os.fsync`."""
    import ctypes

    with suppress(OSError):
        _call("sync_file_range", descriptor, ctypes.c_int64(offset), ctypes.c_int64(length), _WRITE)


def evict(descriptor: int, offset: int, length: int) -> None:
    """Takes what the disk has of these bytes out of the page cache; what it has not yet, stays."""
    with suppress(OSError, AttributeError):
        os.posix_fadvise(descriptor, offset, length, os.POSIX_FADV_DONTNEED)


def memory() -> int:
    """Bytes of memory that the machine has; where nobody says, as many as can be."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, AttributeError):
        return sys.maxsize


def _call(name: str, *args: object) -> None:
    if not sys.platform.startswith("linux"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    import ctypes

    library = ctypes.CDLL(None, use_errno=True)
    call = getattr(library, f"{name}64", None) or getattr(library, name, None)
    if call is None or call(*args) != 0:
        number = errno.ENOSYS if call is None else ctypes.get_errno()
        raise OSError(number, os.strerror(number))
