"""Local files that are open for reading. Inside of `kept`, a file is opened once, however often it
is read.
"""

from __future__ import annotations

import errno
import os
import stat
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from threading import RLock

from ckpttool.core.errors import CkptError
from ckpttool.core.values import dataclass
from ckpttool.io import progress

_MOST = 256  # files that nobody reads, and that are kept open
_FEW = 4  # files: fewer are opened one after the other
_SIDE_BY_SIDE = 16
_NO_FILES = (
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISCHR, "a terminal or another device"),
    (stat.S_ISBLK, "a disk"),
    (stat.S_ISSOCK, "a socket"),
)


@dataclass(slots=True, eq=False)
class Handle:
    """An open file. `users` read it just now; `stays` until `kept` ends, or until another file has
    its path.
    """

    path: str
    descriptor: int
    users: int = 0
    stays: bool = False


_kept: OrderedDict[str, Handle] = OrderedDict()  # by path, the last used at the end
_blocks = 0  # of `kept`, inside each other
_lock = RLock()


@contextmanager
def kept() -> Iterator[None]:
    """Keep the files that are read inside open until the outermost block ends."""
    global _blocks
    _blocks += 1
    try:
        yield
    finally:
        _blocks -= 1
        if not _blocks:
            with _lock:
                for handle in list(_kept.values()):
                    _drop(handle)


def acquire(path: str, *, pipes: bool = False) -> Handle:
    """Return the open file at the path; `release` it. Raises OSError if it cannot be opened.

    Raises `CkptError` for a terminal, a device and, without `pipes`, a pipe, and does not wait for
    them.
    """
    place = os.path.abspath(path)
    handle = _use_kept(place)
    if handle is not None:
        return handle
    descriptor = _opened(path, pipes)  # without the lock: on NFS it takes long
    with _lock:
        handle = _use_kept(place)
        if handle is not None:  # another thread was faster
            os.close(descriptor)
            return handle
        handle = Handle(place, descriptor, users=1)
        if _blocks and _is_file(descriptor):
            handle.stays = True
            _kept[place] = handle
            _drop_unused()
        return handle


def look_ahead(heads: Mapping[str, int]) -> None:
    """Open the files side by side, and let the system read about so many bytes at the start of
    each: behind NFS, an open file is several requests.

    An error is raised when the file is read. Outside of `kept` nothing is done.
    """
    if not _blocks or len(heads) < _FEW:
        return
    from concurrent.futures import ThreadPoolExecutor  # most commands do not need it

    with ThreadPoolExecutor(_SIDE_BY_SIDE) as pool:
        for path, nbytes in heads.items():
            pool.submit(_announce, path, nbytes)


def _announce(path: str, nbytes: int) -> None:
    with suppress(OSError, CkptError):
        handle = acquire(path)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(handle.descriptor, 0, nbytes, os.POSIX_FADV_WILLNEED)
        release(handle)


def _use_kept(place: str) -> Handle | None:
    """Return the kept file for one more user, if the path is still this file."""
    with _lock:
        handle = _kept.get(place)
        if handle is None:
            return None
        if not _is_at(place, handle):
            _drop(handle)
            return None
        handle.users += 1
        _kept.move_to_end(place)
        return handle


def _drop_unused() -> None:
    """Close the file that was used longest ago if there are too many."""
    if len(_kept) <= _MOST:
        return
    for handle in _kept.values():
        if not handle.users:
            _drop(handle)
            return


def release(handle: Handle) -> None:
    with _lock:
        handle.users -= 1
        if not handle.users and not handle.stays:
            os.close(handle.descriptor)


def close(path: str) -> None:
    """Close the kept file at the path, or all below it: NFS keeps a removed file that is open."""
    place = os.path.abspath(path)
    with _lock:
        for handle in list(_kept.values()):
            if handle.path == place or handle.path.startswith(place.rstrip(os.sep) + os.sep):
                _drop(handle)


def _drop(handle: Handle) -> None:
    del _kept[handle.path]
    handle.stays = False
    if not handle.users:
        os.close(handle.descriptor)


def _is_at(path: str, handle: Handle) -> bool:
    """Return whether the path is still the file that is open."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(handle.descriptor))
    except OSError:
        return False


def _is_file(descriptor: int) -> bool:
    return stat.S_ISREG(os.fstat(descriptor).st_mode)


def _opened(path: str, pipes: bool) -> int:
    """Open the file without waiting for a process that writes to a pipe."""
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)
    descriptor = os.open(path, flags)
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        kind = next((text for is_kind, text in _NO_FILES if is_kind(mode)), None)
        if kind is not None and not (pipes and stat.S_ISFIFO(mode)):
            raise CkptError(
                f"cannot read {path}: it is {kind}, not a file", hint="write it to a file first"
            )
        os.set_blocking(descriptor, True)
    except BaseException:
        os.close(descriptor)
        raise
    progress.count_opened(path)
    return descriptor
