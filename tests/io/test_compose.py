"""Lengths of the parts of an upload: within the limits of S3 for objects of any size."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ckpttool.core.checkpoint import Span
from ckpttool.io.compose import _COPIED, _SENT, LEAST, MOST_PARTS, copied, lengths

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
