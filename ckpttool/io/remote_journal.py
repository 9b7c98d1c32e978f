"""Folders behind URLs are replaced under a journal, since no store replaces several objects in one call.

The new files are in a temporary folder, with a journal that lists the remaining work. If its writer dies, the next
command that writes the folder, or `ckpttool undo`, does the rest: a store keeps no old files.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Sequence

from ckpttool.core.errors import CkptError
from ckpttool.core.text import shell
from ckpttool.core.values import dataclass
from ckpttool.io import temporary
from ckpttool.io.paths import is_nameable, join
from ckpttool.io.paths import name as name_of
from ckpttool.io.remote import answered, filesystem, forget, names_in, remove, stat
from ckpttool.io.transaction import check_over, interrupted

JOURNAL = "journal"


@dataclass(frozen=True, slots=True)
class Journal:
    """`put` are the files to move in, the file that makes the set complete last; `remove` the files to remove."""

    put: tuple[str, ...]
    remove: tuple[str, ...]

    def text(self) -> bytes:
        return json.dumps({"schema": "ckpttool.journal/1", "put": self.put, "remove": self.remove}).encode()


def parse(data: bytes, name: str, home: object) -> Journal:
    """Return the journal that was read at `name`. Raises `CkptError` if it is damaged or hostile."""
    try:
        value = json.loads(data)
        found = Journal(tuple(value["put"]), tuple(value["remove"]))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CkptError(f"{name} cannot be read: {error}", hint=f"look at it, and remove {home}") from error
    if not all(isinstance(own, str) and is_nameable(own) for own in found.put + found.remove):
        raise CkptError(f"{name} leads out of its folder", hint=f"ckpttool did not write it: remove {home}")
    return found


def replace(home: str, out: str, put: Sequence[str], remove: Collection[str]) -> None:
    """Move the files `put` from the folder `home` into `out`, the last one last, and remove others.

    Raises `CkptError` if the store refuses: then it is half done, and the next command finishes it.
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
    """Do what is not done yet: the file that completes the old set goes first, the new one comes last."""
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
    """Raise `CkptError`, with the way out, if a replacement of files of the folder has not ended."""
    for name in _temporary_names(out):
        if stat(join(join(out, name), JOURNAL)) is not None:
            check_over(name, out, None)
            raise interrupted(out)


def recover(out: str) -> None:
    """Finish what dead processes began in the folder, and remove what they left.

    Raises `CkptError` if a process that began something may be alive, or if the store refuses.
    """
    for name in _temporary_names(out):
        home = join(out, name)
        dead = temporary.is_dead(name, time.time())
        if stat(join(home, JOURNAL)) is not None:
            check_over(name, out, None)
            _finish(home, out, _journal(home))
            dead = True
        if dead:
            remove(home, is_folder=True)


def roll_back(out: str, *, force: bool) -> dict[str, bool]:
    """Roll back what dead processes began in the folder; return, by temporary folder, whether that was possible.

    A replacement that has already removed files is finished instead. `force`: processes of other machines and
    containers are dead too. Raises as `recover`.
    """
    found = {}
    forget(out)
    for name in _temporary_names(out):
        home = join(out, name)
        if stat(join(home, JOURNAL)) is None:
            continue
        check_over(name, out, None, force=force)
        journal = _journal(home)
        there = set(names_in(out))
        complete = all(stat(join(home, own)) is not None for own in journal.put)
        found[name] = complete and there.issuperset((*journal.put[-1:], *journal.remove))
        if not found[name]:
            _finish(home, out, journal)
        remove(home, is_folder=True)
    return found


def _journal(home: str) -> Journal:
    fs, path = filesystem(join(home, JOURNAL))
    with answered(home):
        return parse(fs.cat_file(path), join(home, JOURNAL), home)


def _temporary_names(out: str) -> list[str]:
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
