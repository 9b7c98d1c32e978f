"""Folders behind URLs are replaced under a journal, since no store replaces several objects in one call.

As `ckpttool.io.journal` on this machine's disks: the new files lie in a temporary folder, with a journal of what is to
be done. Whoever looks at the folder after its writer died does the rest.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any

from ckpttool.errors import CkptError
from ckpttool.io import temporary
from ckpttool.io.journal import Journal, being_replaced, parse
from ckpttool.io.paths import join
from ckpttool.io.paths import name as name_of
from ckpttool.io.remote.errors import answered
from ckpttool.io.remote.read import filesystem, forget, stat
from ckpttool.io.temporary import JOURNAL


def replace(home: str, out: str, put: Sequence[str], remove: Collection[str]) -> None:
    """Moves the files `put` from the folder `home` into `out`, the last one last, and removes others.

    Raises `CkptError` where the store refuses: then it is half done, and the next command finishes it.
    """
    journal = Journal(tuple(put), tuple(sorted(remove)))
    fs, path = filesystem(join(home, JOURNAL))
    with answered(out):
        fs.pipe_file(path, journal.text())
    try:
        _finish(home, out, journal)
    except CkptError as error:
        raise CkptError(
            f"{out} is half replaced: {error.message}",
            hint="nothing is lost: the next command on it finishes it, once the store answers",
        ) from error


def _finish(home: str, out: str, journal: Journal) -> None:
    """Does what is not done yet: what makes the old folder complete goes first, the new one comes last."""
    fs, _ = filesystem(out)
    forget(out)
    with answered(out):
        waiting = [name for name in journal.put if stat(join(home, name)) is not None]
        for name in [*waiting[-1:], *journal.remove]:
            if stat(join(out, name)) is not None:
                fs.rm_file(_path(join(out, name)))
        for name in waiting:
            fs.mv(_path(join(home, name)), _path(join(out, name)))
        fs.rm_file(_path(join(home, JOURNAL)))
    forget(out)


def settle(out: str) -> None:
    """Finishes what dead processes began in the folder, and removes what they left.

    Raises `CkptError` where another process is just replacing it, or where the store refuses.
    """
    found = stat(out)
    if found is None or not found.folder:
        return
    for name in _temporary_names(out):
        home = join(out, name)
        fs, path = filesystem(home)
        dead = temporary.is_dead(name, time.time())
        if stat(join(home, JOURNAL)) is not None:
            if not dead and (temporary.is_alive(name) or _age(fs, join(home, JOURNAL)) < temporary.PATIENCE):
                raise being_replaced(out)
            with answered(out):
                text = fs.cat_file(_path(join(home, JOURNAL)))
            _finish(home, out, parse(text, join(home, JOURNAL), home))
            dead = True
        if dead:
            with suppress(Exception):  # drivers raise what they like; it is still there the next time
                fs.rm(path, recursive=True)
            forget(home)


def _temporary_names(out: str) -> list[str]:
    """Names of temporary files and folders in `out`. What is known of its other files stays as it is."""
    fs, path = filesystem(out)
    with answered(out):
        fs.invalidate_cache(path)
        names = [name_of(str(found).rstrip("/")) for found in fs.ls(path, detail=False)]
    return [name for name in names if temporary.owner_of(name) is not None]


def _path(url: str) -> str:
    return filesystem(url)[1]


def _age(fs: Any, url: str) -> float:
    """Seconds since the file was written; 0 where the store does not say."""
    try:
        return time.time() - float(fs.modified(_path(url)).timestamp())
    except Exception:  # as above
        return 0.0
