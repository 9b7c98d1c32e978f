"""Sources: the state of each file when it was first opened, so that changes are noticed.

A source is never overwritten unasked, and an output is not more readable than its sources.
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

# nanoseconds; before Linux 6.13 all writes within one tick of the clock get the same time
_TICK = 20_000_000
_PATIENCE = 5  # ticks


# Device, inode, size and the times of the last changes (ns): tells one content of a file from
# another.
State = tuple[int, int, int, int, int]


@dataclass(slots=True)
class _Sources:
    """The sources of a command.

    `streamed`: paths and URLs whose tensors were read since `begin_reading`. `opened`: local files
    by path, with the number of the look. `read`: local files that are not checkpoints (rules,
    names, code). `looks` counts `forget`: an index that is read again may be of another file. Files
    that were opened before the look `begun` belong to earlier calls of the library.
    """

    streamed: set[str] = field(default_factory=set)
    opened: dict[str, tuple[int, State]] = field(default_factory=dict)
    read: set[str] = field(default_factory=set)
    looks: int = 0
    begun: int = 0


_sources = _Sources()


def forget_all() -> None:
    """Begin a new command."""
    global _sources
    _sources = _Sources()


def begin_call() -> None:
    """Begin a new call of the library: it may overwrite what earlier calls have read, but not what
    it reads itself.
    """
    _sources.begun = begin_look()


def begin_look() -> int:
    """Look again at files that are opened from now on; return the number of the look."""
    _sources.looks += 1
    return _sources.looks


def begin_reading() -> None:
    """Forget which tensors were read: another output begins."""
    _sources.streamed.clear()


def note_streamed(source: str) -> None:
    _sources.streamed.add(source)


def streamed() -> list[str]:
    """Return the paths and URLs whose tensors were read since `begin_reading`."""
    return sorted(_sources.streamed)


def note_opened(path: str, descriptor: int) -> None:
    """Note the state of the local file, if its index is read for the first time."""
    place = os.path.abspath(path)
    if place in _sources.opened and _sources.opened[place][0] >= _sources.looks:
        return
    # until the clock has moved on, so that every later write gets another time
    for _ in range(_PATIENCE):
        young = _TICK - (time.time_ns() - os.fstat(descriptor).st_ctime_ns)
        if not 0 < young <= _TICK:
            break
        time.sleep(young / 1e9)
    _sources.opened[place] = _sources.looks, _state(os.fstat(descriptor))


def note_read(path: str) -> None:
    _sources.read.add(os.path.abspath(path))


def opened_since(look: int) -> dict[str, State]:
    """Return the state of each local file that was opened since that look."""
    return {path: state for path, (at, state) in _sources.opened.items() if at >= look}


def others_read() -> list[str]:
    return sorted(_sources.read)


def files_read() -> list[str]:
    """Return the local files that the command, or call of the library, has read."""
    return [
        *(path for path, (look, _) in _sources.opened.items() if look >= _sources.begun),
        *_sources.read,
    ]


def states() -> dict[str, list[int]]:
    """Return inode, size and times of the last changes (ns) of each local file that was read."""
    states = {path: state for path, (_, state) in _sources.opened.items()}
    for path in _sources.read.difference(states):
        with suppress(OSError):
            states[path] = _state(os.stat(path))
    return {path: [*state[1:]] for path, state in sorted(states.items())}


def check_open(path: str, descriptor: int) -> None:
    """Raise `CkptError` if the local file has changed since its index was read; before its tensors
    are read.
    """
    place = os.path.abspath(path)
    if place not in _sources.opened:
        note_opened(path, descriptor)
    if _state(os.fstat(descriptor)) != _sources.opened[place][1]:
        raise _changed(path)


def check_unchanged(paths: Iterable[str]) -> None:
    """Raise `CkptError` if one of these local files has changed since it was opened."""
    for path in paths:
        noted = _sources.opened.get(os.path.abspath(path))
        try:
            now = _state(os.stat(path))
        except OSError:
            raise _changed(path) from None
        if noted is not None and now != noted[1]:
            raise _changed(path)


def is_still(path: str, state: State) -> bool:
    """Return True if the local file still has the state in which it was opened; it must keep it
    from now on.
    """
    with suppress(OSError):
        if _state(os.stat(path)) == state:
            _sources.opened[path] = _sources.looks, state
            return True
    return False


def forget(path: str) -> None:
    """Forget everything at and under the path: it may be another file from now on."""
    _sources.looks += 1
    place = Path(os.path.abspath(path))
    for name in [name for name in _sources.opened if Path(name).is_relative_to(place)]:
        del _sources.opened[name]


def _state(stat: os.stat_result) -> State:
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def _changed(path: str) -> CkptError:
    return CkptError(
        f"{path} was changed while it was read", hint="run it again, once nobody writes to it"
    )
