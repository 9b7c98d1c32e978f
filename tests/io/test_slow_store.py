"""Behind a store, time is rounds of requests: shards are asked side by side."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch
from safetensors.torch import save

import ckpttool
from counting_store import CountingStore, counted
from surroundings import forget

SHARDS = 40


@pytest.fixture
def folders() -> Iterator[tuple[str, str]]:
    """Return the URLs of two folders of many shards with the same keys."""
    for folder in ("a", "b"):
        weight_map: dict[str, str] = {}
        for shard in range(SHARDS):
            name = f"model-{shard + 1:05}-of-{SHARDS:05}.safetensors"
            tensors = {f"layers.{shard}.{part}.weight": torch.zeros(2) for part in "qkv"}
            CountingStore.files[f"{folder}/{name}"] = save(tensors)
            weight_map |= dict.fromkeys(tensors, name)
        index = {"metadata": {"total_size": SHARDS * 24}, "weight_map": weight_map}
        CountingStore.files[f"{folder}/model.safetensors.index.json"] = json.dumps(index).encode()
    counted()
    urls = "counting://a/", "counting://b/"
    for url in urls:
        forget(url)
    yield urls
    CountingStore.files.clear()


def test_inspect_asks_for_all_shards_at_once(folders: tuple[str, str]) -> None:
    checkpoint = ckpttool.open_checkpoint(folders[0])
    assert len(checkpoint.section("").tensors) == 3 * SHARDS
    requests, rounds = counted()
    assert rounds <= 5
    assert requests <= SHARDS + 5


def test_diff_asks_for_all_shards_at_once(folders: tuple[str, str]) -> None:
    assert ckpttool.diff(*folders).identical
    requests, rounds = counted()
    assert rounds <= 10
    assert requests <= 2 * SHARDS + 10
