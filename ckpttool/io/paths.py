"""Paths and URLs as text: which of the two it is, and its parts."""

from __future__ import annotations

import os
import posixpath
import re

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
