"""Local paths and URLs alike: what readers and writers ask of a file or a folder, before any format
is known.

A path goes straight to the operating system, a URL
(``s3://…``) to `remote`, which is imported for the first one.
"""

from __future__ import annotations

import glob as local_glob
import os
import re
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Union

from ckpttool.core.checkpoint import Span
from ckpttool.core.errors import CkptError
from ckpttool.io import handles, progress, sources, temporary, transaction
from ckpttool.io.paths import is_url
from ckpttool.io.pieces import comparing_checksums, same_data

_HINT = "check the path and its permissions"
_GLOB = re.compile(r"[*?[]")
_PIPE = 1 << 20  # bytes that are read from a pipe at a time


if TYPE_CHECKING:
    from ckpttool.io.remote import RemoteFile

Source = Union["LocalFile", "RemoteFile"]  # a file that is open for reading


class LocalFile:
    """A file of this machine that is open, with the methods of a `remote.RemoteFile`."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._at = 0

    @property
    def size(self) -> int:
        return os.fstat(self._descriptor).st_size

    def read(self, count: int = -1, /) -> bytes:
        """Return the next `count` bytes (default: all), fewer at the end of the file."""
        parts = []
        # not more than there is: Python allocates all requested bytes
        end = self.size if count < 0 else min(self._at + count, self.size)
        while self._at < end:
            data = self.read_at(self._at, end - self._at)
            if not data:
                break
            parts.append(data)
            self._at += len(data)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def seek(self, offset: int, /) -> int:
        self._at = offset
        return offset

    def read_at(self, offset: int, count: int) -> bytes:
        """Return at most `count` bytes from byte `offset` on: fewer at the end of the file only."""
        data = os.pread(self._descriptor, count, offset)
        progress.count_read(len(data))
        return data

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> None: ...  # the kernel reads ahead


class Pipe(LocalFile):
    """A pipe: it is read once, from the start on."""

    @property
    def size(self) -> int:
        return sys.maxsize  # nothing says how long it is

    def read_at(self, offset: int, count: int) -> bytes:
        """Return at most `count` bytes, which must be the next ones."""
        data = os.read(self._descriptor, min(count, _PIPE))
        progress.count_read(len(data))
        return data


@contextmanager
def opened(path: str, *, pipes: bool = False) -> Iterator[Source]:
    """Open the file for reading. Raises `CkptError` if it cannot be opened or read.

    A terminal or a device is refused without waiting for it. With `pipes`, a pipe is read; it can
    be read only once.
    """
    if "\0" in path:
        raise CkptError(f"cannot read {path!r}: a null byte in the path", hint=_HINT)
    if is_url(path):
        from ckpttool.io import remote

        yield remote.open_file(path)
        return
    try:
        handle = handles.acquire(path, pipes=pipes)
        try:
            sources.note_opened(path, handle.descriptor)
            is_pipe = stat.S_ISFIFO(os.fstat(handle.descriptor).st_mode)
            yield Pipe(handle.descriptor) if is_pipe else LocalFile(handle.descriptor)
        finally:
            handles.release(handle)
    except OSError as error:
        raise CkptError(f"cannot read {path}: {error.strerror or error}", hint=_HINT) from error


@contextmanager
def sources_unchanged() -> Iterator[None]:
    """Raise `CkptError` at the end if a file whose tensors were read inside is not, or no longer,
    what its index says.

    Records of archives are compared with their CRCs.
    """
    sources.begin_reading()
    with comparing_checksums():
        yield
    sources.check_unchanged(source for source in sources.streamed() if not is_url(source))
    urls = [source for source in sources.streamed() if is_url(source)]
    if urls:
        from ckpttool.io import remote

        remote.check_unchanged(urls)


def known_states(urls: Iterable[str]) -> dict[str, object]:
    """Return what the stores have said about the files at these URLs, as far as they have."""
    from ckpttool.io.remote import cache

    states = {url: cache.stats.get(url) for url in urls}
    return {url: state for url, state in states.items() if state is not None}


def check_reopened(opened: Mapping[str, Any]) -> None:
    """Use an index again for which these files and URLs were opened, each with its state then.

    Raises `CkptError` if one has changed: its bytes would be taken from the places that the old one
    had.
    """
    for path, state in opened.items():
        if not is_url(path):
            is_same = sources.is_still(path, state)
        else:
            from ckpttool.io import remote

            is_same = remote.is_still(path, state)
        if not is_same:
            raise CkptError(
                f"{path} is no longer the file that was opened", hint="open the checkpoint again"
            )


def is_file(path: str) -> bool:
    """Return True if there is such a file. Raises `CkptError` if the store of a URL does not
    answer.
    """
    return _is_there(path, folder=False) if is_url(path) else os.path.isfile(path)


def is_dir(path: str) -> bool:
    """Return True if there is such a folder; in an object store, anything under that name. Raises
    like `is_file`.
    """
    return _is_there(path, folder=True) if is_url(path) else os.path.isdir(path)


def _is_there(url: str, *, folder: bool) -> bool:
    from ckpttool.io import remote

    stat = remote.stat(url)
    return stat is not None and stat.folder is folder


def exists(path: str) -> bool:
    """Return True if there is such a file or folder. Raises like `is_file`."""
    return os.path.exists(path) if not is_url(path) else is_file(path) or is_dir(path)


def size(path: str) -> int:
    if not is_url(path):
        return os.path.getsize(path)
    from ckpttool.io import remote

    return remote.open_file(path).size


def have_same_bytes(path: str, other: str) -> bool:
    """Return whether two files have the same bytes. Raises `CkptError` if one cannot be read."""
    return same_data(Span(path, 0, size(path)), Span(other, 0, size(other)))


def look_ahead(heads: Mapping[str, int]) -> None:
    """Announce that about so many bytes at the start of each file will be read: side by side."""
    if any(map(is_url, heads)):
        from ckpttool.io import remote

        remote.look_ahead(heads)
    else:
        handles.look_ahead(heads)


def defer_check(path: str, check: Callable[[], None]) -> None:
    """Keep a check of the file's index for `run_deferred_checks`: of places of tensors that were
    not read there.
    """
    if is_url(path):
        from ckpttool.io import remote

        remote.defer_check(path, check)


def run_deferred_checks(path: str) -> None:
    """Run the checks of the file's index, before its tensors are read. They raise `CkptError`."""
    if is_url(path):
        from ckpttool.io import remote

        remote.run_deferred_checks(path)


def names_in(folder: str) -> list[str]:
    """Return the names in the folder, sorted. Raises `CkptError` if it cannot be read."""
    if is_url(folder):
        from ckpttool.io import remote

        return remote.names_in(folder)
    try:
        return sorted(os.listdir(folder))
    except OSError as error:
        raise CkptError(f"cannot read {folder}: {error.strerror}", hint=_HINT) from error


def files_below(folder: str) -> Iterator[str]:
    """Yield the files in the local folder and in its subfolders, also behind links, each folder
    once. Raises `CkptError` if one cannot be read.
    """
    seen: set[str] = set()
    waiting = [folder]
    while waiting:
        current = waiting.pop()
        real = os.path.realpath(current)
        if real in seen:
            continue
        seen.add(real)
        folders: list[str] = []
        for name in names_in(current):
            path = os.path.join(current, name)
            if os.path.isdir(path):
                folders.append(path)
            elif os.path.isfile(path):
                yield path
        waiting += reversed(folders)


def glob(pattern: str) -> list[str]:
    if not is_url(pattern):
        return sorted(path for path in local_glob.glob(pattern) if os.path.isfile(path))
    from ckpttool.io import remote

    return remote.glob(pattern)


def is_glob(path: str) -> bool:
    return _GLOB.search(path) is not None and not exists(path)


def files_of(source: str) -> list[str]:
    """Return the local files that a CKPT operand names: a file, the matches of a pattern, or the
    files of a folder.
    """
    if is_url(source) or "\0" in source:
        return []
    if os.path.isdir(source):
        return [os.path.join(source, name) for name in names_in(source)]
    return glob(source) if is_glob(source) else [source]


def places(path: str) -> dict[str, set[str] | None]:
    """Return the names of the local files at the path (a file, a folder, a glob) by folder; None:
    all of the folder.

    Symbolic links are followed, as journals are next to the file itself. An index means all of its
    folder.
    """
    by_folder: dict[str, set[str] | None] = {}
    if "\0" in path:
        return by_folder
    files = files_of(path)
    if os.path.isdir(path):
        by_folder[os.path.realpath(path)] = None
        files = [name for name in files if os.path.islink(name)]
    for name in files:
        for place in {name, os.path.realpath(name)}:
            folder, last = os.path.split(place)
            folder = os.path.realpath(folder or ".")
            names = by_folder.setdefault(folder, set())
            if last.endswith((".index.json", ".metadata")):
                by_folder[folder] = None
            elif names is not None:
                names.add(last)
    return by_folder


def forget_and_check(path: str) -> None:
    """Forget everything about the files at the path or URL. Changes no file.

    Raises `CkptError` if an edit of them was interrupted, or has not ended.
    """
    if is_url(path):
        forget_answers(path)
        return
    for folder, names in places(path).items():
        transaction.check(folder, names, path)
    sources.forget(path)


def forget_answers(url: str) -> None:
    """Forget what a store has said about the URL: OUT may have changed since it was looked at."""
    if is_url(url):
        from ckpttool.io.remote import forget

        forget(url)


def recover(path: str) -> None:
    """Roll back interrupted edits of the local files at the path before it is written. Raises
    `CkptError`.
    """
    if is_url(path):
        return
    for folder, names in places(path).items():
        if names is None:
            # a new folder is staged next to the old one
            temporary.remove_left(os.path.dirname(folder))
        transaction.recover(folder, names)
