"""Folders behind URLs are replaced under a journal, since no store replaces several objects in one call.

As `ckpttool.io.journal` on this machine's disks: the new files lie in a temporary folder, with a journal of what is to
be done. After its writer died, the next command that writes the folder, or `ckpttool undo`, does the rest.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from contextlib import suppress

from ckpttool.core.errors import CkptError
from ckpttool.core.text import shell
from ckpttool.io import temporary
from ckpttool.io.journal import Journal, being_replaced, interrupted, parse, perhaps_begun
from ckpttool.io.paths import join
from ckpttool.io.paths import name as name_of
from ckpttool.io.remote.errors import answered
from ckpttool.io.remote.read import filesystem, forget, names_in, stat
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
            hint=f"nothing is lost; once the store answers, finish it: {shell('ckpttool', 'undo', out)}",
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


def check(out: str) -> None:
    """Raises `CkptError` if a replacement of files of the folder has not ended, with the way out."""
    for name in _temporary_names(out):
        if stat(join(join(out, name), JOURNAL)) is not None:
            _check_over(out, name)
            raise interrupted(out)


def recover(out: str) -> None:
    """Finishes what dead processes began in the folder, and removes what they left.

    Raises `CkptError` if something was begun whose process may still live, or if the store refuses.
    """
    for name in _temporary_names(out):
        home = join(out, name)
        dead = temporary.is_dead(name, time.time())
        if stat(join(home, JOURNAL)) is not None:
            _check_over(out, name)
            _finish(home, out, _journal(home))
            dead = True
        if dead:
            _remove(home)


def roll_back(out: str, *, force: bool) -> dict[str, bool]:
    """Takes back what dead processes began in the folder; each name of the temporary folder, and whether that went.

    A store keeps no old files: a replacement that has already removed some is finished instead. `force`: processes of
    other machines and containers are dead too. Raises as `settle`.
    """
    found = {}
    forget(out)
    for name in _temporary_names(out):
        home = join(out, name)
        if stat(join(home, JOURNAL)) is None:
            continue
        _check_over(out, name, force=force)
        journal = _journal(home)
        there = set(names_in(out))
        whole = all(stat(join(home, own)) is not None for own in journal.put)
        found[name] = whole and there.issuperset((*journal.put[-1:], *journal.remove))
        if not found[name]:
            _finish(home, out, journal)
        _remove(home)
    return found


def _check_over(out: str, name: str, *, force: bool = False) -> None:
    if temporary.is_alive(name):
        raise being_replaced(out)
    if not force and not temporary.is_dead(name, time.time()):
        raise perhaps_begun(out, None)


def _journal(home: str) -> Journal:
    fs, path = filesystem(join(home, JOURNAL))
    with answered(home):
        return parse(fs.cat_file(path), join(home, JOURNAL), home)


def _remove(home: str) -> None:
    fs, path = filesystem(home)
    with suppress(Exception):  # drivers raise what they like; it is still there the next time
        fs.rm(path, recursive=True)
    forget(home)


def _temporary_names(out: str) -> list[str]:
    """Names of temporary files and folders in the folder `out`. What is known of its other files stays as it is."""
    found = stat(out)
    if found is None or not found.folder:
        return []
    fs, path = filesystem(out)
    with answered(out):
        fs.invalidate_cache(path)
        names = [name_of(str(own).rstrip("/")) for own in fs.ls(path, detail=False)]
    return [name for name in names if temporary.owner_of(name) is not None]


def _path(url: str) -> str:
    return filesystem(url)[1]
