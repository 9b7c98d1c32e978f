"""Planning of shards, with huggingface_hub as the reference."""

from __future__ import annotations

import pytest
from huggingface_hub.serialization._base import split_state_dict_into_shards_factory
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.core.errors import CkptError
from ckpttool.formats.huggingface import Item, parse_size, plan_shards, shard_names


def items(*sizes: int) -> list[Item]:
    return [Item(f"t{index}", size, index) for index, size in enumerate(sizes)]


def test_shards_are_filled_in_order() -> None:
    assert plan_shards(items(6, 6, 2, 6, 2, 2), 10) == [["t0"], ["t1", "t2"], ["t3", "t4", "t5"]]
    assert plan_shards(items(5, 5, 1), 10) == [["t0", "t1"], ["t2"]]
    assert plan_shards(items(3, 20, 4), 10) == [["t1"], ["t0", "t2"]]
    assert plan_shards(items(0, 0), 1) == [["t0", "t1"]]
    assert plan_shards([], 1) == [[]]


def test_tied_tensors_stay_together_and_count_once() -> None:
    tied = [Item("a", 6, "A"), Item("b", 6, "B"), Item("a2", 6, "A"), Item("c", 4, "C")]
    assert plan_shards(tied, 10) == [["a", "a2"], ["b", "c"]]


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(0, 30)), max_size=12), st.integers(1, 40))
def test_the_plan_matches_huggingface_hub(drawn: list[tuple[int, int]], limit: int) -> None:
    first: dict[int, int] = {}
    tensors = {f"t{i}": (first.setdefault(group, size), group) for i, (size, group) in enumerate(drawn)}
    reference = split_state_dict_into_shards_factory(
        tensors,
        get_storage_size=lambda tensor: tensor[0],
        get_storage_id=lambda tensor: tensor[1],
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=limit,
    )
    planned = plan_shards([Item(key, size, group) for key, (size, group) in tensors.items()], limit)
    expected = [sorted(keys) for keys in reference.filename_to_tensors.values() if keys]
    assert [sorted(keys) for keys in planned if keys] == expected
    if len(expected) > 1 and len(expected) == len(planned):
        assert shard_names("model", ".safetensors", len(planned)) == list(reference.filename_to_tensors)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("5GB", 5 * 10**9), ("512MiB", 2**29), ("1.5kb", 1500), ("1000", 1000), ("7 B", 7), ("2g", None), ("2tib", 2**41)],
)
def test_sizes_are_parsed_or_refused(text: str, nbytes: int | None) -> None:
    if nbytes is not None:
        assert parse_size(text) == nbytes
    else:
        with pytest.raises(CkptError, match="not a size"):
            parse_size(text)


@pytest.mark.parametrize("text", ["", "0", "0GB", "-1", "GB", "1e9", "5 apples", "9" * 400 + "TB"])
def test_invalid_sizes_are_refused(text: str) -> None:
    with pytest.raises(CkptError, match="not a size"):
        parse_size(text)
