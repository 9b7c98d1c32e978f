"""Tensors that share bytes, checked against a comparison of every pair."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ckpttool.core.checkpoint import Span, Storage, TensorEntry
from ckpttool.formats.safetensors import overlapping

STORAGES = (Storage(Span("x", 0, 400)), Storage(Span("x", 0, 400)))


def entry(key: str, shape: tuple[int, ...], stride: tuple[int, ...], offset: int, storage: int = 0) -> TensorEntry:
    return TensorEntry(key, "float32", shape, stride, offset, STORAGES[storage])


def test_adjacent_tensors_and_other_storages_do_not_overlap():
    assert overlapping([entry("a", (4,), (1,), 0), entry("b", (4,), (1,), 4), entry("c", (4,), (1,), 0, 1)]) == {}
    assert overlapping([entry("empty", (0,), (1,), 2), entry("a", (8,), (1,), 0), entry("0-dim", (), (), 8)]) == {}
    assert overlapping([TensorEntry("coo", "float32", (2,), (), 0, None, "sparse_coo", 8)] * 2) == {}


def test_the_later_key_is_reported_with_the_earlier_one():
    assert overlapping([entry("tail", (4,), (1,), 6), entry("a", (8,), (1,), 0)]) == {"a": "tail"}
    assert overlapping([entry("column", (4,), (4,), 0), entry("row", (4,), (1,), 12)]) == {"row": "column"}
    wide = [entry("all", (99,), (1,), 0), entry("a", (2,), (1,), 0), entry("b", (2,), (1,), 50)]
    assert overlapping(wide) == {"a": "all", "b": "all"}


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 6), st.integers(0, 1)), max_size=7))
def test_overlaps_match_a_comparison_of_every_pair(ranges):
    tensors = [entry(str(n), (size,), (1,), offset, storage) for n, (offset, size, storage) in enumerate(ranges)]
    pairs = {
        (str(j), str(i))
        for j, (b, n, s) in enumerate(ranges)
        for i, (c, m, t) in enumerate(ranges[:j])
        if s == t and n and m and b < c + m and c < b + n
    }
    found = set(overlapping(tensors).items())
    assert found <= pairs
    assert bool(found) == bool(pairs)
