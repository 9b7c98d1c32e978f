"""In which order files list the keys of their models, which is all that says whose an id is where nothing names it."""

from __future__ import annotations

from itertools import permutations

import pytest

from ckpttool.core.checkpoint import Section, Span, Storage, TensorEntry
from ckpttool.optimizers.identify import same_key_order


def listing(keys: str) -> Section:
    storage = Storage(Span("model.pt", 0, 8))
    return Section("", "state_dict", tuple(TensorEntry(key, "float32", (2,), (1,), 0, storage) for key in keys))


@pytest.mark.parametrize("right", ["".join(order) for order in permutations("abc")])
def test_the_keys_that_both_have_stand_in_one_order_or_not(right: str) -> None:
    mine, theirs = [listing("abx")], [listing(right)]
    in_order = right.index("a") < right.index("b")
    assert same_key_order(mine, theirs) is in_order
    assert same_key_order(mine, [listing("ab"), *theirs]) is in_order  # one of several that differs is enough
    assert same_key_order(mine, [*theirs, listing("ab")]) is in_order


def test_one_key_in_common_says_nothing() -> None:
    for right in ([], [listing("")], [listing("ca")]):
        assert same_key_order([listing("ab")], right) is None
