"""Inject faults into calls that change the disk: the n-th call fails, all later ones fail, or the
process is killed.

Python's functions are replaced in a forked process, and fail like the system calls would.
`strace.py` does the same below Python if strace is installed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ckpttool.io import syscalls

CHANGES = (
    *("write", "ftruncate", "fsync", "fchmod", "fchown", "chmod", "chown", "utime"),
    *("link", "symlink", "rename", "replace", "unlink", "remove", "mkdir", "rmdir"),
)
_OPENS_TO_WRITE = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_SIGNALS = {"TERM": signal.SIGTERM, "INT": signal.SIGINT, "HUP": signal.SIGHUP}

MODES = (
    "EIO",
    "ENOSPC",
    "all EIO",
    "short",
    "KILL before",
    "KILL within",
    "KILL after",
    "TERM",
    "INT",
    "HUP",
)


@dataclass
class Injector:
    """Count the calls; inject the fault `mode` at call number `at` (from 0)."""

    mode: str = ""
    at: int = -1
    calls: list[str] = field(default_factory=list)

    def install(self) -> None:
        """Replace the functions for the rest of the process."""
        for name in CHANGES:
            setattr(os, name, self._wrapped(name, getattr(os, name)))
        opens = os.open
        os.open = lambda path, flags, *more, **how: (
            self._call("open", opens, path, flags, *more, **how)
            if flags & _OPENS_TO_WRITE
            else opens(path, flags, *more, **how)
        )
        syscalls.renameat2 = self._wrapped("renameat2", syscalls.renameat2)
        syscalls.fallocate = self._wrapped("fallocate", syscalls.fallocate)
        fcntl.flock = self._wrapped("flock", fcntl.flock)

    def _wrapped(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **how: self._call(name, call, *args, **how)

    def _call(self, name: str, call: Callable[..., Any], *args: Any, **how: Any) -> Any:
        number = len(self.calls)
        self.calls.append(name)
        now = number == self.at
        if self.mode == "all EIO" and 0 <= self.at <= number:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if not now:
            return call(*args, **how)
        if self.mode in _SIGNALS:
            signal.raise_signal(_SIGNALS[self.mode])
            return call(*args, **how)
        if self.mode == "KILL before":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.mode in ("short", "KILL within") and name == "write":
            descriptor, data = args
            count = call(descriptor, data[: max(1, len(data) // 2)])
            if self.mode == "short":
                return count
            os.kill(os.getpid(), signal.SIGKILL)
        if self.mode in ("EIO", "ENOSPC"):
            raise OSError(getattr(errno, self.mode), os.strerror(getattr(errno, self.mode)))
        try:
            return call(*args, **how)
        finally:
            if self.mode == "KILL after":
                os.kill(os.getpid(), signal.SIGKILL)
