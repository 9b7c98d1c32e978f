"""Names inside a folder come from files of strangers: a path is made of them only where it stays in the folder."""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath

from ckpttool.io.paths import is_url, join

_IN_URLS = re.compile(r"[%?#*\[\]]|::|://")
_LONGEST = 255  # bytes of a name, on every file system that is in use


def is_inside(name: str) -> bool:
    """Whether the name, as a path, stays in the folder that it is put into, and is spelled in the one usual way."""
    pure = PurePosixPath(name)
    strange = "\0" in name or "\\" in name or pure.is_absolute() or ".." in pure.parts or str(pure) != name
    return bool(name) and name != "." and not strange and bool(_encoded(name))


def is_nameable(name: str) -> bool:
    """Whether a file on this machine, inside the folder, can have the name."""
    return is_inside(name) and all(len(part) <= _LONGEST for part in _encoded(name).split(b"/"))


def _encoded(name: str) -> bytes:
    """What the system calls the file; nothing for what it cannot spell: half of a pair of surrogates."""
    try:
        return os.fsencode(name)
    except UnicodeEncodeError:
        return b""


def safe_path(folder: str | Path, name: str) -> str | None:
    """The path of the file that a stranger calls `name` in `folder`, or None where that leads out of the folder.

    Symbolic links may lead out only into the ``blobs`` of a Hugging Face cache, whose ``snapshots`` hold nothing but
    such links. Names under a URL may hold nothing that a URL gives a meaning to.
    """
    if not is_inside(name):
        return None
    if is_url(str(folder)):
        return None if _IN_URLS.search(name) else join(str(folder), name)
    home = Path(os.path.realpath(folder))
    real = Path(os.path.realpath(home / name))
    blobs = [parent.parent / "blobs" for parent in (home, *home.parents) if parent.name == "snapshots"]
    return os.path.join(folder, name) if any(real.is_relative_to(root) for root in (home, *blobs)) else None
