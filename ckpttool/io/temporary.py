"""Names of temporary files and folders. They say whose they are, so leftovers of dead processes are
recognized.

A name holds the machine, its boot and the process; a later process with the same number is told
apart by its start time: ``.model.pt.HOST-BOOT-SPACE-PID-STARTED-RANDOM.ckpttool.tmp``.
"""

from __future__ import annotations

import os
import re
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from ckpttool.core.values import dataclass
from ckpttool.io.syscalls import uninterrupted

EDIT = ".edit"  # ends the name of a journal, see `transaction`

_NAME = re.compile(
    r"\..*\.(?P<host>[0-9a-f]{8})-(?P<boot>[0-9a-f]{8})-(?P<space>\d+)-(?P<pid>\d+)-(?P<started>\d+)-[0-9a-f]{8}"
    r"\.ckpttool\.(?:tmp|edit)",
    re.DOTALL,
)
# seconds after which something that another machine left, and nobody touched, has no owner any more
_DAY = 86_400

_in_work: set[str] = set()  # names, without their endings, that this process is writing to


@dataclass(frozen=True, slots=True)
class Owner:
    """A process: its machine and that machine's boot, its PID namespace, its PID, its start time
    (ticks).
    """

    host: str
    boot: str
    space: int
    pid: int
    started: int

    def __str__(self) -> str:
        return f"{self.host}-{self.boot}-{self.space}-{self.pid}-{self.started}"

    @property
    def process_space(self) -> tuple[str, str, int]:
        return self.host, self.boot, self.space


def owner_of(name: str) -> Owner | None:
    """Return the owner of a temporary file or folder, or None if ckpttool did not make the name."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    return Owner(
        match["host"], match["boot"], int(match["space"]), int(match["pid"]), int(match["started"])
    )


def is_edit(name: str) -> bool:
    return name.endswith(EDIT) and owner_of(name) is not None


def shortened(name: str) -> str:
    """Return as much of the name as fits into a longer one: file systems allow 255 bytes."""
    return (
        os.fsdecode(os.fsencode(name)[:100]).encode("utf-8", "replace").decode().replace("/", "_")
    )


def temporary_name(name: str) -> str:
    """Return a new hidden name that shows that it belongs to this process."""
    return f".{shortened(name)}.{me()}-{os.urandom(4).hex()}.ckpttool.tmp"


def me() -> Owner:
    return _owner(os.getpid())


@cache
def _owner(pid: int) -> Owner:
    try:
        space = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        space = 0
    host, boot = (
        f"{zlib.crc32(text.encode()):08x}"
        for text in (os.uname().nodename, _text("/proc/sys/kernel/random/boot_id"))
    )
    return Owner(host, boot, space, pid, _started(pid) or 0)


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _started(pid: int) -> int | None:
    """Return when the process started, in ticks since boot; 0 if the platform does not tell, None
    if it has ended.
    """
    fields = _text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    if fields:
        return int(fields[19])
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):  # a name can hold any number
        return None
    except OSError:
        pass
    return 0


def is_dead(name: str, touched: float) -> bool:
    """Return True if the owner of this temporary name has ended. `touched`: the time of the last
    write (since 1970).

    Nothing but that time is known about processes of another machine or container.
    """
    owner, this = owner_of(name), me()
    if owner is None:
        return False
    if owner == this:
        return os.path.splitext(name)[0] not in _in_work
    if owner.host == this.host and owner.boot != this.boot:
        return True  # the machine was restarted
    if owner.process_space == this.process_space:
        return _started(owner.pid) != owner.started
    return time.time() - touched > _DAY


def is_alive(name: str) -> bool:
    owner = owner_of(name)
    return (
        owner is not None
        and owner.process_space == me().process_space
        and not is_dead(name, time.time())
    )


def remove_left(folder: str | Path) -> None:
    """Remove the temporary files that dead processes of this user left in the folder.

    Nothing is removed of a process whose journal is there: the journal may refer to it.
    """
    with suppress(OSError):
        owners = {name: owner_of(name) for name in os.listdir(folder)}
        unfinished = {owner for name, owner in owners.items() if is_edit(name)}
        for name, owner in owners.items():
            if owner is None or owner in unfinished:
                continue
            path = os.path.join(folder, name)
            with suppress(OSError):
                state = os.lstat(path)
                if is_mine(state) and is_dead(name, state.st_mtime):
                    remove(path)


def is_mine(state: os.stat_result) -> bool:
    """Return True if the file is this user's, or if the platform has no users."""
    return not hasattr(os, "geteuid") or state.st_uid == os.geteuid()


def remove(path: str | Path) -> None:
    """Remove a temporary file or folder as far as possible. Never raises OSError."""
    with suppress(OSError):
        os.unlink(path)
        return
    import shutil  # imports three compression libraries

    shutil.rmtree(path, ignore_errors=True)


@contextmanager
def staged_file(place: Path) -> Iterator[tuple[int, Path]]:
    """Yield the descriptor and path of a new file next to `place` that only its owner can read;
    removed at the end.

    Raises OSError if it cannot be made.
    """
    path = place.with_name(temporary_name(place.name))
    descriptor = -1
    try:
        with uninterrupted():
            _in_work.add(path.stem)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        yield descriptor, path
    finally:
        with uninterrupted():
            if descriptor >= 0:
                os.close(descriptor)
                remove(path)
            _in_work.discard(path.stem)


@contextmanager
def staged_folder(parent: Path, name: str) -> Iterator[Path]:
    """Yield a new folder in `parent` that only its owner can open; removed at the end. Raises
    OSError.
    """
    path = parent / temporary_name(name)
    try:
        with uninterrupted():
            _in_work.add(path.stem)
            path.mkdir(0o700)
        yield path
    finally:
        with uninterrupted():
            remove(path)
            _in_work.discard(path.stem)
