"""Paths and URLs as text, and paths inside a folder made from untrusted names."""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path, PurePosixPath

# scheme://…, also with fsspec's chaining: simplecache::s3://…
_URL = re.compile(r"(?:[A-Za-z][A-Za-z0-9+.-]*::)*[A-Za-z][A-Za-z0-9+.-]*://")
_IN_URLS = re.compile(r"[%?#*\[\]]|::|://")
_LONGEST = 255  # bytes of a name, on every file system in use


def is_url(path: str) -> bool:
    """Return True if `path` is a URL for fsspec, not a path of this machine."""
    return _URL.match(path) is not None


def _parts(url: str) -> tuple[str, str, str]:
    """Return the text before the path of the URL's file, that path, and the rest of a chain of
    URLs.
    """
    start = url.index("://") + 3
    end = url.find("::", start)
    return (url[:start], url[start:], "") if end < 0 else (url[:start], url[start:end], url[end:])


def join(folder: str, name: str) -> str:
    if not is_url(folder):
        return os.path.join(folder, name)
    before, path, after = _parts(folder)
    return before + posixpath.join(path, name) + after


def parent(path: str) -> str:
    """Return the folder of `path`; ``.`` for a bare name."""
    if not is_url(path):
        return os.path.dirname(path) or "."
    before, inside, after = _parts(path)
    return before + posixpath.dirname(inside.rstrip("/")) + after


def name(path: str) -> str:
    """Return the last part of `path`; empty if it ends in a slash."""
    return posixpath.basename(_parts(path)[1]) if is_url(path) else os.path.basename(path)


def is_inside(name: str) -> bool:
    """Return True if the name, as a path, stays inside its folder and is spelled in the usual
    way.
    """
    pure = PurePosixPath(name)
    strange = (
        "\0" in name
        or "\\" in name
        or pure.is_absolute()
        or ".." in pure.parts
        or str(pure) != name
    )
    return bool(name) and name != "." and not strange and bool(_encoded(name))


def is_nameable(name: str) -> bool:
    """Return True if a file of this machine, inside its folder, can have the name."""
    return is_inside(name) and all(len(part) <= _LONGEST for part in _encoded(name).split(b"/"))


def _encoded(name: str) -> bytes:
    """Return the name as the system spells it; empty if it cannot: half of a pair of surrogates."""
    try:
        return os.fsencode(name)
    except UnicodeEncodeError:
        return b""


def safe_path(folder: str | Path, name: str) -> str | None:
    """Return the path of the file with an untrusted name in `folder`, or None if that is outside of
    the folder.

    Symbolic links may lead outside only into the ``blobs`` of a Hugging Face cache, whose
    ``snapshots`` hold nothing but such links. Names under a URL must not hold anything that has a
    meaning in a URL.
    """
    if not is_inside(name):
        return None
    if is_url(str(folder)):
        return None if _IN_URLS.search(name) else join(str(folder), name)
    home = Path(os.path.realpath(folder))
    real = Path(os.path.realpath(home / name))
    roots = [home]
    for parent in (home, *home.parents):
        if parent.name == "snapshots":
            roots.append(parent.parent / "blobs")
    if not any(map(real.is_relative_to, roots)):
        return None
    return os.path.join(folder, name)
