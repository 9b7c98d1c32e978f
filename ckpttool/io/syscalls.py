"""System calls that Python lacks or that some platforms lack: renames, locks, allocation, the page cache."""

from __future__ import annotations

import errno
import os
import sys
from contextlib import suppress
from pathlib import Path

from ckpttool.core.errors import CkptError

# Errors of a call that this file system or platform does not have.
NOT_HERE = frozenset({errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EPERM, errno.EMLINK})

_AT_FDCWD = -100
_RENAME_NOREPLACE, _RENAME_EXCHANGE = 1, 2  # linux/fs.h
_SYNC_FILE_RANGE_WRITE = 2  # linux/fs.h


def _call(name: str, *args: object) -> None:
    if not sys.platform.startswith("linux"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    import ctypes

    library = ctypes.CDLL(None, use_errno=True)
    call = getattr(library, f"{name}64", None) or getattr(library, name, None)
    if call is None or call(*args) != 0:
        number = errno.ENOSYS if call is None else ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def renameat2(old: Path, new: Path, flags: int) -> None:
    """Move a file or folder; `flags` say what may happen to the one at `new`."""
    try:
        _call("renameat2", _AT_FDCWD, os.fsencode(old), _AT_FDCWD, os.fsencode(new), flags)
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.fspath(old), None, os.fspath(new)) from None


def exchange(left: Path, right: Path) -> None:
    """Swap two files or folders in one call. Raises OSError, one of `NOT_HERE` if that is not possible here."""
    renameat2(left, right, _RENAME_EXCHANGE)


def put(staged: Path, place: Path, *, replace: bool) -> None:
    """Move the staged file to `place`. Without `replace`, exactly one of two processes succeeds.

    Raises FileExistsError if a file is there and `replace` is not set, and any other OSError.
    """
    if replace:
        os.replace(staged, place)
        return
    try:
        os.link(staged, place, follow_symlinks=False)
    except FileExistsError:
        raise
    except OSError as error:
        if error.errno not in NOT_HERE:
            raise
    else:
        with suppress(OSError):  # a second name that stays is removed later, as any temporary file
            os.unlink(staged)
        return
    try:  # a file system without hard links
        renameat2(staged, place, _RENAME_NOREPLACE)
    except OSError as error:
        if error.errno not in NOT_HERE:
            raise
        if os.path.lexists(place):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), os.fspath(place)) from error
        os.rename(staged, place)


def lock(descriptor: int, *, wait: bool = False) -> bool | None:
    """Lock the open file or folder. False: another process has it locked; None: this file system has no locks."""
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except (ImportError, OSError):
        return None
    return True


def sync_folder(folder: Path) -> None:
    """Make renames in the folder durable, if the platform can flush a folder. Raises OSError."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in NOT_HERE:
            raise
    finally:
        os.close(descriptor)


def confirm(out: str, folder: Path) -> None:
    """Flush the folder that `out` was moved into. Raises `CkptError` that says what is true then."""
    try:
        sync_folder(folder)
    except OSError as error:
        raise CkptError(
            f"{out} is written and complete, but the disk does not confirm that it stays: {error.strerror}",
            hint="check the disk; until it has flushed its caches, a loss of power could bring the old state back",
        ) from error


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Write all of `data` at the current position. Raises OSError."""
    view = memoryview(data)
    while view:  # a call may write less than it was given
        view = view[os.write(descriptor, view) :]


def fallocate(descriptor: int, mode: int, offset: int, length: int) -> None:
    """Allocate blocks of the file, insert some between its blocks, or remove some."""
    import ctypes

    _call("fallocate", descriptor, mode, ctypes.c_int64(offset), ctypes.c_int64(length))


def reserve(descriptor: int, offset: int, length: int) -> None:
    """Allocate blocks before they are written, if the file system can: a full disk is noticed at once."""
    try:
        fallocate(descriptor, 0, offset, length)
    except OSError as error:
        if error.errno not in (*NOT_HERE, errno.EINTR):
            raise


def write_back(descriptor: int, offset: int, length: int) -> None:
    """Ask the disk to start writing these bytes, without waiting; `os.fsync` reports errors."""
    import ctypes

    with suppress(OSError):
        _call("sync_file_range", descriptor, ctypes.c_int64(offset), ctypes.c_int64(length), _SYNC_FILE_RANGE_WRITE)


def evict(descriptor: int, offset: int, length: int) -> None:
    """Remove bytes that the disk has from the page cache."""
    with suppress(OSError, AttributeError):
        os.posix_fadvise(descriptor, offset, length, os.POSIX_FADV_DONTNEED)


def memory() -> int:
    """Return the bytes of memory of the machine, or a very large number if it is not known."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, AttributeError):
        return sys.maxsize
