"""Write files behind URLs: objects appear complete or not at all."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from ckpttool.core.checkpoint import Span
from ckpttool.core.errors import CkptError
from ckpttool.io import compose, progress
from ckpttool.io.compose import Upload, came_meanwhile, check_absent, is_exclusive
from ckpttool.io.files import size, sources_stay
from ckpttool.io.paths import is_url, join, name, parent
from ckpttool.io.pieces import Held, Link, Piece, Pieces, amounts, nbytes_of, stream
from ckpttool.io.remote import answered, filesystem, forget, names_in, remove, stat
from ckpttool.io.remote_journal import recover
from ckpttool.io.remote_journal import replace as journaled
from ckpttool.io.syscalls import uninterrupted
from ckpttool.io.temporary import temporary_name

PART = 1 << 24  # bytes of one part of a multipart upload; about three of them are in memory

_MIB = 1 << 20
# Schemes of object stores, whose drivers show a file when it is closed, or never.
_AT_CLOSE = frozenset("s3 s3a gs gcs abfs abfss az hf oss oci".split())  # noqa: SIM905 - read like a table
_LOCAL = ("file", "local")


def check_url(out: str, *, in_place: bool) -> None:
    """Raise `CkptError` if nothing can be written to the URL."""
    scheme, _, path = out.partition("://")
    if in_place:
        raise CkptError(
            f"{out} cannot be changed in place: objects are only written completely, and the bytes would cross the"
            " network twice",
            hint="write a new object with -o OUT, then remove the old one",
        )
    if "::" in out:
        raise CkptError(f"{out}: a chain of URLs is read, not written", hint="name the URL of the store alone")
    if scheme in _LOCAL:
        raise CkptError(f"{out} is written as a path of this machine", hint=f"-o {path}")
    filesystem(out)  # raises where the driver is missing


def write(pieces: Pieces, out: str, *, replace: bool = True, held: Held | None = None) -> None:
    """Write `pieces` to the URL, which appears complete or not at all.

    Without `replace`, an object that appears meanwhile stays. `held` gets what the store's checksums prove. Raises
    `CkptError` on a source that changed while it was read, and if the store refuses; `out` is then as it was.
    """
    plan = compose.plan(pieces, out)
    if plan is not None:
        with compose.begun(out, replace=replace, verify=held is not None) as upload, sources_stay():
            upload.fill(plan)
    else:
        with _appearing(out, nbytes_of(pieces), replace) as file:
            with sources_stay():
                for data in stream(pieces):
                    with answered(out), uninterrupted(insisting=True):
                        file.write(data)
                    progress.has_written(len(data))
            if not replace:
                check_absent(out)
    forget(out)
    if plan is not None and held is not None:
        with sources_stay():
            if compose.is_copied(plan.runs, out) or upload.is_proved(nbytes_of(pieces)):
                held.note(out, pieces)
    progress.has_made(*amounts(pieces))


@contextmanager
def _appearing(url: str, nbytes: int, replace: bool) -> Iterator[Any]:
    """Yield a file of about `nbytes` that is at the URL once the block ends, and never if the block raises.

    Without `replace`, S3 itself refuses to replace an object, if it is new enough.
    """
    fs, path = filesystem(url)
    at_close = not _AT_CLOSE.isdisjoint([fs.protocol] if isinstance(fs.protocol, str) else fs.protocol)
    place = path if at_close else join(fs._parent(path), temporary_name(name(path)))
    with answered(url):
        if not at_close:
            recover(parent(url))
            fs.makedirs(fs._parent(path), exist_ok=True)
        mode = "xb" if not replace and is_exclusive(fs) else "wb"
        file = fs.open(place, mode, block_size=max(PART, -(-nbytes // compose.MOST_PARTS // _MIB) * _MIB))
    try:
        yield file
        with answered(url), uninterrupted(insisting=True):
            file.close()
            if place != path:
                fs.mv(place, path)
    except BaseException:
        with uninterrupted(insisting=True):  # closing the file would complete it
            with suppress(Exception):
                file.discard()
            with suppress(Exception):
                file.closed = True  # or the driver closes it when it is collected
            if not at_close:
                with suppress(Exception):
                    fs.rm_file(place)
        raise


# Folders


def home_of(files: Iterable[str], out: str, stale: Collection[str], *, replace: bool) -> str:
    """Return the folder in which the files of the folder `out`, a URL, are made: `out`, unless some are replaced there.

    Raises `CkptError` if another process is just replacing them, and without `replace` if there are some.
    """
    recover(out)
    places = [join(out, own) for own in (*files, *stale)]
    for url in places:
        forget(url)  # what was said of it is as old as the preflight
    if stat(out) is None:
        return out
    names_in(out)  # says it of all of them
    there = [url for url in places if stat(url) is not None]
    if there and not replace:
        raise came_meanwhile(there[0])
    return join(out, temporary_name("new")) if there else out


def write_folder(
    files: Mapping[str, Pieces | Link | Upload],
    out: str,
    stale: Collection[str],
    held: Held | None = None,
    *,
    replace: bool,
    home: str | None = None,
) -> None:
    """Write `files` into the folder `out`, a URL, the last one last; uploads are completed.

    To replace a checkpoint, the new files are first written into the folder `home` (default: `home_of`). Then the old
    files named `stale` and the file that makes the old set complete are removed, and the new ones moved in, under a
    journal. `held` gets what the store's checksums prove about files that were not moved. Without `replace` no file is
    replaced. Raises `CkptError`, and removes what it wrote, on a source that changed while it was read and if the store
    refuses.
    """
    home = home or home_of(files, out, stale, replace=replace)
    written: list[str] = []
    try:
        for own, content in files.items():
            if isinstance(content, Upload):
                content.complete(replace=replace)
            else:
                _put(content, join(home, own), held if home == out else None, replace=replace)
            written.append(join(home, own))
    except BaseException:
        with uninterrupted(insisting=True):
            for url in written:
                remove(url)
        raise
    if home != out:
        journaled(home, out, list(files), {*stale}.difference(files))
    forget(out)


def _put(content: Pieces | Link, url: str, held: Held | None = None, *, replace: bool) -> None:
    if not isinstance(content, Link):
        write(content, url, replace=replace, held=held)
        return
    nbytes = size(content.path)
    if is_url(content.path) and held is None:
        (fs, path), (target, place) = filesystem(content.path), filesystem(url)
        if fs is target:  # the store copies it
            with answered(url):
                fs.cp_file(path, place)
            progress.has_written(nbytes)
            progress.has_made(nbytes, 0)
            return
    write([Piece(Span(content.path, 0, nbytes))], url, replace=replace, held=held)
