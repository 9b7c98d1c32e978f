"""Bytes behind URLs: whatever was fetched before, and however little is kept, they are those of the file."""

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
def _small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A file of many blocks, of which few are kept, and nothing of what other tests read."""
    nothing = Cache()
    monkeypatch.setattr(remote, "cache", nothing)
    monkeypatch.setattr(remote, "cache", nothing)
    for own, value in (("BLOCK", 64), ("PART", 300), ("_LARGE", 512), ("_SMALL_GAP", 20), ("_MAX_RUN", 4)):
        monkeypatch.setattr(remote, own, value)
    monkeypatch.setattr(remote, "_MAX_CACHED", 700)
    fsspec.filesystem("memory").pipe_file("/reads/data", DATA)
    yield
    remote.forget(URL)


@settings(max_examples=120)
@given(steps=st.lists(STEPS, max_size=8))
def test_any_reads_in_any_order_give_the_bytes_of_the_file(steps: list[tuple[str, Any]]) -> None:
    remote.forget(URL)
    file, stream, at = open_file(URL), Stream(URL), 0
    assert file.size == len(DATA)
    for step, asked in steps:
        if step == "read_at":
            assert file.read_at(*asked) == DATA[asked[0] : sum(asked)]
        elif step == "prefetch":
            file.prefetch(asked)
            for offset, count in asked:
                assert file.read_at(offset, count) == DATA[offset : offset + count]
        elif step == "stream":
            offset, count, until = asked
            found = bytes(stream.read_at(offset, count, max(until, offset + count)))
            assert found == DATA[offset : offset + len(found)]
            assert found or offset >= len(DATA)
        elif step == "seek":
            at = file.seek(asked)
        else:
            found = file.read(asked)
            assert found == (DATA[at:] if asked < 0 else DATA[at : at + asked])
            at += len(found)
        assert sum(map(len, remote.cache.ranges.values())) == remote.cache.nbytes <= 700


def test_what_is_read_in_order_is_asked_for_in_longer_and_longer_runs() -> None:
    """Blocks of 64 bytes, one, two, four and then four at a time; a place elsewhere begins with one again."""
    file, before = open_file(URL), remote.cache.requests[URL]
    for at in range(64 * 11):
        assert file.read_at(at, 1) == DATA[at : at + 1]
    assert remote.cache.requests[URL] - before == 4
    fetched = remote.cache.fetched[URL]
    file.read_at(2_000, 1)
    assert remote.cache.fetched[URL] - fetched == 64


def test_ranges_that_are_close_are_asked_for_as_one() -> None:
    for gap, requests in ((20, 1), (21, 2), (-5, 1)):
        remote.forget(URL)
        file, before = open_file(URL), remote.cache.requests[URL]
        file.prefetch([(100 + 30 + gap, 30), (100, 30)])
        assert remote.cache.requests[URL] - before == requests
        file.read_at(105, 20), file.read_at(100 + 30 + gap, 30)
        file.prefetch([(100, 30), (110, 10), (5_000, 10)])
        assert remote.cache.requests[URL] - before == requests


def test_a_file_that_ends_before_its_size_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    file = open_file(URL)
    fsspec.filesystem("memory").pipe_file("/reads/data", DATA[:-1])
    monkeypatch.setattr("ckpttool.io.remote._WAITS", ())
    with pytest.raises(CkptError, match="asked for 57 bytes from byte 2,944, got 56"):
        file.read_at(len(DATA) - 3, 3)
    fsspec.filesystem("memory").rm("/reads/data")
    remote.forget(URL)
    with pytest.raises(CkptError, match="no such file"):
        open_file(URL)


def test_only_what_did_not_come_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ranges that were asked for side by side."""
    monkeypatch.setattr("ckpttool.io.remote._WAITS", (0.0,))
    plain, passing = MemoryFileSystem.cat_file, [ConnectionResetError(errno.ECONNRESET, "reset")]

    def flaky(own: Any, path: str, start: int, end: int) -> bytes:
        if start == 1_000 and passing:
            raise passing.pop()
        return plain(own, path, start, end)

    file, before = open_file(URL), remote.cache.requests[URL]
    monkeypatch.setattr(MemoryFileSystem, "cat_file", flaky)
    file.prefetch([(0, 30), (1_000, 30), (2_000, 30)])
    assert remote.cache.requests[URL] - before == 4
    assert file.read_at(1_000, 30) == DATA[1_000:1_030]


def test_how_files_begin_is_kept_of_those_that_answer() -> None:
    """Of one that is empty, that was never there, or is gone or shorter by now, nothing is: it is asked for later."""
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


def test_what_nobody_knows_any_more_is_not_unchanged() -> None:
    open_file(URL)
    remote.check_unchanged([URL])
    remote.forget(URL)
    with pytest.raises(CkptError, match="was changed while it was read"):
        remote.check_unchanged([URL])


def test_what_is_no_file_is_not_opened() -> None:
    with pytest.raises(CkptError, match="is a folder, not a file"):
        open_file("memory://reads")
    remote.cache.stats["memory://reads/endless"] = Stat(False, None)
    with pytest.raises(CkptError, match="does not say how long it is"):
        open_file("memory://reads/endless")
    assert not files.is_file("memory://reads")
    assert not files.is_file("memory://reads/none")
    assert files.is_file(URL)


def test_an_index_of_what_is_gone_is_not_used_again() -> None:
    open_file(URL)
    opened = files.opened_at([URL, "memory://reads/never asked"])
    assert [*opened] == [URL]
    files.read_on(opened)
    fsspec.filesystem("memory").rm("/reads/data")
    remote.forget(URL)
    with pytest.raises(CkptError, match="no longer the file that was opened"):
        files.read_on(opened)


@pytest.mark.parametrize(
    ("url", "goes"),
    [
        ("s3://b/m", {"s3://b/m", "s3://b/m/a", "s3://b/m/sub/a"}),
        ("s3://b/m/", {"s3://b/m", "s3://b/m/a", "s3://b/m/sub/a"}),
        ("s3://b/m/sub/a", {"s3://b/m", "s3://b/m/sub/a"}),
        ("s3://b/none", set()),
    ],
)
def test_what_is_at_under_and_above_is_forgotten(url: str, goes: set[str]) -> None:
    urls = {"s3://b/m", "s3://b/m/a", "s3://b/m/sub/a", "s3://b/model", "s3://c/m"}
    known = Cache()
    for one in urls:
        known.stats[one] = None
        known.assumed[one], known.runs[one] = [], (1, 2)
        known.keep(one, {0: b"head"})
    known.forget(url)
    left = urls - goes
    assert left == {*known.stats} == {*known.assumed} == {*known.runs} == {*known.starts}
    assert {one for one, _ in known.ranges} == left
    assert known.nbytes == 4 * len(left)


@pytest.mark.parametrize("other", ["s3://b/mode", "s3://b/m", "s3://b/mo/"])
def test_a_file_whose_name_only_begins_alike_is_not_forgotten(other: str) -> None:
    """While ``b/model.pt.new`` is written, ``b/model.pt`` may be its source: what it was has to stay known."""
    known = Cache()
    known.stats[other] = None
    known.forget("s3://b/model")
    assert other in known.stats


def test_ranges_are_kept_while_there_is_room() -> None:
    known = Cache()
    for number in range(9):
        known.keep(f"m://{number}", {0: bytes(100)})
        known.held("m://1", 0, 1)
    assert [url for url, _ in known.ranges] == [f"m://{number}" for number in (3, 4, 5, 6, 7, 8, 1)]
