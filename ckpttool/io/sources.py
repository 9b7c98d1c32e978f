"""What was read: each file as it was when it was opened first, so that it is noticed when it changes.

Noted by those who read, asked by `files.sources_stay` and by those who write: a source is never written over unasked,
and what is made of it is not more readable than it is.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import field
from pathlib import Path

from ckpttool.core.errors import CkptError
from ckpttool.core.values import dataclass

_TICK = 20_000_000  # nanoseconds; kernels before 6.13 give all writes within one tick of their clock the same time
_PATIENCE = 5  # ticks


@dataclass(frozen=True, slots=True)
class State:
    """What tells one content of a file from another without reading it; times in nanoseconds."""

    device: int
    inode: int
    size: int
    written: int
    changed: int


@dataclass(slots=True)
class _Noted:
    """What a command has read.

    `streamed`: paths and URLs that tensors were read from since `note_anew`; `opened`: local files by their path, with
    the number of the look at it; `read`: local files that are no checkpoints (rules, plans, names, code). `looks` is
    counted by `forget`: an index that is read anew may be that of another file. What was opened before the look `begun`
    earlier calls of the library have read.
    """

    streamed: set[str] = field(default_factory=set)
    opened: dict[str, tuple[int, State]] = field(default_factory=dict)
    read: set[str] = field(default_factory=set)
    looks: int = 0
    begun: int = 0


_noted = _Noted()


def note_anew() -> None:
    """Tensors are read for something else from now on."""
    _noted.streamed.clear()


def streamed() -> list[str]:
    """The paths and URLs that tensors were read from since `note_anew`."""
    return sorted(_noted.streamed)


def note_streamed(source: str) -> None:
    """Notes that tensors of the path or URL are being read."""
    _noted.streamed.add(source)


def note_opened(path: str, descriptor: int) -> None:
    """Notes how the local file is, where an index is read of it for the first time."""
    place = os.path.abspath(path)
    if place not in _noted.opened or _noted.opened[place][0] < _noted.looks:
        _noted.opened[place] = _noted.looks, _settled(descriptor)


def note_read(path: str) -> None:
    """Notes that the local file, which is no checkpoint, was read."""
    _noted.read.add(os.path.abspath(path))


def check_open(path: str, descriptor: int) -> None:
    """Raises `CkptError` where the local file, whose tensors are to be read, is not the one whose index was read."""
    place = os.path.abspath(path)
    if place not in _noted.opened:
        note_opened(path, descriptor)
    if _state(os.fstat(descriptor)) != _noted.opened[place][1]:
        raise _changed(path)


def check_unchanged(paths: Iterable[str]) -> None:
    """Raises `CkptError` where one of these local files is no longer what it was when it was opened."""
    for path in paths:
        noted = _noted.opened.get(os.path.abspath(path))
        try:
            now = _state(os.stat(path))
        except OSError:
            raise _changed(path) from None
        if noted is not None and now != noted[1]:
            raise _changed(path)


def others_read() -> list[str]:
    """Those of `files_read` that are no checkpoints."""
    return sorted(_noted.read)


def files_read() -> list[str]:
    """The paths of the local files that the command, or call of the library, has opened."""
    return [*(path for path, (look, _) in _noted.opened.items() if look >= _noted.begun), *_noted.read]


def states() -> dict[str, list[int]]:
    """How each local file was that was opened or read: inode, size, times of the last changes (ns)."""
    found = {path: state for path, (_, state) in _noted.opened.items()}
    for path in _noted.read.difference(found):
        with suppress(OSError):
            found[path] = _state(os.stat(path))
    return {path: [at.inode, at.size, at.written, at.changed] for path, at in sorted(found.items())}


def forget(path: str) -> None:
    """What is at and under the path may be another file from now on."""
    _noted.looks += 1
    place = Path(os.path.abspath(path))
    for name in [name for name in _noted.opened if Path(name).is_relative_to(place)]:
        del _noted.opened[name]


def begin_look() -> int:
    """Files that are opened from now on are looked at anew; the number of the look."""
    _noted.looks += 1
    return _noted.looks


def opened_since(look: int) -> dict[str, State]:
    """How each local file was that was opened since that look."""
    return {path: state for path, (at, state) in _noted.opened.items() if at >= look}


def read_on(path: str, state: State) -> bool:
    """Whether the local file is as it was when it was opened, as it then has to stay."""
    with suppress(OSError):
        if _state(os.stat(path)) == state:
            _noted.opened[path] = _noted.looks, state
            return True
    return False


def begin_call() -> None:
    """A new call of the library begins: it may write over what earlier ones have read, not over what it reads."""
    _noted.begun = begin_look()


def forget_all() -> None:
    """A new command begins."""
    global _noted
    _noted = _Noted()


def _state(stat: os.stat_result) -> State:
    return State(stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)


def _settled(descriptor: int) -> State:
    """The file's state once its clock has gone on, so that whatever is written to it later gets another time."""
    for _ in range(_PATIENCE):
        now = os.fstat(descriptor)
        young = _TICK - (time.time_ns() - now.st_ctime_ns)
        if not 0 < young <= _TICK:
            break
        time.sleep(young / 1e9)
    return _state(os.fstat(descriptor))


def _changed(path: str) -> CkptError:
    return CkptError(f"{path} was changed while it was read", hint="run it again, once nobody writes to it")
