"""Paths and URLs as text, and paths inside a folder made from untrusted names."""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path, PurePosixPath

# scheme://…, also behind fsspec's own chaining: simplecache::s3://…
_URL = re.compile(r"(?:[A-Za-z][A-Za-z0-9+.-]*::)*[A-Za-z][A-Za-z0-9+.-]*://")


def is_url(path: str) -> bool:
    """Whether `path` is a URL that fsspec reads, and no path of this machine."""
    return _URL.match(path) is not None


def join(folder: str, name: str) -> str:
    """The path of `name` in the folder."""
    if not is_url(folder):
        return os.path.join(folder, name)
    before, path, after = _parts(folder)
    return before + posixpath.join(path, name) + after


def parent(path: str) -> str:
    """The folder that `path` lies in; ``.`` for a bare name."""
    if not is_url(path):
        return os.path.dirname(path) or "."
    before, own, after = _parts(path)
    return before + posixpath.dirname(own.rstrip("/")) + after


def name(path: str) -> str:
    """The last part of `path`; empty where it ends in a slash."""
    return posixpath.basename(_parts(path)[1]) if is_url(path) else os.path.basename(path)


def _parts(url: str) -> tuple[str, str, str]:
    """What stands before the path of the URL's file, that path, and what a chain of URLs has behind it."""
    start = url.index("://") + 3
    end = url.find("::", start)
    return (url[:start], url[start:], "") if end < 0 else (url[:start], url[start:end], url[end:])


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
