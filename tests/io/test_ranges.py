"""Bytes that are read: in whatever chunks they come, the answer is that of the bytes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpttool.core.checkpoint import Lazy, Span
from ckpttool.core.errors import CkptError
from ckpttool.io.pieces import CHUNK, Piece, digest_on_disk, read_all, read_spans, same_data
from ckpttool.io.write import BLOCK, WriteOptions
from ckpttool.io.write import write_file as write

CUTS = st.lists(st.integers(0, 12), max_size=5)


def cut(data: bytes | bytearray, sizes: Sequence[int]) -> Lazy:
    """The bytes, computed in chunks of these sizes, and the rest of them."""
    ends = [min(len(data), sum(sizes[:number])) for number in range(len(sizes) + 1)]
    chunks = [data[start:end] for start, end in zip(ends, [*ends[1:], len(data)])]
    return Lazy(len(data), lambda: [memoryview(chunk) for chunk in chunks])


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ranges") / "file"
    path.write_bytes(bytes(range(100)))
    return path


@settings(max_examples=150)
@given(start=st.integers(0, 40), size=st.integers(0, 30), at=st.integers(-1, 29), more=CUTS, ours=CUTS, theirs=CUTS)
def test_the_same_bytes_are_the_same_however_they_are_computed(
    path: Path, start: int, size: int, at: int, more: list[int], ours: list[int], theirs: list[int]
) -> None:
    there = path.read_bytes()[start : start + size]
    data = bytearray(there + bytes(more[:1]))
    if 0 <= at < len(data):
        data[at] ^= 1
    for right in (cut(there, theirs), Span(str(path), start, size)):
        assert same_data(cut(data, ours), right) == (data == there)
        assert same_data(right, cut(data, ours)) == (data == there)
        assert read_all(right) == there
    assert same_data(Span(str(path), start, size), Span(str(path), start, size))


def test_computed_bytes_are_as_many_as_were_planned() -> None:
    for length in (2, 4):
        with pytest.raises(CkptError, match=f"computed 3 bytes, not {length}"):
            read_all(Lazy(length, lambda: [b"a", b"", b"bc"]))


def test_parts_of_computed_bytes_may_lie_in_files(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"0123456789")
    (tmp_path / "b").write_bytes(b"abc")
    first, second = Span(str(tmp_path / "a"), 2, 5), Span(str(tmp_path / "b"), 1, 2)
    assert read_spans([first, second, first]) == b"23456bc23456"
    lazy = Lazy(10, lambda: [first, b"+", second, Lazy(2, lambda: [b"x", b"y"])])
    assert read_all(lazy) == b"23456+bcxy"


@pytest.mark.parametrize("size", [0, 1, CHUNK, 2 * CHUNK + 7])
def test_a_digest_is_that_of_the_range_that_the_disk_holds(tmp_path: Path, size: int) -> None:
    data = os.urandom(size)
    (tmp_path / "a").write_bytes(data)
    for start, length in ((0, None), (0, size), (1, None), (size // 3, size // 2), (0, 0)):
        wanted = hashlib.blake2b(data[start:] if length is None else data[start : start + length]).digest()
        assert digest_on_disk(str(tmp_path / "a"), start, length) == wanted


EDGES = st.sampled_from([0, 1, 5, BLOCK - 5, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 3])


@settings(max_examples=60)
@given(sizes=st.lists(EDGES, max_size=6))
def test_what_is_written_in_blocks_is_what_came(path: Path, sizes: list[int]) -> None:
    """Chunks that end just before, at and just behind the end of a block."""
    out = path.with_name("out")
    chunks = [bytes([number + 1]) * size for number, size in enumerate(sizes)]
    digest = hashlib.blake2b()
    pieces = [Piece(Lazy(sum(sizes), lambda: chunks))]
    write(pieces, str(out), WriteOptions(fsync=False, digests={str(out): digest}))
    assert out.read_bytes() == b"".join(chunks)
    assert digest.digest() == hashlib.blake2b(b"".join(chunks)).digest()
