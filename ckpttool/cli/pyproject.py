"""``[tool.ckpttool]`` of the project that a command runs in.

The table may name code to run, so the file must be the user's own: it is in the working folder, or above it within the
same repository, and belongs to the user, as git requires of a repository (CVE-2022-24765).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from ckpttool.core.errors import CkptError
from ckpttool.core.text import visible

PYPROJECT = "CKPTTOOL_PYPROJECT"  # names the file to read, in any folder; empty for none
_TABLE = b"tool.ckpttool"
_TOML = "tomllib" if sys.version_info >= (3, 11) else "tomli"  # imported only if there is such a table
_HINT = "fix it, or pass --no-defaults"


def table() -> tuple[str, dict[str, Any]]:
    """Return the path and the table of the file; both empty if there is none. Raise `CkptError` if it is not TOML."""
    if PYPROJECT in os.environ:
        path = os.environ[PYPROJECT]
        return path, _table(path, _content(path)) if path else {}
    for path in _candidates():
        content = _content(path)
        if _TABLE in content:
            if _is_own(path):
                return path, _table(path, content)
            why = f"another user's: {PYPROJECT}={path} takes it all the same"
            sys.stderr.write(f"warning: no defaults are taken from {visible(path)}, which is {visible(why)}\n")
            break
    return "", {}


def _candidates() -> Iterator[str]:
    """Yield the files that may have the table, nearest first: in this folder, and above it within the repository."""
    folder, passed = os.path.abspath(os.curdir), list[str]()
    while not passed or folder != passed[-1]:
        passed.append(folder)
        if os.path.exists(os.path.join(folder, ".git")):
            break
        folder = os.path.dirname(folder)
    else:
        del passed[1:]  # no repository: folders above are not part of the project
    paths = (os.path.relpath(os.path.join(folder, "pyproject.toml")) for folder in passed)
    return (path for path in paths if os.path.isfile(path))


def _content(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _is_own(path: str) -> bool:
    """Return True if the file and its folder belong to the user: it may name code that the user then runs."""
    if not hasattr(os, "geteuid"):
        return True
    return all(os.stat(each).st_uid == os.geteuid() for each in (path, os.path.dirname(path) or "."))


def _table(path: str, content: bytes) -> dict[str, Any]:
    toml = import_module(_TOML)
    try:
        table = toml.loads(content.decode("utf-8")).get("tool", {}).get("ckpttool", {})
    except (ValueError, AttributeError, RecursionError) as error:
        raise CkptError(f"{path} is not TOML: {error}", hint=_HINT) from None
    if not isinstance(table, dict):
        raise CkptError(f"{path}: tool.ckpttool is not a table", hint=f"as in [tool.ckpttool]; {_HINT}")
    return table
