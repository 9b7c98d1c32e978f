"""Pieces: byte ranges, checksums, and the parts of an upload."""

from __future__ import annotations

import hashlib
import os
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path

import fsspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpttool.core.checkpoint import Lazy, Span
from ckpttool.core.errors import CkptError
from ckpttool.io.checksums import fastest_crc32 as fastest
from ckpttool.io.compose import _COPIED, _SENT, LEAST, MOST_PARTS, copied, lengths
from ckpttool.io.pieces import CHUNK, Held, Piece, digest_on_disk, read_all, read_spans, same_data, stream
from ckpttool.io.remote import cache, forget
from ckpttool.io.write import BLOCK, WriteOptions
from ckpttool.io.write import write_file as write

CUTS = st.lists(st.integers(0, 12), max_size=5)


def in_chunks(data: bytes | bytearray, sizes: Sequence[int]) -> Lazy:
    """Return lazy data that yields chunks of these sizes, then the rest."""
    ends = [min(len(data), sum(sizes[:number])) for number in range(len(sizes) + 1)]
    chunks = [data[start:end] for start, end in zip(ends, [*ends[1:], len(data)])]
    return Lazy(len(data), lambda: [memoryview(chunk) for chunk in chunks])


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ranges") / "file"
    path.write_bytes(bytes(range(100)))
    return path


@settings(max_examples=150)
@given(
    start=st.integers(0, 40),
    size=st.integers(0, 30),
    at=st.integers(-1, 29),
    more=CUTS,
    left_sizes=CUTS,
    right_sizes=CUTS,
)
def test_same_data_ignores_chunk_sizes(
    path: Path, start: int, size: int, at: int, more: list[int], left_sizes: list[int], right_sizes: list[int]
) -> None:
    expected = path.read_bytes()[start : start + size]
    data = bytearray(expected + bytes(more[:1]))
    if 0 <= at < len(data):
        data[at] ^= 1
    for right in (in_chunks(expected, right_sizes), Span(str(path), start, size)):
        assert same_data(in_chunks(data, left_sizes), right) == (data == expected)
        assert same_data(right, in_chunks(data, left_sizes)) == (data == expected)
        assert read_all(right) == expected
    assert same_data(Span(str(path), start, size), Span(str(path), start, size))


def test_wrong_number_of_computed_bytes_is_refused() -> None:
    for length in (2, 4):
        with pytest.raises(CkptError, match=f"computed 3 bytes, not {length}"):
            read_all(Lazy(length, lambda: [b"a", b"", b"bc"]))


def test_computed_bytes_may_contain_spans_of_files(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"0123456789")
    (tmp_path / "b").write_bytes(b"abc")
    first, second = Span(str(tmp_path / "a"), 2, 5), Span(str(tmp_path / "b"), 1, 2)
    assert read_spans([first, second, first]) == b"23456bc23456"
    lazy = Lazy(10, lambda: [first, b"+", second, Lazy(2, lambda: [b"x", b"y"])])
    assert read_all(lazy) == b"23456+bcxy"


@pytest.mark.parametrize("size", [0, 1, CHUNK, 2 * CHUNK + 7])
def test_digest_of_a_range_on_disk(tmp_path: Path, size: int) -> None:
    data = os.urandom(size)
    (tmp_path / "a").write_bytes(data)
    for start, length in ((0, None), (0, size), (1, None), (size // 3, size // 2), (0, 0)):
        wanted = hashlib.blake2b(data[start:] if length is None else data[start : start + length]).digest()
        assert digest_on_disk(str(tmp_path / "a"), start, length) == wanted


EDGES = st.sampled_from([0, 1, 5, BLOCK - 5, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 3])


@settings(max_examples=60)
@given(sizes=st.lists(EDGES, max_size=6))
def test_write_in_blocks_keeps_the_bytes(path: Path, sizes: list[int]) -> None:
    """Chunks end just before, at and just after the end of a block."""
    out = path.with_name("out")
    chunks = [bytes([number + 1]) * size for number, size in enumerate(sizes)]
    digest = hashlib.blake2b()
    pieces = [Piece(Lazy(sum(sizes), lambda: chunks))]
    write(pieces, str(out), WriteOptions(fsync=False, digests={str(out): digest}))
    assert out.read_bytes() == b"".join(chunks)
    assert digest.digest() == hashlib.blake2b(b"".join(chunks)).digest()


@pytest.fixture(params=["installed", "zlib only"])
def _implementation(request, monkeypatch):
    if request.param == "zlib only":
        monkeypatch.setitem(sys.modules, "isal", None)
    elif "isal" not in fastest().__module__:
        pytest.skip("isal has no wheel for this processor")
    fastest.cache_clear()
    yield
    fastest.cache_clear()


@pytest.mark.usefixtures("_implementation")
def test_checksum_of_chunks_equals_zlib_crc32():
    @given(st.binary(max_size=300), st.integers(1, 100))
    def check(data, size):
        value = 0
        for at in range(0, len(data), size):
            value = fastest()(memoryview(bytearray(data))[at : at + size], value)
        assert value == zlib.crc32(data)

    check()


URL = "s3://bucket/out"
COMPUTED, OTHER = Lazy(10, list), Lazy(10, list)


@pytest.fixture(scope="module")
def held() -> Held:
    """Record an object of 4 literal bytes, 20 bytes of a file, 10 computed bytes and an empty piece."""
    held = Held()
    held.note(URL, [Piece(b"head"), Piece(Span("a", 100, 20)), Piece(COMPUTED), Piece(b"")])
    return held


@pytest.mark.parametrize(
    ("offset", "length", "data", "proved"),
    [
        (4, 20, Span("a", 100, 20), True),
        (9, 5, Span("a", 105, 5), True),
        (23, 1, Span("a", 119, 1), True),
        (9, 5, Span("a", 104, 5), False),
        (9, 5, Span("b", 105, 5), False),
        (9, 16, Span("a", 105, 16), False),  # extends into the next piece
        (24, 10, COMPUTED, True),
        (24, 10, OTHER, False),  # same length, other bytes
        (24, 9, COMPUTED, False),
        (25, 9, COMPUTED, False),
        (0, 4, Span("a", 100, 4), False),
        (34, 1, Span("a", 100, 1), False),  # beyond the end of the written bytes
        (99, 1, Span("a", 100, 1), False),
    ],
)
def test_proves_only_ranges_that_were_written(
    held: Held, offset: int, length: int, data: Span | Lazy, proved: bool
) -> None:
    assert held.proves(Span(URL, offset, length), data) is proved
    assert not held.proves(Span("s3://bucket/another", offset, length), data)
    assert not held.proves(COMPUTED, data)


def test_adjacent_pieces_of_a_remote_file_are_fetched_together() -> None:
    url, size, data = "memory://pieces/data", 1 << 16, os.urandom(20 << 16)
    fsspec.filesystem("memory").pipe_file("/pieces/data", data)
    forget(url)
    pieces = [Piece(Span(url, at, size)) for at in range(0, len(data), size)]
    assert b"".join(bytes(chunk) for chunk in stream(pieces)) == data
    assert cache.requests[url] == 1


MIB, TIB = 1 << 20, 1 << 40
SIZES = st.integers(LEAST, 40 * MIB) | st.integers(LEAST, 5 * TIB) | st.sampled_from([LEAST, _SENT, _SENT + LEAST])


@given(nbytes=SIZES, others=st.just(0) | SIZES, ends=st.booleans())
def test_sent_parts_are_within_the_limits_of_the_store(nbytes: int, others: int, ends: bool) -> None:
    """All but the last have the same length; the last one is long enough unless it ends the object."""
    sizes = lengths(nbytes, nbytes + others, ends=ends)
    *full, last = sizes
    assert sum(sizes) == nbytes
    assert len({*full}) <= 1
    assert len(sizes) <= MOST_PARTS
    size = max(_SENT, -(-(nbytes + others) // MOST_PARTS))
    assert {*full} <= {size}
    assert 0 < last <= size if ends else LEAST <= last < size + LEAST


@given(offset=st.integers(0, TIB), length=st.integers(1, 5 * TIB) | st.sampled_from([_COPIED, _COPIED + 1]))
def test_copied_parts_have_about_the_same_size(offset: int, length: int) -> None:
    parts = list(copied(Span("s3://b/a", offset, length)))
    sizes = {part.length for part in parts}
    assert [part.offset for part in parts] == [
        offset + sum(part.length for part in parts[:number]) for number in range(min(len(parts), 50))
    ] + [part.offset for part in parts[50:]]
    assert sum(part.length for part in parts) == length
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) <= _COPIED
    assert len(parts) == -(-length // _COPIED)
