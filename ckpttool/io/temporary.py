"""Files and folders that are being written: their names say whose they are, so what a dead process left is known.

A name holds the machine, its boot and the process (which is told from a later one with the same number by when it
started): ``.model.pt.HOST-BOOT-SPACE-PID-STARTED-RANDOM.ckpttool.tmp``.
"""

from __future__ import annotations

import os
import platform
import re
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from ckpttool.core.values import dataclass
from ckpttool.io.interrupts import uninterrupted

JOURNAL = "journal"  # in a staging folder: its files are being moved to their places, see `journal`
EDIT = ".edit"  # ends the name of a file that says what of its neighbours is being changed, see `edit_journal`

_NAME = re.compile(
    r"\..*\.(?P<host>[0-9a-f]{8})-(?P<boot>[0-9a-f]{8})-(?P<space>\d+)-(?P<pid>\d+)-(?P<started>\d+)-[0-9a-f]{8}"
    r"\.ckpttool\.(?:tmp|edit)",
    re.DOTALL,
)
_LONGEST = 100  # bytes of the name that a temporary one is made from; names have room for 255
_DAY = 86_400  # seconds after which what another machine left, and nobody touched, has no owner any more

_in_work: set[str] = set()  # names, without their endings, that this very process is writing to


@dataclass(frozen=True, slots=True)
class Owner:
    """A process: its machine and that machine's boot, the space that its number is of, when it started (ticks)."""

    host: str
    boot: str
    space: int
    pid: int
    started: int

    def __str__(self) -> str:
        return f"{self.host}-{self.boot}-{self.space}-{self.pid}-{self.started}"


def owner_of(name: str) -> Owner | None:
    """Whose temporary file or folder this is; None for a name that is none of ours."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    return Owner(found["host"], found["boot"], int(found["space"]), int(found["pid"]), int(found["started"]))


def is_edit(name: str) -> bool:
    """Whether this is the journal of an edit in place."""
    return name.endswith(EDIT) and owner_of(name) is not None


def temporary_name(name: str) -> str:
    """A hidden name beside `name` that no other process chooses, and that says that it is ours."""
    short = os.fsdecode(os.fsencode(name)[:_LONGEST]).encode("utf-8", "replace").decode().replace("/", "_")
    return f".{short}.{me()}-{os.urandom(4).hex()}.ckpttool.tmp"


def me() -> Owner:
    """This process."""
    return _owner(os.getpid())


@cache
def _owner(pid: int) -> Owner:
    boot = _text("/proc/sys/kernel/random/boot_id")
    try:
        space = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        space = 0
    return Owner(_short(platform.node()), _short(boot), space, pid, _started(pid) or 0)


def _short(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _started(pid: int) -> int | None:
    """When the process started, in ticks since boot; 0 where the platform does not say, None where there is none."""
    fields = _text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    if fields:
        return int(fields[19])
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except OSError:
        pass
    return 0


def is_dead(name: str, touched: float) -> bool:
    """Whether the owner of this temporary name is gone. `touched` is when it was last written (seconds since 1970).

    Of a process of another machine, or of another container, nothing is known but that.
    """
    owner, own = owner_of(name), me()
    if owner is None:
        return False
    if owner == own:
        return os.path.splitext(name)[0] not in _in_work
    if owner.host == own.host and owner.boot != own.boot:
        return True  # the machine was started anew
    if (owner.host, owner.boot, owner.space) == (own.host, own.boot, own.space):
        return _started(owner.pid) != owner.started
    return time.time() - touched > _DAY


def is_alive(name: str) -> bool:
    """Whether the owner of this temporary name is known to be still there."""
    owner, own = owner_of(name), me()
    here = owner is not None and (owner.host, owner.boot, owner.space) == (own.host, own.boot, own.space)
    return here and not is_dead(name, time.time())


def left_in(folder: str | Path) -> list[Path]:
    """What dead processes of this user left in the folder; without their journals of edits."""
    try:
        names = [name for name in os.listdir(folder) if owner_of(name) is not None and not is_edit(name)]
    except OSError:
        return []
    found = []
    for path in (Path(folder, name) for name in names):
        with suppress(OSError):
            state = path.lstat()
            if is_mine(state) and is_dead(path.name, state.st_mtime):
                found.append(path)
    return found


def is_mine(state: os.stat_result) -> bool:
    """Whether the file is this user's, where the platform knows users."""
    return not hasattr(os, "geteuid") or state.st_uid == os.geteuid()


def remove(path: str | Path) -> None:
    """Removes a temporary file or folder, as far as it can be; never raises OSError."""
    with suppress(OSError):
        os.unlink(path)
        return
    import shutil  # with three compression libraries

    shutil.rmtree(path, ignore_errors=True)


@contextmanager
def staged_file(place: Path) -> Iterator[tuple[int, Path]]:
    """A new file beside `place`, readable by its owner only, and its descriptor. It is gone when the block ends.

    Raises OSError where it cannot be made.
    """
    path = place.with_name(temporary_name(place.name))
    descriptor = -1
    try:
        with uninterrupted():
            _in_work.add(path.stem)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o600)
        yield descriptor, path
    finally:
        with uninterrupted():
            if descriptor >= 0:
                os.close(descriptor)
                remove(path)
            _in_work.discard(path.stem)


@contextmanager
def staged_folder(parent: Path, name: str) -> Iterator[Path]:
    """A new folder in `parent`, open to its owner only. It is gone when the block ends, but with a journal in it.

    Raises OSError where it cannot be made.
    """
    path = parent / temporary_name(name)
    try:
        with uninterrupted():
            _in_work.add(path.stem)
            path.mkdir(0o700)
        yield path
    finally:
        with uninterrupted():
            if not (path / JOURNAL).exists():
                remove(path)
            _in_work.discard(path.stem)
