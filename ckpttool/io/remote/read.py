"""Read files behind URLs through fsspec, a range at a time, with a cache per checkpoint."""

from __future__ import annotations

import logging
import re
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import field
from datetime import datetime
from typing import Any

import aiohttp
import fsspec
from fsspec.asyn import AsyncFileSystem

from ckpttool.core.errors import CkptError
from ckpttool.core.limits import limits
from ckpttool.core.values import dataclass
from ckpttool.io import paths, progress
from ckpttool.io.remote.errors import CameShort, SendsTooMuch, answered, is_failure, patiently
from ckpttool.io.sources import note_streamed

_MAX_BLOCKS = 128
_MAX_AHEAD = 1 << 24  # bytes, of one file and of how all begin


@dataclass(frozen=True, slots=True)
class Stat:
    """What a store says of a URL: `size` in bytes, and by `version` a name and a value that change with the content."""

    folder: bool
    size: int | None
    version: tuple[str, str] = ("", "")

    def is_still(self, before: Stat) -> bool:
        """Whether the content can be the one that it was. Listings and single answers may tell different versions."""
        told = self.version == before.version or self.version[0] != before.version[0]
        return told and (self.folder, self.size) == (before.folder, before.size)


@dataclass(slots=True)
class Kept:
    """By URL what its store said (`stats`), what of its index is still to be checked (`assumed`), and what was sent.

    `blocks` by URL and number, the one used last at the end; `ahead`: ranges that were asked for ahead, their offsets
    and bytes, of which `heads` are bytes at the start of files. `runs`: the block that would follow the
    last request for some, and how many that asked for. `requests` and `fetched` (bytes) are counted.
    """

    stats: dict[str, Stat | None] = field(default_factory=dict)
    assumed: dict[str, list[Callable[[], None]]] = field(default_factory=dict)
    blocks: OrderedDict[tuple[str, int], bytes] = field(default_factory=OrderedDict)
    ahead: dict[str, tuple[list[int], list[bytes]]] = field(default_factory=dict)
    heads: dict[str, int] = field(default_factory=dict)
    runs: dict[str, tuple[int, int]] = field(default_factory=dict)
    requests: Counter[str] = field(default_factory=Counter)
    fetched: Counter[str] = field(default_factory=Counter)

    def forget(self, url: str) -> None:
        """Drops what is known of everything at, under and above the URL."""
        below = url.rstrip("/") + "/"

        def stays(other: str) -> bool:
            return not (other + "/").startswith(below) and not below.startswith(other.rstrip("/") + "/")

        self.stats = {other: found for other, found in self.stats.items() if stays(other)}
        self.assumed = {other: checks for other, checks in self.assumed.items() if stays(other)}
        self.blocks = OrderedDict((at, block) for at, block in self.blocks.items() if stays(at[0]))
        self.ahead = {other: found for other, found in self.ahead.items() if stays(other)}
        self.heads = {other: nbytes for other, nbytes in self.heads.items() if stays(other)}
        self.runs = {other: found for other, found in self.runs.items() if stays(other)}

    def range(self, url: str, start: int, end: int) -> bytes | None:
        """The bytes, where they were asked for ahead as one range."""
        starts, data = self.ahead.get(url, ([], []))
        at = bisect_right(starts, start) - 1
        if at < 0 or end > starts[at] + len(data[at]):
            return None
        return data[at][start - starts[at] : end - starts[at]]

    def keep_ranges(self, url: str, ranges: Mapping[int, bytes]) -> None:
        """Keeps ranges by their offsets; where there is no room the earlier ones go."""
        starts, data = self.ahead.get(url, ([], []))
        found = {**(dict(zip(starts, data)) if sum(map(len, data)) < _MAX_AHEAD else {}), **ranges}
        ordered = sorted(found)
        self.ahead[url] = ordered, [found[start] for start in ordered]

    def keep_heads(self, heads: Mapping[str, bytes]) -> None:
        """Keeps how these files begin; where there is no room, the first of all that are kept go."""
        for url, data in heads.items():
            self.keep_ranges(url, {0: data})
            self.heads[url] = len(data)
        while sum(self.heads.values()) > _MAX_AHEAD:
            first = next(iter(self.heads))
            del self.heads[first], self.ahead[first]

    def used(self, url: str, numbers: Iterable[int]) -> None:
        """Notes that these blocks were used; where there is no room, those go that were not for longest."""
        for number in numbers:
            self.blocks.move_to_end((url, number))
        while len(self.blocks) > _MAX_BLOCKS:
            self.blocks.popitem(last=False)


kept = Kept()


_LISTING = 1 << 26  # bytes of an answer to a request for no range: a page that lists files
_CHUNK = 1 << 16
_RANGE = re.compile(r"bytes=(\d+)-(\d+)")


class BoundedResponse(aiohttp.ClientResponse):
    """An answer whose body is read in chunks, until it is longer than the range that was asked for."""

    async def read(self) -> bytes:
        """The body. Raises `SendsTooMuch` where it goes on behind what was asked for."""
        if self._body is None:
            await self._read_to(_asked(self.request_info.headers))
        return await super().read()

    async def _read_to(self, most: int) -> None:
        body = bytearray()
        async for chunk in self.content.iter_chunked(_CHUNK):
            body += chunk
            if len(body) > most:
                self.close()
                raise SendsTooMuch(f"its server sends more than the {most:,} bytes that were asked for")
        self._body = bytes(body)


def _asked(headers: Mapping[str, str]) -> int:
    found = _RANGE.fullmatch(headers.get("Range", ""))
    return _LISTING if found is None else int(found[2]) - int(found[1]) + 1


def http_options(configured: Mapping[str, Any]) -> dict[str, Any]:
    """The options of fsspec's driver, beside those that the user has configured for its client."""
    client = {"timeout": aiohttp.ClientTimeout(total=None), **configured.get("client_kwargs", {})}
    return {"client_kwargs": {**client, "response_class": BoundedResponse}}


BLOCK = 1 << 17  # bytes a request for small reads: most headers, or the directory of a zip archive of 2,000 tensors
PART = 1 << 23  # bytes a request for large tensors
_MAX_RUN = 32  # blocks in one request, where one after the other is read
_LARGE = 8 * BLOCK  # bytes of a tensor that is fetched by itself
_SMALL_GAP = 1 << 10  # bytes: ranges that lie closer are asked for as one
_SLOWEST = 10_000  # bytes a second; what comes slower is given up
_VERSIONS = ("ETag", "etag", "generation", "md5Hash", "mtime", "LastModified", "last_modified", "created", "sha256")

log = logging.getLogger(__name__)


def filesystem(url: str) -> tuple[Any, str]:
    """The fsspec file system of the URL and the path in it.

    Raises `CkptError` that names the package to install where the driver is missing.
    """
    with answered(url):
        fs, path = fsspec.core.url_to_fs(url, **_options(url))
    return fs, path


def _options(url: str) -> dict[str, Any]:
    """What the driver has to be told beside what the user has configured."""
    scheme = url.partition("://")[0]
    if scheme not in ("http", "https"):
        return {}

    return http_options({**fsspec.config.conf.get("http", {}), **fsspec.config.conf.get("https", {})})


def _patience(fs: Any, nbytes: int = 0) -> dict[str, float]:
    """The argument that ends the wait for an answer of so many bytes; drivers that are not asynchronous have none."""
    return {"timeout": limits().remote_seconds + nbytes / _SLOWEST} if isinstance(fs, AsyncFileSystem) else {}


def stat(url: str) -> Stat | None:
    """What the URL is, or None where there is nothing. Raises `CkptError` where the store does not answer."""
    if url not in kept.stats:
        kept.stats[url] = _ask(url)
    return kept.stats[url]


def there(url: str) -> Stat:
    """`stat` of what is there. Raises `CkptError` where nothing is."""
    found = stat(url)
    if found is None:
        raise CkptError(f"no such file: {url}", hint="check the URL: scheme, bucket and key")
    return found


def _ask(url: str) -> Stat | None:
    fs, path = filesystem(url)

    def ask() -> Stat | None:
        try:
            return _stat(fs.info(path, **_patience(fs)))
        except (FileNotFoundError, NotADirectoryError) as error:
            if is_failure(error.__cause__):
                raise error.__cause__ from None
            return None

    return patiently(url, ask)


def _stat(info: Mapping[str, Any]) -> Stat:
    version = next(((name, _spelled(info[name])) for name in _VERSIONS if info.get(name)), ("", ""))
    return Stat(info.get("type") == "directory", info.get("size"), version)


def _spelled(value: Any) -> str:
    return str(value.timestamp() if isinstance(value, datetime) else value)


def names_in(url: str) -> list[str]:
    """The names in the folder, sorted; what the listing says of each is kept."""
    fs, path = filesystem(url)
    with answered(url):
        found = fs.ls(path, detail=True, **_patience(fs))
    names = []
    for info in found:
        own = str(info["name"]).rstrip("/").rpartition("/")[2]
        if str(info["name"]).strip("/") != path.strip("/"):  # a folder's own object
            names.append(own)
            kept.stats[paths.join(url, own)] = _stat(info)
    return sorted(names)


def glob(pattern: str) -> list[str]:
    """The URLs of the files that match the pattern, sorted."""
    fs, path = filesystem(pattern)
    with answered(pattern):
        return sorted(fs.unstrip_protocol(found) for found in fs.glob(path) if fs.isfile(found))


def forget(url: str) -> None:
    """Asks the store anew from now on for everything at, under and above the URL."""
    kept.forget(url)
    _invalidate(url)


def _invalidate(url: str) -> None:
    fs, path = filesystem(url)
    with answered(url):
        fs.invalidate_cache(path)


def check_unchanged(urls: Iterable[str]) -> None:
    """Raises `CkptError` where a file is no longer the one whose index was read."""
    for url in urls:
        before = kept.stats.pop(url, None)
        _invalidate(url)
        if before is None or not is_still(url, before):
            forget(url)
            raise CkptError(f"{url} was changed while it was read", hint="nothing was written: run it again")


def is_still(url: str, before: Stat) -> bool:
    """Whether the file can be the one of which the store has said `before`. Raises `CkptError` as `stat`."""
    now = stat(url)
    return now is not None and now.is_still(before)


def assume(url: str, check: Callable[[], None]) -> None:
    """Notes what of the file's index `check_assumed` is to check: where tensors lie, though nothing was read there."""
    kept.assumed.setdefault(url, []).append(check)


def check_assumed(url: str) -> None:
    """Raises `CkptError` where the index of the file assumed what is not so; before tensors of it are read."""
    for check in kept.assumed.pop(url, ()):
        check()


def fetched(prefix: str = "") -> int:
    """Bytes fetched so far from the URLs that begin with `prefix`, in this process."""
    return sum(count for url, count in kept.fetched.items() if url.startswith(prefix))


def log_fetched() -> None:
    """Logs for every URL what was fetched from it."""
    for url, count in kept.fetched.items():
        log.info("%s: %s bytes fetched in %d requests", url, f"{count:,}", kept.requests[url])


# Reading


class RemoteFile:
    """A file behind a URL, as a `files.Source` that is read in blocks."""

    def __init__(self, url: str, size: int) -> None:
        self.url = url
        self.size = size
        self._at = 0

    def read(self, count: int = -1, /) -> bytes:
        """The next `count` bytes, fewer at the end of the file; all that are left without `count`."""
        data = self.read_at(self._at, self.size if count < 0 else count)
        self._at += len(data)
        return data

    def seek(self, offset: int, /) -> int:
        """Goes to byte `offset` from the start of the file."""
        self._at = offset
        return offset

    def read_at(self, offset: int, count: int) -> bytes:
        """At most `count` bytes from byte `offset` on: all of them but at the end of the file."""
        end = min(offset + count, self.size)
        if end <= offset:
            return b""
        ahead = kept.range(self.url, offset, end)
        if ahead is not None:
            return ahead
        if end - offset > _MAX_RUN * BLOCK:
            return b"".join(_fetch(self.url, _cut(offset, end)))
        first, last = offset // BLOCK, (end - 1) // BLOCK
        data = b"".join(self._blocks(first, last))
        return data[offset - first * BLOCK : end - first * BLOCK]

    def _blocks(self, first: int, last: int) -> list[bytes]:
        """The blocks `first` to `last`. Those that are not kept are fetched, neighbours in one request."""
        numbers = range(first, last + 1)
        missing = [number for number in numbers if (self.url, number) not in kept.blocks]
        if missing:
            low = missing[0]
            high = self._end_of_run(low, missing[-1] + 1)
            (data,) = _fetch(self.url, [(low * BLOCK, min(high * BLOCK, self.size))])
            for number in range(low, high):
                kept.blocks[self.url, number] = data[(number - low) * BLOCK : (number - low + 1) * BLOCK]
        found = [kept.blocks[self.url, number] for number in numbers]
        kept.used(self.url, numbers)
        return found

    def _end_of_run(self, low: int, high: int) -> int:
        """Where a request for the blocks `low` to `high` ends: each that goes on where the last one ended is longer."""
        following, length = kept.runs.get(self.url, (-1, 1))
        length = min(length * 2, _MAX_RUN) if low == following else 1
        high = min(max(high, low + length), -(-self.size // BLOCK))
        kept.runs[self.url] = (high, length)
        return high

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Fetches these ranges (offset, count) side by side; they are kept as long as there is room."""
        wanted = self._missing(ranges)
        kept.keep_ranges(self.url, dict(zip((start for start, _ in wanted), _fetch(self.url, wanted))))

    def _missing(self, ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """Those of the ranges (offset, count) that are not kept, as (start, end); those close to each other as one."""
        wanted: list[tuple[int, int]] = []
        for offset, count in sorted(ranges):
            start, end = max(0, offset), min(offset + count, self.size)
            if end <= start or kept.range(self.url, start, end) is not None or self._has_blocks(start, end):
                continue
            if wanted and start - wanted[-1][1] <= _SMALL_GAP:
                wanted[-1] = (wanted[-1][0], max(end, wanted[-1][1]))
            else:
                wanted.append((start, end))
        return wanted

    def _has_blocks(self, start: int, end: int) -> bool:
        numbers = range(start // BLOCK, (end - 1) // BLOCK + 1)
        return all((self.url, number) in kept.blocks for number in numbers)


def open_file(url: str) -> RemoteFile:
    """The file at the URL. Raises `CkptError` where there is none, or its store cannot give a part of it."""
    found = there(url)
    if found.folder:
        raise CkptError(f"{url} is a folder, not a file", hint="name one of its files")
    if found.size is None:
        raise CkptError(f"{url}: its server does not say how long it is", hint="download it, and name the local file")
    return RemoteFile(url, found.size)


class Stream:
    """Reads tensors front to back: large ones in large ranges, several at a time, of which it holds the last few."""

    def __init__(self, url: str) -> None:
        check_assumed(url)
        self._file = open_file(url)
        note_streamed(url)
        self._start = 0
        self._parts: list[bytes] = []

    def read_at(self, offset: int, count: int, until: int) -> bytes | memoryview:
        """At most `count` bytes from byte `offset` on; the bytes up to `until` will be asked for next."""
        data = self._held(offset)
        if not data:
            until = min(until, self._file.size)
            if until - offset <= _LARGE:
                return self._file.read_at(offset, min(count, until - offset))
            self._parts = []  # before the next ones come, so that never both are in memory
            self._parts = _fetch(self._file.url, _cut(offset, min(until, offset + PART * limits().remote_requests)))
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


def _cut(start: int, end: int) -> list[tuple[int, int]]:
    return [(at, min(at + PART, end)) for at in range(start, end, PART)]


def _fetch(url: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
    """The bytes of each range (start, end), fetched side by side where the driver can; what is cut off, once more."""
    found: dict[tuple[int, int], bytes] = {}

    def ask() -> None:
        missing, failed = [own for own in ranges if own not in found], None
        for (start, end), data in zip(missing, _answers([(url, *own) for own in missing])):
            if isinstance(data, BaseException):
                failed = data
            elif len(data) != end - start:
                failed = CameShort(start, end, len(data))
            else:
                found[start, end] = data
        if failed is not None:
            raise failed

    patiently(url, ask)
    return [found[own] for own in ranges]


def _answers(wanted: Sequence[tuple[str, int, int]]) -> list[bytes | BaseException]:
    """What one store says to requests for (URL, start, end), sent side by side where the driver can."""
    if not wanted:
        return []
    (fs, _), nbytes = filesystem(wanted[0][0]), sum(end - start for _, start, end in wanted)
    places = [filesystem(url)[1] for url, _, _ in wanted]
    starts, ends = [start for _, start, _ in wanted], [end for _, _, end in wanted]
    found = list(fs.cat_ranges(places, starts, ends, on_error="return", **_patience(fs, nbytes)))
    for (url, _, _), data in zip(wanted, found):
        kept.requests[url] += 1
        kept.fetched[url] += len(data) if isinstance(data, bytes) else 0
    progress.has_fetched(sum(len(data) for data in found if isinstance(data, bytes)), len(wanted))
    log.debug(
        "%s: %s bytes in %d requests, from byte %s", wanted[0][0], f"{nbytes:,}", len(wanted), f"{wanted[0][1]:,}"
    )
    return found


def look_ahead(heads: Mapping[str, int]) -> None:
    """Fetches how files in one folder begin, so many bytes of each, side by side, as far as a listing tells of them."""
    urls = [*heads]
    if any(url not in kept.stats for url in urls):
        with suppress(CkptError):
            names_in(paths.parent(urls[0]))
    known = {url: kept.stats.get(url) for url in urls if (url, 0) not in kept.blocks}
    wanted = [(url, 0, min(heads[url], found.size)) for url, found in known.items() if found is not None and found.size]
    came = zip(wanted, _answers(wanted))  # what fails is asked for again when it is needed, and said
    kept.keep_heads({url: data for (url, _, end), data in came if isinstance(data, bytes) and len(data) == end})
