"""The parts of an upload, by their lengths: what a store takes, of objects of any size."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ckpttool.core.checkpoint import Span
from ckpttool.io.compose import _COPIED, _SENT, LEAST, MOST_PARTS, copied, lengths

MIB, TIB = 1 << 20, 1 << 40
SIZES = st.integers(LEAST, 40 * MIB) | st.integers(LEAST, 5 * TIB) | st.sampled_from([LEAST, _SENT, _SENT + LEAST])


@given(nbytes=SIZES, others=st.just(0) | SIZES, ends=st.booleans())
def test_what_is_sent_is_sent_in_parts_that_a_store_takes(nbytes: int, others: int, ends: bool) -> None:
    """Of equal length but for the last; that one is long enough, unless the object ends with it."""
    found = lengths(nbytes, nbytes + others, ends=ends)
    *whole, last = found
    assert sum(found) == nbytes
    assert len({*whole}) <= 1
    assert len(found) <= MOST_PARTS
    size = max(_SENT, -(-(nbytes + others) // MOST_PARTS))
    assert {*whole} <= {size}
    assert 0 < last <= size if ends else LEAST <= last < size + LEAST


@given(offset=st.integers(0, TIB), length=st.integers(1, 5 * TIB) | st.sampled_from([_COPIED, _COPIED + 1]))
def test_what_is_copied_is_copied_in_parts_of_one_size(offset: int, length: int) -> None:
    parts = list(copied(Span("s3://b/a", offset, length)))
    sizes = {part.length for part in parts}
    assert [part.offset for part in parts] == [
        offset + sum(part.length for part in parts[:number]) for number in range(min(len(parts), 50))
    ] + [part.offset for part in parts[50:]]
    assert sum(part.length for part in parts) == length
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) <= _COPIED
    assert len(parts) == -(-length // _COPIED)
