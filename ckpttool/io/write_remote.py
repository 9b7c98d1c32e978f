"""Write files behind URLs: objects appear complete or not at all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from inspect import signature
from typing import Any

from ckpttool.core.checkpoint import Span
from ckpttool.core.errors import CkptError
from ckpttool.io import progress
from ckpttool.io.files import size, sources_unchanged
from ckpttool.io.paths import is_url, join, name
from ckpttool.io.pieces import Link, Piece, Pieces, amounts, nbytes_of, stream
from ckpttool.io.remote import filesystem, forget, remove, stat
from ckpttool.io.remote_errors import answered
from ckpttool.io.sources import note_streamed
from ckpttool.io.syscalls import uninterrupted
from ckpttool.io.temporary import temporary_name

PART = 1 << 24  # bytes of one part of a multipart upload; about three of them are in memory
_MOST_PARTS = 9_000  # a store takes 10,000
_MIB = 1 << 20
# Schemes of object stores, whose drivers show a file when it is closed, or never.
_AT_CLOSE = frozenset("s3 s3a gs gcs abfs abfss az hf oss oci".split())  # noqa: SIM905 - read like a table
_LOCAL = ("file", "local")


def check_url(out: str, *, in_place: bool) -> None:
    """Raise `CkptError` if nothing can be written to the URL."""
    scheme, _, path = out.partition("://")
    if in_place:
        raise CkptError(
            f"{out} cannot be changed in place: objects are only written completely, and the bytes"
            " would cross the"
            " network twice",
            hint="write a new object with -o OUT, then remove the old one",
        )
    if "::" in out:
        raise CkptError(
            f"{out}: a chain of URLs is read, not written", hint="name the URL of the store alone"
        )
    if scheme in _LOCAL:
        raise CkptError(f"{out} is written as a path of this machine", hint=f"-o {path}")
    filesystem(out)  # raises where the driver is missing


def write(pieces: Pieces, out: str, *, replace: bool = True) -> None:
    """Write `pieces` to the URL, which appears complete or not at all.

    Without `replace`, an object that appears meanwhile stays. Raises `CkptError` on a source that
    changed while it was read, and if the store refuses; `out` is then as it was.
    """
    with _appearing(out, nbytes_of(pieces), replace) as file, sources_unchanged():
        for data in stream(pieces):
            with answered(out), uninterrupted(insisting=True):
                file.write(data)
            progress.count_written(len(data))
    forget(out)
    progress.count_made(*amounts(pieces))


@contextmanager
def _appearing(url: str, nbytes: int, replace: bool) -> Iterator[Any]:
    """Yield a file of about `nbytes` that is at the URL once the block ends, and never if the block
    raises.

    Without `replace`, S3 itself refuses to replace an object, if the driver can ask for it; for
    other stores, check at the end that none was created meanwhile.
    """
    fs, path = filesystem(url)
    at_close = not _AT_CLOSE.isdisjoint(
        [fs.protocol] if isinstance(fs.protocol, str) else fs.protocol
    )
    place = path if at_close else join(fs._parent(path), temporary_name(name(path)))
    with answered(url):
        if not at_close:
            fs.makedirs(fs._parent(path), exist_ok=True)
        mode = "xb" if not replace and _is_exclusive(fs) else "wb"
        file = fs.open(place, mode, block_size=max(PART, -(-nbytes // _MOST_PARTS // _MIB) * _MIB))
    try:
        yield file
        if not replace:
            _check_absent(url)
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


def _is_exclusive(fs: Any) -> bool:
    """Return True if the store can refuse to replace an object.

    That is S3, if both the driver (s3fs 2024.12) and botocore (1.35) are new enough.
    """
    if not hasattr(fs, "call_s3") or "mode" not in signature(fs._pipe_file).parameters:
        return False
    request = fs.s3.meta.service_model.operation_model("CompleteMultipartUpload").input_shape
    return "IfNoneMatch" in request.members


def _check_absent(url: str) -> None:
    forget(url)
    if stat(url) is not None:
        raise CkptError(
            f"{url} exists: another process has written it meanwhile",
            hint="look at it, then name another place",
        )


# Folders


def write_folder(files: Mapping[str, Pieces | Link], out: str) -> None:
    """Write `files` into the folder `out`, a URL, the last one last. No file is replaced.

    Raises `CkptError` on a source that changed while it was read, if the store refuses, and if a
    file is there already. Then it removes what it wrote.
    """
    for filename in files:
        _check_absent(join(out, filename))
    written: list[str] = []
    try:
        for filename, content in files.items():
            url = join(out, filename)
            if isinstance(content, Link):
                _copy(content.path, url)
            else:
                write(content, url, replace=False)
            written.append(url)
    except BaseException:
        with uninterrupted(insisting=True):
            for url in written:
                remove(url)
        raise
    forget(out)


def _copy(path: str, url: str) -> None:
    """Copy the file to the URL; the store does it if the file is in the same one.

    Raises `CkptError`, and leaves nothing at the URL, if the file changes meanwhile.
    """
    nbytes = size(path)
    fs, place = filesystem(url)
    if not is_url(path) or filesystem(path)[0] is not fs:
        write([Piece(Span(path, 0, nbytes))], url, replace=False)
        return
    _check_absent(url)
    try:
        with sources_unchanged():
            note_streamed(path)
            with answered(url):
                fs.cp_file(filesystem(path)[1], place)
    except BaseException:
        with uninterrupted(insisting=True):
            remove(url)
        raise
    progress.count_written(nbytes)
    progress.count_made(nbytes, 0)
