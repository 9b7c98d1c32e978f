"""Remote reads return the bytes of the file, whatever ranges are held."""

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

from ckpttool import CkptError
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
def _few_ranges(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Upload a file of many blocks, of which only a few are held; at first none."""
    monkeypatch.setattr(remote, "cache", Cache())
    for constant, value in (
        ("BLOCK", 64),
        ("PART", 300),
        ("_LARGE", 512),
        ("_SMALL_GAP", 20),
        ("BATCH", 700),
    ):
        monkeypatch.setattr(remote, constant, value)
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
        assert (
            sum(ranges.nbytes for ranges in remote.cache.ranges.values())
            == remote.cache.nbytes
            <= 700
        )


def test_a_short_read_fetches_a_block_up_to_the_next_range() -> None:
    file = open_file(URL)
    for offset, count, fetched in (
        (1000, 1, 64),
        (1063, 1, 0),
        (990, 4, 10),
        (990, 80, 64),
        (2_950, 9, 51),
    ):
        before = remote.cache.fetched[URL]
        assert file.read_at(offset, count) == DATA[offset : offset + count]
        assert remote.cache.fetched[URL] - before == fetched, offset


def test_at_most_a_batch_is_fetched_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    plain = MemoryFileSystem.cat_ranges

    def counted(fs: Any, paths: Any, starts: Any, ends: Any, **how: Any) -> Any:
        calls.append(sum(ends) - sum(starts))
        return plain(fs, paths, starts, ends, **how)

    monkeypatch.setattr(MemoryFileSystem, "cat_ranges", counted)
    assert open_file(URL).read() == DATA
    assert sum(calls) == len(DATA)
    assert max(calls) <= 700
    assert remote.cache.nbytes == 0  # a file that does not fit is not held


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
    monkeypatch.setattr("ckpttool.io.remote_errors._WAITS", ())
    with pytest.raises(CkptError, match="asked for 3 bytes from byte 2,998, got 2"):
        file.read_at(len(DATA) - 3, 3)
    fsspec.filesystem("memory").rm("/reads/data")
    remote.forget(URL)
    with pytest.raises(CkptError, match="no such file"):
        open_file(URL)


def test_a_batch_is_fetched_again_after_a_passing_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpttool.io.remote_errors._WAITS", (0.0,))
    plain, failures = MemoryFileSystem.cat_file, [ConnectionResetError(errno.ECONNRESET, "reset")]

    def flaky(fs: Any, path: str, start: int, end: int) -> bytes:
        if start == 1_000 and failures:
            raise failures.pop()
        return plain(fs, path, start, end)

    file = open_file(URL)
    monkeypatch.setattr(MemoryFileSystem, "cat_file", flaky)
    file.prefetch([(0, 30), (1_000, 30), (2_000, 30)])
    assert not failures
    assert file.read_at(1_000, 30) == DATA[1_000:1_030]
    assert remote.cache.requests[URL] == 3


def test_look_ahead_holds_starts_of_readable_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that are empty or missing are not fetched. If one was removed or is shorter, each is
    fetched when read.
    """
    fs, names = fsspec.filesystem("memory"), ("good", "empty", "gone", "shorter", "late")
    for name in names:
        fs.pipe_file(f"/reads/heads/{name}", b"" if name == "empty" else DATA)
    urls = {name: f"memory://reads/heads/{name}" for name in names}
    try:
        fs.rm("/reads/heads/late")
        assert remote.names_in("memory://reads/heads") == ["empty", "gone", "good", "shorter"]
        remote.look_ahead({urls[name]: 100 for name in ("good", "empty", "late")})
        assert {*remote.cache.ranges} == {urls["good"]}
        fs.rm("/reads/heads/gone")
        remote.look_ahead({urls[name]: 100 for name in ("shorter", "gone")})
        fs.pipe_file("/reads/heads/shorter", b"short")
        monkeypatch.setattr("ckpttool.io.remote_errors._WAITS", ())
        remote.look_ahead({urls["shorter"]: 100})
        assert {*remote.cache.ranges} == {urls["good"]}
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
    opened = files.known_states([URL, "memory://reads/never asked"])
    assert [*opened] == [URL]
    files.check_reopened(opened)
    fsspec.filesystem("memory").rm("/reads/data")
    remote.forget(URL)
    with pytest.raises(CkptError, match="no longer the file that was opened"):
        files.check_reopened(opened)


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
    for place in urls:
        known.stats[place] = None
        known.assumed[place] = []
        known.hold(place, 0, b"head")
    known.forget(url)
    left = urls - forgotten
    assert left == {*known.stats} == {*known.assumed} == {*known.ranges}
    assert known.nbytes == 4 * len(left)


@pytest.mark.parametrize("other", ["s3://b/mode", "s3://b/m", "s3://b/mo/"])
def test_file_with_the_same_name_prefix_is_not_forgotten(other: str) -> None:
    """While ``b/model.pt.new`` is written, ``b/model.pt`` may be its source, whose state must stay
    known.
    """
    known = Cache()
    known.stats[other] = None
    known.forget("s3://b/model")
    assert other in known.stats


def test_ranges_of_the_oldest_files_are_dropped_if_there_is_no_room() -> None:
    known = Cache()
    for number in range(9):
        known.hold(f"m://{number}", 0, bytes(100))
    assert [*known.ranges] == [f"m://{number}" for number in range(2, 9)]
    assert known.nbytes == 700
