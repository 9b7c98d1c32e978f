"""File permissions of outputs: what the umask allows, and never more than the source had."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from ckpttool.io.paths import is_url

_RWX = 0o777


def settle(descriptor: int, place: Path, sources: Iterable[str]) -> None:
    """Set owner and mode of the new file before it is moved to `place`. Raises OSError.

    It gets those of the file that it replaces, without bits for reading or writing that a source lacks.
    """
    bits, group = _allowed(sources)
    old = _stat(place)
    if old is not None:
        bits &= old.st_mode
        group = old.st_gid
        _give(descriptor, old.st_uid, -1)
    else:
        bits &= 0o666 & ~umask()
    if not _give(descriptor, -1, group):  # a group that is not the sources' own may do no more than everybody else
        bits = bits & ~stat.S_IRWXG | (bits & stat.S_IRWXO) << 3 & bits
    os.fchmod(descriptor, bits)


def settle_folder(folder: Path, sources: Iterable[str]) -> None:
    """Set the mode of the new folder: only users who can read its sources can look into it. Raises OSError."""
    inherited = folder.stat().st_mode & stat.S_ISGID
    folder.chmod(_allowed(sources)[0] & ~umask() | stat.S_IRWXU | inherited)


def umask() -> int:
    """Return the bits that new files of this process do not get."""
    with suppress(OSError), open("/proc/thread-self/status", "rb") as status:
        for line in status:
            if line.startswith(b"Umask:"):
                return int(line.split()[1], 8)
    # Without /proc: asking with `os.umask(0)` would let other threads create files that everybody can write.
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        descriptor = os.open(os.path.join(folder, "new"), os.O_CREAT | os.O_EXCL | os.O_WRONLY, _RWX)
        try:
            return _RWX & ~(os.fstat(descriptor).st_mode & _RWX)
        finally:
            os.close(descriptor)


def _allowed(sources: Iterable[str]) -> tuple[int, int]:
    """Return the bits that all sources have, and their group, or -1 if they have none in common."""
    bits, groups = _RWX, set()
    for state in filter(None, (_stat(Path(source)) for source in sources if not is_url(source))):
        mode = state.st_mode
        if not stat.S_ISDIR(mode):
            mode |= (mode & 0o444) >> 2  # who can read a file can look into the folder that is made of it
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
