"""File permissions of outputs: what the umask allows, and never more than the source had."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from ckpttool.io.paths import is_url

_RWX = 0o777
_GROUP, _OTHERS = stat.S_IRWXG, stat.S_IRWXO


def settle_file(descriptor: int, place: Path, sources: Iterable[str]) -> None:
    """Gives the new file, that is to be at `place`, its owner and its bits. Raises OSError.

    It takes over those of a file that it replaces, and has no bit for reading or writing that a source lacks.
    """
    bits, group = _allowed(sources)
    old = _stat(place)
    if old is not None:
        bits &= old.st_mode
        group = old.st_gid
        _give(descriptor, old.st_uid, -1)
    else:
        bits &= 0o666 & ~umask()
    os.fchmod(descriptor, bits if _give(descriptor, -1, group) else _narrowed(bits))


def settle_path(path: Path, place: Path, sources: Iterable[str]) -> None:
    """`settle_file` of a new file that is closed."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        settle_file(descriptor, place, sources)
    finally:
        os.close(descriptor)


def settle_folder(folder: Path, sources: Iterable[str]) -> None:
    """Gives the new folder its bits: who may read none of its sources does not look into it either. Raises OSError."""
    inherited = folder.stat().st_mode & stat.S_ISGID
    folder.chmod(_allowed(sources)[0] & ~umask() | stat.S_IRWXU | inherited)


def umask() -> int:
    """The bits that new files of this process do not get."""
    with suppress(OSError), open("/proc/thread-self/status", "rb") as status:
        for line in status:
            if line.startswith(b"Umask:"):
                return int(line.split()[1], 8)
    return _RWX & ~_mode_of_new_file()


def _mode_of_new_file() -> int:
    """Without /proc: asking with `os.umask(0)` would let other threads create files that everybody may write."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        descriptor = os.open(os.path.join(folder, "new"), os.O_CREAT | os.O_EXCL | os.O_WRONLY, _RWX)
        try:
            return os.fstat(descriptor).st_mode & _RWX
        finally:
            os.close(descriptor)


def _allowed(sources: Iterable[str]) -> tuple[int, int]:
    """The bits that all sources have, and their group; -1 where they have none in common.

    A folder's right to look into it counts as the right to read.
    """
    bits, groups = _RWX, set()
    for state in filter(None, (_stat(Path(source)) for source in sources if not is_url(source))):
        own = state.st_mode
        if stat.S_ISDIR(own):
            bits &= own | 0o700
        else:
            bits &= own | (own & 0o444) >> 2 | 0o700  # who may read a file may look into the folder made of it
        groups.add(state.st_gid)
    return bits, groups.pop() if len(groups) == 1 else -1


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except (OSError, ValueError):
        return None


def _give(descriptor: int, user: int, group: int) -> bool:
    """Gives the file to the owner that it should have. Whether its group is that one now."""
    own = os.fstat(descriptor)
    if (user not in (-1, own.st_uid)) or (group not in (-1, own.st_gid)):
        with suppress(OSError):
            os.fchown(descriptor, user, group)
    return group in (-1, os.fstat(descriptor).st_gid)


def _narrowed(bits: int) -> int:
    """What a group that is not the sources' own may do: no more than everybody else."""
    return bits & ~_GROUP | (bits & _OTHERS) << 3 & bits
