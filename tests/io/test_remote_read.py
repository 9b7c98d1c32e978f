"""Remote reads return the bytes of the file, whatever the cache holds."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpttool.core.errors import CkptError
from ckpttool.io import files, remote
from ckpttool.io.remote import Cache, Stat, Stream, open_file

DATA = os.urandom(3_001)
URL = "memory://reads/data"
PLACES = st.integers(0, 3_010)
RANGES = st.tuples(PLACES, st.integers(0, 900))
STEPS = st.one_of(
    st.tuples(st.just("read_at"), RANGES),
    st.tuples(st.just("prefetch"), st.lists(RANGES, max_size=4)),
    st.tuples(st.just("stream"), st.tuples(PLACES, st.integers(1, 500), st.integers(0, 3_010))),
    st.tuples(st.just("seek"), PLACES),
    st.tuples(st.just("read"), st.integers(-1, 400)),
)


@pytest.fixture(autouse=True)
def _small_cache(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Upload a file of many blocks, of which the cache keeps only a few, and start with an empty cache."""
    monkeypatch.setattr(remote, "cache", Cache())
    for constant, value in (("BLOCK", 64), ("PART", 300), ("_LARGE", 512), ("_SMALL_GAP", 20), ("_MAX_RUN", 4)):
        monkeypatch.setattr(remote, constant, value)
    monkeypatch.setattr(remote, "_MAX_CACHED", 700)
    fsspec.filesystem("memory").pipe_file("/reads/data", DATA)
    yield
    remote.forget(URL)


@settings(max_examples=120)
@given(steps=st.lists(STEPS, max_size=8))
def test_reads_in_any_order_return_the_bytes_of_the_file(steps: list[tuple[str, Any]]) -> None:
    remote.forget(URL)
    file, stream, at = open_file(URL), Stream(URL), 0
    assert file.size == len(DATA)
    for step, arguments in steps:
        if step == "read_at":
            assert file.read_at(*arguments) == DATA[arguments[0] : sum(arguments)]
        elif step == "prefetch":
            file.prefetch(arguments)
            for offset, count in arguments:
                assert file.read_at(offset, count) == DATA[offset : offset + count]
        elif step == "stream":
            offset, count, until = arguments
            found = bytes(stream.read_at(offset, count, max(until, offset + count)))
            assert found == DATA[offset : offset + len(found)]
            assert found or offset >= len(DATA)
        elif step == "seek":
            at = file.seek(arguments)
        else:
            found = file.read(arguments)
            assert found == (DATA[at:] if arguments < 0 else DATA[at : at + arguments])
            at += len(found)
        assert sum(map(len, remote.cache.ranges.values())) == remote.cache.nbytes <= 700


def test_sequential_reads_fetch_longer_runs() -> None:
    """Runs have 1, 2, 4 and then always 4 blocks of 64 bytes; a read elsewhere starts with 1 block again."""
    file, before = open_file(URL), remote.cache.requests[URL]
    for at in range(64 * 11):
        assert file.read_at(at, 1) == DATA[at : at + 1]
    assert remote.cache.requests[URL] - before == 4
    fetched = remote.cache.fetched[URL]
    file.read_at(2_000, 1)
    assert remote.cache.fetched[URL] - fetched == 64


def test_close_ranges_are_fetched_in_one_request() -> None:
    for gap, requests in ((20, 1), (21, 2), (-5, 1)):
        remote.forget(URL)
        file, before = open_file(URL), remote.cache.requests[URL]
        file.prefetch([(100 + 30 + gap, 30), (100, 30)])
        assert remote.cache.requests[URL] - before == requests
        file.read_at(105, 20), file.read_at(100 + 30 + gap, 30)
        file.prefetch([(100, 30), (110, 10), (5_000, 10)])
        assert remote.cache.requests[URL] - before == requests


def test_a_range_inside_of_another_one_is_fetched_with_it() -> None:
    remote.forget(URL)
    file, before = open_file(URL), remote.cache.requests[URL]
    file.prefetch([(100, 60), (110, 10)])
    assert file.read_at(100, 60) == DATA[100:160]
    assert remote.cache.requests[URL] - before == 1


def test_file_shorter_than_its_size_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    file = open_file(URL)
    fsspec.filesystem("memory").pipe_file("/reads/data", DATA[:-1])
    monkeypatch.setattr("ckpttool.io.remote._WAITS", ())
    with pytest.raises(CkptError, match="asked for 57 bytes from byte 2,944, got 56"):
        file.read_at(len(DATA) - 3, 3)
    fsspec.filesystem("memory").rm("/reads/data")
    remote.forget(URL)
    with pytest.raises(CkptError, match="no such file"):
        open_file(URL)


def test_only_the_failed_range_is_fetched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpttool.io.remote._WAITS", (0.0,))
    plain, failures = MemoryFileSystem.cat_file, [ConnectionResetError(errno.ECONNRESET, "reset")]

    def flaky(fs: Any, path: str, start: int, end: int) -> bytes:
        if start == 1_000 and failures:
            raise failures.pop()
        return plain(fs, path, start, end)

    file, before = open_file(URL), remote.cache.requests[URL]
    monkeypatch.setattr(MemoryFileSystem, "cat_file", flaky)
    file.prefetch([(0, 30), (1_000, 30), (2_000, 30)])
    assert remote.cache.requests[URL] - before == 4
    assert file.read_at(1_000, 30) == DATA[1_000:1_030]


def test_look_ahead_keeps_starts_of_readable_files() -> None:
    """Files that are empty, missing, removed or shorter by now are not kept, and are requested later."""
    fs, names = fsspec.filesystem("memory"), ("good", "empty", "gone", "shorter", "late")
    for name in names:
        fs.pipe_file(f"/reads/heads/{name}", b"" if name == "empty" else DATA)
    urls = {name: f"memory://reads/heads/{name}" for name in names}
    try:
        fs.rm("/reads/heads/late")
        assert remote.names_in("memory://reads/heads") == ["empty", "gone", "good", "shorter"]
        fs.rm("/reads/heads/gone")
        fs.pipe_file("/reads/heads/shorter", b"short")
        remote.look_ahead({urls[name]: 100 for name in ("good", "empty", "gone", "shorter")})
        assert {*remote.cache.starts} == {urls["good"]}
        remote.look_ahead({urls["late"]: 100})
        assert {*remote.cache.starts} == {urls["good"]}
        fs.pipe_file("/reads/heads/late", DATA)
        for name in ("good", "late"):
            assert open_file(urls[name]).read_at(0, 100) == DATA[:100]
        remote.look_ahead({"memory://nowhere/at/all": 100})
    finally:
        fs.rm("/reads/heads", recursive=True)


def test_forgotten_file_counts_as_changed() -> None:
    open_file(URL)
    remote.check_unchanged([URL])
    remote.forget(URL)
    with pytest.raises(CkptError, match="was changed while it was read"):
        remote.check_unchanged([URL])


def test_only_files_of_known_size_are_opened() -> None:
    with pytest.raises(CkptError, match="is a folder, not a file"):
        open_file("memory://reads")
    remote.cache.stats["memory://reads/endless"] = Stat(False, None)
    with pytest.raises(CkptError, match="does not say how long it is"):
        open_file("memory://reads/endless")
    assert not files.is_file("memory://reads")
    assert not files.is_file("memory://reads/none")
    assert files.is_file(URL)


def test_removed_file_is_not_read_on() -> None:
    open_file(URL)
    opened = files.opened_at([URL, "memory://reads/never asked"])
    assert [*opened] == [URL]
    files.read_on(opened)
    fsspec.filesystem("memory").rm("/reads/data")
    remote.forget(URL)
    with pytest.raises(CkptError, match="no longer the file that was opened"):
        files.read_on(opened)


@pytest.mark.parametrize(
    ("url", "forgotten"),
    [
        ("s3://b/m", {"s3://b/m", "s3://b/m/a", "s3://b/m/sub/a"}),
        ("s3://b/m/", {"s3://b/m", "s3://b/m/a", "s3://b/m/sub/a"}),
        ("s3://b/m/sub/a", {"s3://b/m", "s3://b/m/sub/a"}),
        ("s3://b/none", set()),
    ],
)
def test_forget_drops_the_url_its_parent_and_its_contents(url: str, forgotten: set[str]) -> None:
    urls = {"s3://b/m", "s3://b/m/a", "s3://b/m/sub/a", "s3://b/model", "s3://c/m"}
    known = Cache()
    for one in urls:
        known.stats[one] = None
        known.assumed[one], known.runs[one] = [], (1, 2)
        known.keep(one, {0: b"head"})
    known.forget(url)
    left = urls - forgotten
    assert left == {*known.stats} == {*known.assumed} == {*known.runs} == {*known.starts}
    assert {one for one, _ in known.ranges} == left
    assert known.nbytes == 4 * len(left)


@pytest.mark.parametrize("other", ["s3://b/mode", "s3://b/m", "s3://b/mo/"])
def test_file_with_the_same_name_prefix_is_not_forgotten(other: str) -> None:
    """While ``b/model.pt.new`` is written, ``b/model.pt`` may be its source, whose state must stay known."""
    known = Cache()
    known.stats[other] = None
    known.forget("s3://b/model")
    assert other in known.stats


def test_least_recently_used_ranges_are_dropped() -> None:
    known = Cache()
    for number in range(9):
        known.keep(f"m://{number}", {0: bytes(100)})
        known.held("m://1", 0, 1)
    assert [url for url, _ in known.ranges] == [f"m://{number}" for number in (3, 4, 5, 6, 7, 8, 1)]
