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

from ckpttool import CkptError
from ckpttool.core.checkpoint import Lazy, Span
from ckpttool.io.checksums import fastest_crc32 as fastest
from ckpttool.io.fill import BLOCK
from ckpttool.io.pieces import CHUNK, Piece, digest_on_disk, read_all, read_spans, same_data, stream
from ckpttool.io.remote import cache, forget
from ckpttool.io.write import WriteOptions
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
    path: Path,
    start: int,
    size: int,
    at: int,
    more: list[int],
    left_sizes: list[int],
    right_sizes: list[int],
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
        wanted = hashlib.blake2b(
            data[start:] if length is None else data[start : start + length]
        ).digest()
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


def test_adjacent_pieces_of_a_remote_file_are_fetched_together() -> None:
    url, size, data = "memory://pieces/data", 1 << 16, os.urandom(20 << 16)
    fsspec.filesystem("memory").pipe_file("/pieces/data", data)
    forget(url)
    pieces = [Piece(Span(url, at, size)) for at in range(0, len(data), size)]
    assert b"".join(bytes(chunk) for chunk in stream(pieces)) == data
    assert cache.requests[url] == 1
