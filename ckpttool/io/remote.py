"""Read files behind URLs through fsspec, a range at a time, with a cache per checkpoint."""

from __future__ import annotations

import errno
import logging
import re
import time
from bisect import bisect_left, bisect_right
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import field
from datetime import datetime
from difflib import get_close_matches
from shlex import quote
from typing import Any, TypeGuard, TypeVar

import aiohttp
import fsspec
from fsspec.asyn import AsyncFileSystem
from fsspec.exceptions import FSTimeoutError

from ckpttool.core.errors import CkptError
from ckpttool.core.limits import limits
from ckpttool.core.values import dataclass
from ckpttool.io import paths, progress
from ckpttool.io.sources import note_streamed

# Modules that drivers import, if the package to install has another name.
_PACKAGES = {"smbclient": "smbprotocol", "dropboxdrivefs": "dropboxdrivefs", "yarl": "aiohttp", "git": "pygit2"}
_EXTRAS = {"s3fs": "s3", "gcsfs": "gcs", "huggingface_hub": "hf"}  # of ckpttool, with versions that work
_LOGIN = "check the credentials that the driver finds, and that they may do this"
_NETWORK = "check the network, and the endpoint that the driver is set to"
_ANY = "check the URL, the network, and what the driver is set to"
# Drivers share no classes for these, but their names are similar.
_NAMES = (
    (re.compile("Credential|TokenRetrieval|Login|Auth|Gated|Profile|Forbidden|AccessDenied|Unauthorized"), _LOGIN),
    (re.compile("Connect|Timeout|Endpoint|DNS|gaierror|SSL|ServerDisconnected|IncompleteRead|Payload"), _NETWORK),
)
_PASSING = re.compile("Timeout|Disconnected|IncompleteRead|Payload|ConnectionReset|ConnectionClosed|SlowDown|Throttl")
_PASSING_NUMBERS = frozenset((errno.ECONNRESET, errno.EPIPE, errno.EBUSY, errno.EAGAIN, errno.ETIMEDOUT))
_PASSING_STATUS = frozenset((408, 425, 429, 500, 502, 503, 504))

_WAITS = (0.2, 0.5, 1.0, 2.0)  # seconds before a request is made again

Answer = TypeVar("Answer")
log = logging.getLogger(__name__)


class SendsTooMuch(OSError): ...


class CameShort(OSError):
    """An answer has fewer bytes than the range (`start`, `end`) in the request."""

    def __init__(self, start: int, end: int, came: int) -> None:
        super().__init__(f"asked for {end - start:,} bytes from byte {start:,}, got {came:,}")


def patiently(url: str, ask: Callable[[], Answer]) -> Answer:
    """Return the result of `ask`; retry for some seconds after errors that may pass. Raises `CkptError`."""
    for wait in _WAITS:
        try:
            return ask()
        except Exception as error:
            if not is_passing(error):
                with answered(url):
                    raise
            log.info("%s: asked again in %s s: %s", url, wait, _text(error))
        time.sleep(wait)
    with answered(url):
        return ask()


@contextmanager
def answered(url: str) -> Iterator[None]:
    """Turn whatever the driver of the URL raises inside into a `CkptError`."""
    try:
        yield
    except (CkptError, MemoryError):
        raise
    except Exception as error:  # drivers raise what they like, their libraries too
        raise _explained(url, error) from error


def is_passing(error: BaseException) -> bool:
    """Return True if the same request may succeed a moment later: throttled, cut off, a busy server.

    A server that is silent for too long, or that refuses the connection, is not asked again.
    """
    if isinstance(error, (FSTimeoutError, SendsTooMuch)):
        return False
    if isinstance(error, CameShort):
        return True
    known = getattr(error, "response", None) or {}
    said = known.get("ResponseMetadata", {}).get("HTTPStatusCode") if isinstance(known, dict) else None
    if getattr(error, "status", said) in _PASSING_STATUS or getattr(error, "errno", None) in _PASSING_NUMBERS:
        return True
    if any(_PASSING.search(kind.__name__) for kind in type(error).__mro__):
        return True
    return error.__cause__ is not None and is_passing(error.__cause__)


def is_failure(cause: BaseException | None) -> TypeGuard[BaseException]:
    """Return True if a file that a driver calls missing may exist: access was denied, or the store did not answer."""
    return getattr(cause, "status", 404) not in (404, 410) or (
        isinstance(cause, OSError) and not isinstance(cause, (FileNotFoundError, NotADirectoryError))
    )


def _explained(url: str, error: Exception) -> CkptError:
    scheme = url.partition("://")[0].rpartition("::")[2]
    if isinstance(error, ImportError):
        return _no_driver(url, scheme, error)
    if isinstance(error, ValueError) and str(error).startswith("Protocol not known"):
        from fsspec.registry import known_implementations

        unknown = str(error).partition(": ")[2]
        near = get_close_matches(unknown, known_implementations, 1)
        hint = f"did you mean {near[0]}://?" if near else "fsspec reads s3://, gs://, az://, hf://, https:// and others"
        if "::" in url:
            hint += "; in a chain (simplecache::s3://…) every part with a path is a URL"
        return CkptError(f"{url}: no driver is known for {unknown}://", hint=hint)
    if isinstance(error, FileNotFoundError):
        return CkptError(f"no such file, folder or bucket: {url}", hint="check the URL: scheme, bucket and key")
    if isinstance(error, FileExistsError):
        return CkptError(f"{url} exists: another process has written it meanwhile", hint="pass --force to overwrite it")
    if isinstance(error, SendsTooMuch):
        return CkptError(f"{url}: {error}", hint="its server cannot send a part, or is hostile: download it first")
    if isinstance(error, CameShort):
        hint = "it was changed while it was read, or its server cannot send a part: download it first"
        return CkptError(f"{url}: {error}", hint=hint)
    if isinstance(error, FSTimeoutError):
        return CkptError(f"{url}: no answer: {limits().named('remote_seconds')}", hint=_NETWORK)
    if isinstance(error, NotImplementedError):
        return CkptError(f"{url}: the driver of {scheme}:// cannot do this", hint="use a local file")
    if isinstance(error, PermissionError) or getattr(error, "status", None) in (401, 403):
        return CkptError(f"{url}: {_text(error)}", hint=_LOGIN)
    names = " ".join(kind.__name__ for kind in type(error).__mro__)
    hint = next((hint for pattern, hint in _NAMES if pattern.search(names)), _ANY)
    return CkptError(f"{url}: {_text(error)}", hint=hint)


def _no_driver(url: str, scheme: str, error: ImportError) -> CkptError:
    cause = error.__cause__ if isinstance(error.__cause__, ImportError) else error
    module = (cause.name or "").partition(".")[0]
    if not module:
        return CkptError(f"{url}: the driver of {scheme}:// cannot be loaded", hint=_text(error))
    package = _PACKAGES.get(module, module)
    extra = f"'ckpttool[{_EXTRAS[module]}]', or only " if module in _EXTRAS else ""
    return CkptError(
        f"{url}: {scheme}:// needs the Python package {package}, which is not installed",
        hint=f"pip install {extra}{package}",
    )


def _text(error: Exception) -> str:
    said = " ".join(str(error).split()) or quote(repr(error))
    return said if isinstance(error, OSError) else f"{type(error).__name__}: {said}"


BLOCK = 1 << 17  # bytes of a small request: most headers, or the directory of a zip archive of 2,000 tensors
PART = 1 << 23  # bytes of a request for large tensors
_LARGE = 8 * BLOCK  # bytes of a tensor that is fetched alone
_MAX_RUN = 32  # blocks in one request, if they are read one after the other
_SMALL_GAP = 1 << 10  # bytes between ranges that are fetched with one request
_MAX_CACHED = 1 << 25  # bytes
_SLOWEST = 10_000  # bytes a second; slower answers are given up
_LISTING = 1 << 26  # bytes of an answer without a range: a page that lists files
_CHUNK = 1 << 16
_RANGE = re.compile(r"bytes=(\d+)-(\d+)")
_VERSIONS = ("ETag", "etag", "generation", "md5Hash", "mtime", "LastModified", "last_modified", "created", "sha256")


@dataclass(frozen=True, slots=True)
class Stat:
    """The answer of a store: `size` in bytes; `version`: a name and a value that change with the content."""

    folder: bool
    size: int | None
    version: tuple[str, str] = ("", "")

    def is_still(self, before: Stat) -> bool:
        """Return True if the content can be the same. Listings and single answers may tell different versions."""
        told = self.version == before.version or self.version[0] != before.version[0]
        return told and (self.folder, self.size) == (before.folder, before.size)


@dataclass(slots=True)
class Cache:
    """What stores have sent, by URL.

    `stats`; `assumed`: checks of the index that were not made yet; `ranges` of files by URL and first byte, the last
    used at the end, `nbytes` in all, none inside of another; `starts`: the first bytes of a file's ranges, sorted;
    `runs`: the end of the last request for blocks, and their number; counts of `requests` and `fetched` bytes.
    """

    stats: dict[str, Stat | None] = field(default_factory=dict)
    assumed: dict[str, list[Callable[[], None]]] = field(default_factory=dict)
    ranges: OrderedDict[tuple[str, int], bytes] = field(default_factory=OrderedDict)
    starts: dict[str, list[int]] = field(default_factory=dict)
    nbytes: int = 0
    runs: dict[str, tuple[int, int]] = field(default_factory=dict)
    requests: Counter[str] = field(default_factory=Counter)
    fetched: Counter[str] = field(default_factory=Counter)

    def forget(self, url: str) -> None:
        """Forget everything at, under and above the URL."""
        below = url.rstrip("/") + "/"

        def is_about(other: str) -> bool:
            return (other + "/").startswith(below) or below.startswith(other.rstrip("/") + "/")

        for at in [at for at in self.ranges if is_about(at[0])]:
            self.nbytes -= len(self.ranges.pop(at))
        tables: tuple[dict[str, Any], ...] = (self.stats, self.assumed, self.starts, self.runs)
        for known in tables:
            for other in [other for other in known if is_about(other)]:
                del known[other]

    def held(self, url: str, start: int, end: int) -> bytes:
        """Return the bytes from `start` on, up to `end` or to the end of the range that holds `start`."""
        starts = self.starts.get(url, ())
        at = bisect_right(starts, start) - 1
        if at < 0:
            return b""
        first = starts[at]
        self.ranges.move_to_end((url, first))
        return self.ranges[url, first][start - first : end - first]

    def keep(self, url: str, ranges: Mapping[int, bytes]) -> None:
        """Keep ranges by their first bytes; without room, drop the least recently used ranges."""
        starts = self.starts.setdefault(url, [])
        for start, data in ranges.items():
            low, high = bisect_left(starts, start), bisect_left(starts, start + len(data))
            self.nbytes += len(data) - sum(len(self.ranges.pop((url, old))) for old in starts[low:high])
            starts[low:high] = [start]
            self.ranges[url, start] = data
        while self.nbytes > _MAX_CACHED:
            (url, start), data = self.ranges.popitem(last=False)
            self.starts[url].remove(start)
            self.nbytes -= len(data)


cache = Cache()


class BoundedResponse(aiohttp.ClientResponse):
    """An HTTP answer that is read in chunks, and refused when it is longer than the requested range."""

    async def read(self) -> bytes:
        """Return the body. Raises `SendsTooMuch` if it is longer than the requested range."""
        if self._body is None:
            asked = _RANGE.fullmatch(self.request_info.headers.get("Range", ""))
            most = _LISTING if asked is None else int(asked[2]) - int(asked[1]) + 1
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
    if url.partition("://")[0] in ("http", "https"):
        configured = {**fsspec.config.conf.get("http", {}), **fsspec.config.conf.get("https", {})}
        client = {"timeout": aiohttp.ClientTimeout(total=None), **configured.get("client_kwargs", {})}
        options = {"client_kwargs": {**client, "response_class": BoundedResponse}}
    with answered(url):
        fs, path = fsspec.core.url_to_fs(url, **options)
    return fs, path


def _patience(fs: Any, nbytes: int = 0) -> dict[str, float]:
    """Return the argument that ends the wait for an answer of so many bytes; only asynchronous drivers have one."""
    return {"timeout": limits().remote_seconds + nbytes / _SLOWEST} if isinstance(fs, AsyncFileSystem) else {}


def stat(url: str) -> Stat | None:
    """Return what the URL is, or None if there is nothing. Raises `CkptError` if the store does not answer."""
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
    found = stat(url)
    if found is None:
        raise CkptError(f"no such file: {url}", hint="check the URL: scheme, bucket and key")
    return found


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
    fs, path = filesystem(url)
    with answered(url):
        found = fs.ls(path, detail=True, **_patience(fs))
    names = []
    for info in found:
        name = str(info["name"]).rstrip("/").rpartition("/")[2]
        if str(info["name"]).strip("/") != path.strip("/"):  # a folder's own object
            names.append(name)
            one = paths.join(url, name)
            if cache.stats.get(one) is None:  # an index may rest on what was said before
                cache.stats[one] = _stat(info)
    return sorted(names)


def glob(pattern: str) -> list[str]:
    fs, path = filesystem(pattern)
    with answered(pattern):
        return sorted(fs.unstrip_protocol(found) for found in fs.glob(path) if fs.isfile(found))


def forget(url: str) -> None:
    """Forget everything at, under and above the URL; the next call asks the store."""
    cache.forget(url)
    _invalidate(url)


def _invalidate(url: str) -> None:
    fs, path = filesystem(url)
    with answered(url):
        fs.invalidate_cache(path)


def remove(url: str, *, is_folder: bool = False) -> None:
    """Remove the file or folder at the URL, if its store does."""
    with suppress(Exception):  # drivers raise what they like
        fs, path = filesystem(url)
        fs.rm(path, recursive=True) if is_folder else fs.rm_file(path)
    cache.forget(url)


def check_unchanged(urls: Iterable[str]) -> None:
    """Raise `CkptError` if a file is no longer the one whose index was read."""
    for url in urls:
        before = cache.stats.pop(url, None)
        _invalidate(url)
        if before is None or not is_still(url, before):
            forget(url)
            raise CkptError(f"{url} was changed while it was read", hint="nothing was written: run it again")


def is_still(url: str, before: Stat) -> bool:
    """Return True if the file can be the same as `before`. Raises `CkptError` as `stat`."""
    now = stat(url)
    return now is not None and now.is_still(before)


def assume(url: str, check: Callable[[], None]) -> None:
    cache.assumed.setdefault(url, []).append(check)


def check_assumed(url: str) -> None:
    """Run the checks of the file's index, before its tensors are read. They raise `CkptError`."""
    for check in cache.assumed.pop(url, ()):
        check()


def log_fetched() -> None:
    for url, count in cache.fetched.items():
        log.info("%s: %s bytes fetched in %d requests", url, f"{count:,}", cache.requests[url])


# Reading


class RemoteFile:
    """A file behind a URL that is read in blocks."""

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
        if end <= offset:
            return b""
        if end - offset > _MAX_RUN * BLOCK and len(cache.held(self.url, offset, end)) < end - offset:
            return b"".join(_fetch(self.url, _cut(offset, end)))
        parts = []
        while offset < end:
            data = cache.held(self.url, offset, end)
            if not data:
                low = offset // BLOCK * BLOCK
                (run,) = _fetch(self.url, [(low, self._end_of_run(low, end))])
                cache.keep(self.url, {low: run})
                data = run[offset - low : end - low]
            parts.append(data)
            offset += len(data)
        return b"".join(parts)

    def _end_of_run(self, low: int, end: int) -> int:
        """Return where a request for the blocks from `low` to `end` ends: longer if it follows the last one."""
        following, count = cache.runs.get(self.url, (-1, 1))
        count = min(count * 2, _MAX_RUN) if low == following else 1
        high = max(-(-end // BLOCK), low // BLOCK + count) * BLOCK
        cache.runs[self.url] = (high, count)
        return min(high, self.size)

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Fetch these ranges (offset, count) side by side, and keep them while there is room."""
        wanted: list[tuple[int, int]] = []
        for offset, count in sorted(ranges):
            start, end = max(0, offset), min(offset + count, self.size)
            if end <= start or len(cache.held(self.url, start, end)) == end - start:
                continue
            if wanted and start - wanted[-1][1] <= _SMALL_GAP:
                wanted[-1] = (wanted[-1][0], max(end, wanted[-1][1]))
            else:
                wanted.append((start, end))
        cache.keep(self.url, dict(zip((start for start, _ in wanted), _fetch(self.url, wanted))))


def open_file(url: str) -> RemoteFile:
    """Return the file at the URL. Raises `CkptError` if there is none, or if its store cannot give a part of it."""
    found = there(url)
    if found.folder:
        raise CkptError(f"{url} is a folder, not a file", hint="name one of its files")
    if found.size is None:
        raise CkptError(f"{url}: its server does not say how long it is", hint="download it, and name the local file")
    return RemoteFile(url, found.size)


class Stream:
    """Read tensors front to back: large ones in large ranges, several at a time, of which it holds the last few."""

    def __init__(self, url: str) -> None:
        check_assumed(url)
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
    """Return the bytes of each range (start, end), fetched side by side; ranges that were cut off are fetched again."""
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


def _answers(requests: Sequence[tuple[str, int, int]]) -> list[bytes | BaseException]:
    """Return the answers of one store to requests for (URL, start, end), sent side by side if the driver can."""
    if not requests:
        return []
    (fs, _), nbytes = filesystem(requests[0][0]), sum(end - start for _, start, end in requests)
    places = [filesystem(url)[1] for url, _, _ in requests]
    starts, ends = [start for _, start, _ in requests], [end for _, _, end in requests]
    found = list(fs.cat_ranges(places, starts, ends, on_error="return", **_patience(fs, nbytes)))
    for at, data in enumerate(found):
        if isinstance(data, AttributeError):  # simplecache:: of fsspec before 2026.9, unless it has the file
            try:
                found[at] = fs.cat_file(places[at], starts[at], ends[at])
            except Exception as error:  # of any driver: reported like those above
                found[at] = error
    for (url, _, _), data in zip(requests, found):
        cache.requests[url] += 1
        cache.fetched[url] += len(data) if isinstance(data, bytes) else 0
    progress.has_fetched(sum(len(data) for data in found if isinstance(data, bytes)), len(requests))
    url, start, _ = requests[0]
    log.debug("%s: %s bytes in %d requests, from byte %s", url, f"{nbytes:,}", len(requests), f"{start:,}")
    return found


def look_ahead(heads: Mapping[str, int]) -> None:
    """Fetch so many bytes at the start of each file of one folder, side by side, if a listing tells their sizes."""
    urls = [*heads]
    if any(url not in cache.stats for url in urls):
        with suppress(CkptError):
            names_in(paths.parent(urls[0]))
    known = {url: cache.stats.get(url) for url in urls if not cache.held(url, 0, 1)}
    wanted = [(url, 0, min(heads[url], found.size)) for url, found in known.items() if found is not None and found.size]
    for (url, _, end), data in zip(wanted, _answers(wanted)):
        if (
            isinstance(data, bytes) and len(data) == end
        ):  # else it is fetched again, and the error reported, when needed
            cache.keep(url, {0: data})
