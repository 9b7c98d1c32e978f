"""Calls of the operating system: renames, locks, allocation, permissions, signals."""

from __future__ import annotations

import errno
import os
import signal
import stat
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from ckpttool.core.errors import CkptError
from ckpttool.io.paths import is_url

_ENDING = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)


class Terminated(KeyboardInterrupt):
    """The signal `number` ends the program; like Ctrl-C, ``except Exception`` does not catch it."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextmanager
def uninterrupted(*, insisting: bool = False) -> Iterator[None]:
    """Postpone signals that end the program until the block has ended.

    For short blocks of local calls. With `insisting`, a second signal is not postponed: for calls
    that may wait for a network. Signals reach the main thread only; in other threads nothing is
    postponed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        handler = handlers[number]
        if came and insisting and callable(handler):
            handler(number, frame)
        came.append(number)

    handlers = {number: signal.getsignal(number) for number in _ENDING}
    before = {
        number: handler
        for number, handler in handlers.items()
        if handler not in (signal.SIG_IGN, None)
    }
    try:
        for number in before:
            signal.signal(number, note)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for number in dict.fromkeys(came):
            signal.raise_signal(number)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise `Terminated` inside, so that everything is cleaned up; a second
    one ends at once.

    A signal that is ignored, as by nohup, stays ignored; outside of the main thread nothing
    changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        raise Terminated(number)

    ending = [number for number in _ENDING if number != signal.SIGINT]
    handlers = [number for number in ending if signal.getsignal(number) == signal.SIG_DFL]
    for number in handlers:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in handlers:
            signal.signal(number, signal.SIG_DFL)


# Errors of a call that this file system or platform does not have.
NOT_HERE = frozenset(
    {errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EPERM, errno.EMLINK}
)

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
    """Swap two files or folders in one call. Raises OSError, one of `NOT_HERE` if that is not
    possible here.
    """
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
            raise FileExistsError(
                errno.EEXIST, os.strerror(errno.EEXIST), os.fspath(place)
            ) from error
        os.rename(staged, place)


def lock(descriptor: int, *, wait: bool = False) -> bool | None:
    """Lock the open file or folder. False: another process has it locked; None: this file system
    has no locks.
    """
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
    """Flush the folder that `out` was moved into. Raises `CkptError` that says what is true
    then.
    """
    try:
        sync_folder(folder)
    except OSError as error:
        raise CkptError(
            f"{out} is written and complete, but the disk does not confirm that it stays:"
            f" {error.strerror}",
            hint="check the disk; until it has flushed its caches, a loss of power could bring the"
            " old state back",
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
    """Allocate blocks before they are written, if the file system can: a full disk is noticed at
    once.
    """
    try:
        fallocate(descriptor, 0, offset, length)
    except OSError as error:
        if error.errno not in (*NOT_HERE, errno.EINTR):
            raise


def write_back(descriptor: int, offset: int, length: int) -> None:
    """Ask the disk to start writing these bytes, without waiting; `os.fsync` reports errors."""
    import ctypes

    with suppress(OSError):
        _call(
            "sync_file_range",
            descriptor,
            ctypes.c_int64(offset),
            ctypes.c_int64(length),
            _SYNC_FILE_RANGE_WRITE,
        )


def evict(descriptor: int, offset: int, length: int) -> None:
    with suppress(OSError, AttributeError):
        os.posix_fadvise(descriptor, offset, length, os.POSIX_FADV_DONTNEED)


def memory() -> int:
    """Return the bytes of memory of the machine, or a very large number if it is not known."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, AttributeError):
        return sys.maxsize


_RWX = 0o777


def set_mode(descriptor: int, place: Path, sources: Iterable[str]) -> None:
    """Set owner and mode of the new file before it is moved to `place`. Raises OSError.

    It gets the owner and mode of the file that it replaces, without bits for reading or writing
    that a source lacks.
    """
    bits, group = _allowed(sources)
    old = _stat(place)
    if old is not None:
        bits &= old.st_mode
        group = old.st_gid
        _give(descriptor, old.st_uid, -1)
    else:
        bits &= 0o666 & ~umask()
    # a group that is not the sources' own may do no more than everybody else
    if not _give(descriptor, -1, group):
        bits = bits & ~stat.S_IRWXG | (bits & stat.S_IRWXO) << 3 & bits
    os.fchmod(descriptor, bits)


def set_folder_mode(folder: Path, sources: Iterable[str]) -> None:
    """Set the mode of the new folder: only users who can read its sources can look into it. Raises
    OSError.
    """
    inherited = folder.stat().st_mode & stat.S_ISGID
    folder.chmod(_allowed(sources)[0] & ~umask() | stat.S_IRWXU | inherited)


def umask() -> int:
    """Return the bits that new files of this process do not get."""
    with suppress(OSError), open("/proc/thread-self/status", "rb") as status:
        for line in status:
            if line.startswith(b"Umask:"):
                return int(line.split()[1], 8)
    # Without /proc: asking with `os.umask(0)` would let other threads create files that everybody
    # can write.
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        descriptor = os.open(
            os.path.join(folder, "new"), os.O_CREAT | os.O_EXCL | os.O_WRONLY, _RWX
        )
        try:
            return _RWX & ~(os.fstat(descriptor).st_mode & _RWX)
        finally:
            os.close(descriptor)


def _allowed(sources: Iterable[str]) -> tuple[int, int]:
    """Return the bits that all sources have, and their group, or -1 if they have none in common."""
    bits, groups = _RWX, set()
    for source in sources:
        state = None if is_url(source) else _stat(Path(source))
        if state is None:
            continue
        mode = state.st_mode
        if not stat.S_ISDIR(mode):
            # who can read a file can look into the folder that is made of it
            mode |= (mode & 0o444) >> 2
        bits &= mode | 0o700
        groups.add(state.st_gid)
    return bits, groups.pop() if len(groups) == 1 else -1


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except (OSError, ValueError):
        return None


def _give(descriptor: int, user: int, group: int) -> bool:
    """Set the owner of the file if this user may. Return True if its group is the right one now."""
    state = os.fstat(descriptor)
    if (user not in (-1, state.st_uid)) or (group not in (-1, state.st_gid)):
        with suppress(OSError):
            os.fchown(descriptor, user, group)
    return group in (-1, os.fstat(descriptor).st_gid)
