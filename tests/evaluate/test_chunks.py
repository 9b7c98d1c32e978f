"""Storages assembled from pieces of other storages hold the same elements as in torch."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ckpttool.core.checkpoint import Lazy, Part, Span, Storage, TensorEntry, in_row_major
from ckpttool.evaluate import chunks
from ckpttool.evaluate.chunks import across, concatenated, in_own_storage, window
from ckpttool.io.pieces import read_all


def entry(chance: random.Random, file: Path, tensor: torch.Tensor) -> TensorEntry:
    """Return an entry whose storage is part of a file, or computed in chunks of which one is in the
    file.
    """
    data = tensor.untyped_storage().tolist()
    begin = file.stat().st_size if file.exists() else 0
    with file.open("ab") as out:
        out.write(bytes([7, 7, 7, *data]))
    span = Span(str(file), begin + 3, len(data))
    cut = chance.randrange(len(data) + 1)
    chunks: list[Part] = [Span(str(file), span.offset, cut), bytes(data[cut:])]
    storage = Storage(span if chance.random() < 0.5 else Lazy(len(data), lambda: chunks))
    return TensorEntry(
        "w", "int16", tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), storage
    )


def numbers_in(storage: Storage) -> list[int]:
    return (
        torch.frombuffer(read_all(storage.data), dtype=torch.int16).tolist()
        if storage.nbytes
        else []
    )


def test_concatenated_pieces_match_torch(tmp_path: Path) -> None:
    for seed in range(60):
        chance = random.Random(seed)
        tensors = [
            torch.randint(-9, 9, (12,), dtype=torch.int16)[chance.randrange(4) :][
                : chance.choice([0, 1, 4, 8])
            ]
            for _ in range(chance.randint(1, 4))
        ]
        entries = [entry(chance, tmp_path / str(seed), tensor) for tensor in tensors]
        flat = torch.cat(tensors)
        start = chance.randrange(len(flat) + 1)
        count = chance.randrange(len(flat) + 1 - start)
        parts = across(entries, start, count)
        assert numbers_in(concatenated(parts)) == flat[start : start + count].tolist(), seed
        assert len(parts) <= len(entries)


def test_own_storage_holds_only_the_tensor(tmp_path: Path) -> None:
    for seed in range(60):
        chance = random.Random(seed)
        whole = torch.randint(-9, 9, (24,), dtype=torch.int16)[chance.randrange(5) :]
        strides = chance.choice([(3, 1), (1, 2), (4, 2), (0, 1), (6, 1)])
        tensor = whole.as_strided((2, 3), strides, whole.storage_offset() + chance.randrange(4))
        own = in_own_storage(entry(chance, tmp_path / str(seed), tensor))
        assert own.storage is not None
        assert (own.offset, own.stride, own.shape, own.storage.nbytes) == (0, (3, 1), (2, 3), 12)
        assert numbers_in(own.storage) == tensor.flatten().tolist(), seed


def test_an_entry_without_storage_is_unchanged() -> None:
    sparse = TensorEntry("w", "int16", (2,), (1,), 0, None, "sparse_coo", payload=7)
    assert in_own_storage(sparse) is sparse


def test_windows_share_one_computation() -> None:
    """Each rank's part of a computed tensor used to compute the complete tensor again."""
    data, computed = bytes(range(240)), 0

    def compute() -> Iterator[bytes]:
        nonlocal computed
        computed += 1
        yield data[:100]
        yield data[100:]

    tensor = in_row_major("w", "int16", (12, 10), Storage(Lazy(len(data), compute)))
    for ranks in (2, 5, 12):
        computed = 0
        cuts = [
            concatenated([window(tensor, 120 * at // ranks, 120 // ranks)]) for at in range(ranks)
        ]
        assert b"".join(bytes(read_all(cut.data)) for cut in cuts) == data
        assert computed == 1
    del cuts
    gc.collect()
    assert not chunks._kept


def test_memory_kept_for_windows_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "_KEPT", 250)
    computed: list[str] = []

    def compute(name: str) -> Iterator[bytes]:
        computed.append(name)
        yield bytes(200)

    def tensor(name: str) -> TensorEntry:
        return in_row_major(name, "uint8", (200,), Storage(Lazy(200, lambda: compute(name))))

    both = [tensor("a"), tensor("b")]
    for at in range(4):
        for one in both:
            read_all(concatenated([window(one, 50 * at, 50)]).data)
            assert sum(lazy.length for lazy in chunks._kept) <= 250
    assert computed.count("a") == 1
    assert computed.count("b") == 4
