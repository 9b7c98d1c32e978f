"""Read files behind URLs through fsspec, a range at a time."""

from __future__ import annotations

import logging
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import field
from datetime import datetime
from functools import partial
from typing import Any

import aiohttp
import fsspec
from fsspec.asyn import AsyncFileSystem

from ckpttool.core.errors import CkptError
from ckpttool.core.limits import limits
from ckpttool.core.values import dataclass
from ckpttool.io import paths, progress
from ckpttool.io.remote_errors import CameShort, SendsTooMuch, answered, is_failure, patiently
from ckpttool.io.sources import note_streamed

# bytes of a small request: most headers, or the directory of a zip archive of 2,000 tensors
BLOCK = 1 << 17
PART = 1 << 23  # bytes of a request for large tensors
BATCH = 1 << 25  # bytes of the requests that are made side by side, and of the ranges that are held
_LARGE = 8 * BLOCK  # bytes of a tensor that is fetched alone
_SMALL_GAP = 1 << 10  # bytes between ranges that are fetched with one request
_SLOWEST = 10_000  # bytes a second; slower answers are given up
_LISTING = 1 << 26  # bytes of an answer without a range: a page that lists files
_CHUNK = 1 << 16
_RANGE = re.compile(r"bytes=(\d+)-(\d+)")
_VERSIONS = (
    "ETag",
    "etag",
    "generation",
    "md5Hash",
    "mtime",
    "LastModified",
    "last_modified",
    "created",
    "sha256",
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Stat:
    """The answer of a store: `size` in bytes; `version`: a name and a value that change with the
    content.
    """

    folder: bool
    size: int | None
    version: tuple[str, str] = ("", "")

    def is_still(self, before: Stat) -> bool:
        """Return True if the content can be the same. Listings and single answers may tell
        different versions.
        """
        told = self.version == before.version or self.version[0] != before.version[0]
        return told and (self.folder, self.size) == (before.folder, before.size)


class Ranges:
    """Ranges of a file by their first bytes, none inside of another one; `nbytes` in all."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._starts: list[int] = []  # sorted
        self._data: dict[int, bytes] = {}

    def get(self, start: int, end: int) -> bytes:
        """Return the bytes from `start` on, up to `end` or to the end of the range that holds
        `start`.
        """
        number = bisect_right(self._starts, start) - 1
        if number < 0:
            return b""
        first = self._starts[number]
        return self._data[first][start - first : end - first]

    def next_start(self, offset: int) -> int | None:
        """Return where the next range after the offset starts."""
        number = bisect_right(self._starts, offset)
        return self._starts[number] if number < len(self._starts) else None

    def add(self, start: int, data: bytes) -> None:
        low = bisect_left(self._starts, start)
        high = bisect_left(self._starts, start + len(data))
        for inner in self._starts[low:high]:
            self.nbytes -= len(self._data.pop(inner))
        self._starts[low:high] = [start]
        self._data[start] = data
        self.nbytes += len(data)


@dataclass(slots=True)
class Cache:
    """What stores have said and sent, by URL.

    `stats`, and the `names` in folders; `assumed`: checks of the index that were not made yet;
    `ranges` of files that are held, of `nbytes` in all; counts of `requests` and `fetched` bytes.
    """

    stats: dict[str, Stat | None] = field(default_factory=dict)
    names: dict[str, list[str]] = field(default_factory=dict)
    assumed: dict[str, list[Callable[[], None]]] = field(default_factory=dict)
    ranges: dict[str, Ranges] = field(default_factory=dict)
    nbytes: int = 0
    requests: Counter[str] = field(default_factory=Counter)
    fetched: Counter[str] = field(default_factory=Counter)

    def forget(self, url: str) -> None:
        """Forget everything at, under and above the URL."""
        below = url.rstrip("/") + "/"
        tables: tuple[dict[str, Any], ...] = (self.stats, self.names, self.assumed, self.ranges)
        for table in tables:
            for other in list(table):
                if (other + "/").startswith(below) or below.startswith(other.rstrip("/") + "/"):
                    del table[other]
        self.nbytes = sum(ranges.nbytes for ranges in self.ranges.values())

    def get(self, url: str, start: int, end: int) -> bytes:
        """Return the bytes of the file from `start` on, up to `end` or as far as they are held."""
        ranges = self.ranges.get(url)
        return ranges.get(start, end) if ranges is not None else b""

    def hold(self, url: str, start: int, data: bytes) -> None:
        """Hold a range of the file for the next reads. If there is no room, the oldest files'
        ranges are dropped.
        """
        if len(data) > BATCH:
            return
        while self.nbytes + len(data) > BATCH:
            self.nbytes -= self.ranges.pop(next(iter(self.ranges))).nbytes
        ranges = self.ranges.setdefault(url, Ranges())
        self.nbytes -= ranges.nbytes
        ranges.add(start, data)
        self.nbytes += ranges.nbytes


cache = Cache()


class BoundedResponse(aiohttp.ClientResponse):
    """An HTTP answer that is read in chunks, and refused when it is longer than the requested
    range.
    """

    async def read(self) -> bytes:
        """Return the body. Raises `SendsTooMuch` if it is longer than the requested range."""
        if self._body is None:
            bytes_range = _RANGE.fullmatch(self.request_info.headers.get("Range", ""))
            most = (
                _LISTING if bytes_range is None else int(bytes_range[2]) - int(bytes_range[1]) + 1
            )
            body = bytearray()
            async for chunk in self.content.iter_chunked(_CHUNK):
                body += chunk
                if len(body) > most:
                    self.close()
                    raise SendsTooMuch(f"its server sends more than the {most:,} requested bytes")
            self._body = bytes(body)
        return await super().read()


def filesystem(url: str) -> tuple[Any, str]:
    """Return the fsspec file system of the URL and the path in it.

    Raises `CkptError` that names the package to install if the driver is missing.
    """
    options: dict[str, Any] = {}
    # a chain such as simplecache::https:// fetches the whole file, whatever its size
    if url.partition("://")[0] in ("http", "https"):
        configured = {**fsspec.config.conf.get("http", {}), **fsspec.config.conf.get("https", {})}
        client = {
            "timeout": aiohttp.ClientTimeout(total=None),
            **configured.get("client_kwargs", {}),
        }
        options = {"client_kwargs": {**client, "response_class": BoundedResponse}}
    with answered(url):
        fs, path = fsspec.core.url_to_fs(url, **options)
    return fs, path


def _patience(fs: Any, nbytes: int = 0) -> dict[str, float]:
    """Return the argument that ends the wait for an answer of so many bytes; only asynchronous
    drivers have one.
    """
    return (
        {"timeout": limits().remote_seconds + nbytes / _SLOWEST}
        if isinstance(fs, AsyncFileSystem)
        else {}
    )


def stat(url: str) -> Stat | None:
    """Return what the URL is, or None if there is nothing. Raises `CkptError` if the store does not
    answer.
    """
    if url in cache.stats:
        return cache.stats[url]
    fs, path = filesystem(url)

    def ask() -> Stat | None:
        try:
            return _stat(fs.info(path, **_patience(fs)))
        except (FileNotFoundError, NotADirectoryError) as error:
            if is_failure(error.__cause__):
                raise error.__cause__ from None
            return None

    cache.stats[url] = patiently(url, ask)
    return cache.stats[url]


def there(url: str) -> Stat:
    """Return `stat` of a file. Raises `CkptError` if there is none."""
    file = stat(url)
    if file is None:
        raise CkptError(f"no such file: {url}", hint="check the URL: scheme, bucket and key")
    return file


def _stat(info: Mapping[str, Any]) -> Stat:
    version = ("", "")
    for name in _VERSIONS:
        value = info.get(name)
        if value:
            version = name, str(value.timestamp() if isinstance(value, datetime) else value)
            break
    return Stat(info.get("type") == "directory", info.get("size"), version)


def names_in(url: str) -> list[str]:
    """Return the names in the folder, sorted; keep what the listing says about each."""
    url = url.rstrip("/")
    if url in cache.names:
        return [*cache.names[url]]
    fs, path = filesystem(url)
    with answered(url):
        listing = fs.ls(path, detail=True, **_patience(fs))
    names = []
    for info in listing:
        full_name = str(info["name"]).rstrip("/")
        if full_name.strip("/") == path.strip("/"):  # a folder's own object
            continue
        name = full_name.rpartition("/")[2]
        names.append(name)
        place = paths.join(url, name)
        if cache.stats.get(place) is None:  # an index may rest on what was said before
            cache.stats[place] = _stat(info)
    cache.names[url] = sorted(names)
    return [*cache.names[url]]


def glob(pattern: str) -> list[str]:
    fs, path = filesystem(pattern)
    with answered(pattern):
        return sorted(map(fs.unstrip_protocol, filter(fs.isfile, fs.glob(path))))


def forget(url: str) -> None:
    """Forget everything at, under and above the URL; the next call asks the store."""
    cache.forget(url)
    _invalidate(url)


def _invalidate(url: str) -> None:
    fs, path = filesystem(url)
    with answered(url):
        fs.invalidate_cache(path)


def remove(url: str) -> None:
    """Remove the file at the URL, if its store does."""
    with suppress(Exception):  # drivers raise what they like
        fs, path = filesystem(url)
        fs.rm_file(path)
    cache.forget(url)


def check_unchanged(urls: Iterable[str]) -> None:
    """Raise `CkptError` if a file is no longer the one whose index was read."""
    for url in urls:
        before = cache.stats.pop(url, None)
        _invalidate(url)
        if before is None or not is_still(url, before):
            forget(url)
            raise CkptError(
                f"{url} was changed while it was read", hint="nothing was written: run it again"
            )


def is_still(url: str, before: Stat) -> bool:
    """Return True if the file can be the same as `before`. Raises `CkptError` as `stat`."""
    now = stat(url)
    return now is not None and now.is_still(before)


def defer_check(url: str, check: Callable[[], None]) -> None:
    cache.assumed.setdefault(url, []).append(check)


def run_deferred_checks(url: str) -> None:
    """Run the checks of the file's index, before its tensors are read. They raise `CkptError`."""
    for check in cache.assumed.pop(url, ()):
        check()


def log_fetched() -> None:
    for url, count in cache.fetched.items():
        log.info("%s: %s bytes fetched in %d requests", url, f"{count:,}", cache.requests[url])


# Reading


class RemoteFile:
    """A file behind a URL. The ranges of it that were fetched last are held."""

    def __init__(self, url: str, size: int) -> None:
        self.url = url
        self.size = size
        self._at = 0

    def read(self, count: int = -1, /) -> bytes:
        """Return the next `count` bytes (default: all), fewer at the end of the file."""
        data = self.read_at(self._at, self.size if count < 0 else count)
        self._at += len(data)
        return data

    def seek(self, offset: int, /) -> int:
        self._at = offset
        return offset

    def read_at(self, offset: int, count: int) -> bytes:
        """Return at most `count` bytes from byte `offset` on: fewer at the end of the file only."""
        end = min(offset + count, self.size)
        parts = []
        while offset < end:
            part = cache.get(self.url, offset, end) or self._fetch(offset, end)
            parts.append(part)
            offset += len(part)
        return b"".join(parts)

    def _fetch(self, offset: int, end: int) -> bytes:
        """Fetch the bytes from `offset` to `end`, or to the next range that is held. A short range
        is made longer.
        """
        stop = min(max(end, offset + BLOCK), self.size)
        held = cache.ranges.get(self.url)
        following = held.next_start(offset) if held is not None else None
        if following is not None:
            stop = min(stop, following)
        data = b"".join(fetch(_parts(self.url, offset, stop)))
        cache.hold(self.url, offset, data)
        return data[: end - offset]

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Fetch these ranges (offset, count) side by side, and hold them while there is room.
        Ranges with a small gap between them are one request.
        """
        joined: list[tuple[int, int]] = []
        for offset, count in sorted(ranges):
            start, end = max(0, offset), min(offset + count, self.size)
            if end <= start or len(cache.get(self.url, start, end)) == end - start:
                continue
            if joined and start - joined[-1][1] <= _SMALL_GAP:
                start, last = joined.pop()
                end = max(end, last)
            joined.append((start, end))
        answers = fetch([(self.url, start, end) for start, end in joined])
        for (start, _), data in zip(joined, answers):
            cache.hold(self.url, start, data)


def open_file(url: str) -> RemoteFile:
    """Return the file at the URL. Raises `CkptError` if there is none, or if its store cannot give
    a part of it.
    """
    file = there(url)
    if file.folder:
        raise CkptError(f"{url} is a folder, not a file", hint="name one of its files")
    if file.size is None:
        raise CkptError(
            f"{url}: its server does not say how long it is",
            hint="download it, and name the local file",
        )
    return RemoteFile(url, file.size)


class Stream:
    """Read tensors front to back: large ones in large ranges, several at a time, of which it holds
    the last few.
    """

    def __init__(self, url: str) -> None:
        run_deferred_checks(url)
        self._file = open_file(url)
        note_streamed(url)
        self._start = 0
        self._parts: list[bytes] = []

    def read_at(self, offset: int, count: int, until: int) -> bytes | memoryview:
        """Return at most `count` bytes from byte `offset` on; the bytes up to `until` follow."""
        data = self._held(offset)
        if not data:
            until = min(until, self._file.size)
            if until - offset <= _LARGE:
                return self._file.read_at(offset, min(count, until - offset))
            self._parts = []  # before the next ones come, so that never both are in memory
            self._parts = fetch(_parts(self._file.url, offset, min(until, offset + BATCH)))
            self._start = offset
            data = self._held(offset)
        return data[:count]

    def _held(self, offset: int) -> memoryview:
        at = offset - self._start
        for part in self._parts:
            if 0 <= at < len(part):
                return memoryview(part)[at:]
            at -= len(part)
        return memoryview(b"")


Range = tuple[str, int, int]  # a URL, the first byte, and the byte after the last one


def _parts(url: str, start: int, end: int) -> list[Range]:
    return [(url, at, min(at + PART, end)) for at in range(start, end, PART)]


def fetch(ranges: Sequence[Range]) -> list[bytes]:
    """Return the bytes of each range of files of one store.

    The ranges of a batch are fetched side by side. A batch is fetched again after errors that may
    pass. Raises `CkptError`.
    """
    answers: list[bytes] = []
    batch: list[Range] = []
    nbytes = 0
    for wanted in ranges:
        length = wanted[2] - wanted[1]
        if batch and nbytes + length > BATCH:
            answers += patiently(batch[0][0], partial(_answers, batch))
            batch, nbytes = [], 0
        batch.append(wanted)
        nbytes += length
    if batch:
        answers += patiently(batch[0][0], partial(_answers, batch))
    return answers


def _answers(batch: Sequence[Range]) -> list[bytes]:
    """Return the answers of the store to one request for each range. Raises what its driver raises,
    and `CameShort`.
    """
    first = batch[0][0]
    fs, _ = filesystem(first)
    places = [filesystem(url)[1] for url, _, _ in batch]
    starts = [start for _, start, _ in batch]
    ends = [end for _, _, end in batch]
    nbytes = sum(ends) - sum(starts)
    try:
        answers = list(
            fs.cat_ranges(places, starts, ends, on_error="raise", **_patience(fs, nbytes))
        )
    except AttributeError:  # simplecache:: of fsspec before 2026.9, unless it has the file
        answers = [
            fs.cat_file(place, start, end) for place, start, end in zip(places, starts, ends)
        ]
    came = sum(map(len, answers))
    progress.count_fetched(came, len(batch))
    log.debug(
        "%s: %s bytes in %d requests, from byte %s",
        first,
        f"{came:,}",
        len(batch),
        f"{starts[0]:,}",
    )
    for (url, start, end), data in zip(batch, answers):
        cache.requests[url] += 1
        cache.fetched[url] += len(data)
        if len(data) != end - start:
            raise CameShort(start, end, len(data))
    return answers


def look_ahead(heads: Mapping[str, int]) -> None:
    """Fetch so many bytes at the start of each file of one folder, side by side, if a listing tells
    their sizes.

    After an error nothing is held: the files are fetched again, and the error reported, when they
    are read.
    """
    urls = [*heads]
    if any(url not in cache.stats for url in urls):
        with suppress(CkptError):
            names_in(paths.parent(urls[0]))
    ranges: list[Range] = []
    for url in urls:
        state = cache.stats.get(url)
        if state is not None and state.size and not cache.get(url, 0, 1):
            ranges.append((url, 0, min(heads[url], state.size)))
    with suppress(CkptError):
        for (url, _, _), data in zip(ranges, fetch(ranges)):
            cache.hold(url, 0, data)
