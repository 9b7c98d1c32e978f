"""Checksums of a store prove the bytes that an object was composed of, and no others."""

from __future__ import annotations

import pytest

from ckpttool.core.checkpoint import Lazy, Span
from ckpttool.io.pieces import Held, Piece

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
