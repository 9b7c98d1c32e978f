"""Comparisons of stored and computed values, and fingerprints that outlive their file."""

from __future__ import annotations

from argparse import Namespace
from collections import defaultdict, deque
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import partial
from itertools import pairwise, permutations, product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ckpttool import Checkpoint, open_checkpoint
from ckpttool.core.checkpoint import (
    ExtraEntry,
    Lazy,
    Payload,
    Section,
    Span,
    Storage,
    TensorEntry,
    in_row_major,
)
from ckpttool.core.dtypes import BY_NAME, itemsize
from ckpttool.evaluate import torch_eval
from ckpttool.evaluate.compare import difference, fingerprint, fingerprints, same_values, verify
from command import Run, main


def lazy(data: bytes, cuts: list[int]) -> Lazy:
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    return Lazy(len(data), lambda: [data[start:end] for start, end in pairwise(edges)])


def test_fingerprints_agree_with_verify(tmp_path: Path) -> None:
    tensors = {
        "a": torch.arange(6.0).reshape(2, 3),
        "b": torch.ones(2),
        "c": torch.arange(6.0).reshape(2, 3).t(),
    }
    torch.save(tensors, tmp_path / "one.pt")
    torch.save({**tensors, "b": torch.zeros(2), "d": torch.ones(1)}, tmp_path / "two.pt")
    one, two = (open_checkpoint(str(tmp_path / f"{name}.pt")) for name in ("one", "two"))
    assert verify(one, fingerprints(one)) == verify(one, one) == []
    assert verify(two, fingerprints(one)) == verify(two, one)
    assert verify(one, fingerprints(two)) == verify(one, two)
    assert {problem.key for problem in verify(two, one)} == {"b", "d"}
    assert {problem.problem for problem in verify(one, two)} == {
        "not in the output",
        "other bytes in the output",
    }


def test_tensors_of_two_files_are_compared_by_kind_and_bytes(tmp_path: Path) -> None:
    content = {
        "w": torch.ones(2),
        "zeros": torch.zeros(2),
        "bits": torch.ones(2).view(torch.int32),
        "row": torch.ones(1, 2),
    }
    torch.save({"w": torch.ones(2)}, tmp_path / "a.pt")
    torch.save(content, tmp_path / "b.pt")
    (tensor,) = open_checkpoint(str(tmp_path / "a.pt")).sections[0].tensors
    others = open_checkpoint(str(tmp_path / "b.pt")).sections[0].tensors
    assert [other.key for other in others if same_values(tensor, other)] == ["w"]
    assert [other.key for other in others if same_values(other, tensor)] == ["w"]
    assert all(same_values(other, other) for other in others)


@dataclass(frozen=True)
class Content(Payload):
    """A payload with known or unknown content."""

    data: bytes | None

    def content(self) -> bytes | None:
        return self.data


@dataclass(frozen=True)
class Meaning(Payload):
    """A payload that gives the bytes a meaning."""

    meaning: str


def entries(folder: Path) -> dict[str, list[TensorEntry | ExtraEntry]]:
    """Return groups of entries with the same content: in files, in memory, as views, or as
    objects.
    """
    numbers = torch.tensor([[1.0, -2.0, 0.0], [4.0, 5.0, 6.0]])

    def strided(tensor: torch.Tensor, payload: object = None) -> TensorEntry:
        whole = bytes(
            torch_eval.to_bytes(torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage()))
        )
        shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        storage = Storage(Lazy(len(whole), lambda: [whole[:5], whole[5:]]))
        return TensorEntry(
            "w",
            dtype,
            shape,
            tensor.stride(),
            int(tensor.storage_offset()),
            storage,
            payload=payload,
        )

    def in_file(tensor: torch.Tensor, name: str) -> TensorEntry:
        path = folder / name
        path.write_bytes(b"before" + bytes(torch_eval.to_bytes(tensor)) + b"after")
        return replace(
            strided(tensor),
            storage=Storage(Span(str(path), 6, tensor.numel() * tensor.element_size())),
        )

    def packed(layout: str, payload: object, nbytes: int = 8) -> TensorEntry:
        return TensorEntry("w", "float32", (2, 3), (3, 1), 0, None, layout, nbytes, payload)

    wide = torch.zeros(5, 7)
    wide[1:3, 2:5] = numbers
    return {
        "numbers": [
            *(
                strided(numbers),
                in_file(numbers, "a"),
                in_file(numbers, "b"),
                strided(wide[1:3, 2:5]),
            ),
            *(
                strided(numbers.t().contiguous().t()),
                strided(torch.cat([torch.zeros(1, 3), numbers])[1:]),
            ),
        ],
        "another number": [
            strided(numbers + torch.eye(2, 3)),
            in_file(numbers + torch.eye(2, 3), "c"),
        ],
        "another zero": [strided(torch.where(numbers == 0, -0.0, numbers))],
        "the same bytes": [strided(numbers.view(torch.int32))],
        "another shape": [strided(numbers.reshape(3, 2)), in_file(numbers.reshape(3, 2), "d")],
        "in one row": [strided(numbers.reshape(1, 2, 3))],
        "with a meaning": [
            strided(numbers, Meaning("metres")),
            strided(numbers.clone(), Meaning("metres")),
        ],
        "with another meaning": [strided(numbers, Meaning("feet"))],
        "empty": [strided(torch.empty(0, 3)), in_file(torch.empty(0, 3), "e")],
        "complex": [
            strided(torch.complex(numbers, numbers)),
            in_file(torch.complex(numbers, numbers), "f"),
        ],
        "another complex": [strided(torch.complex(numbers, numbers + 1))],
        "without values": [packed("meta", None), packed("meta", None)],
        "sparse": [packed("sparse_coo", Content(b"a")), packed("sparse_coo", Content(b"a"))],
        "another sparse layout": [packed("sparse_csr", Content(b"a"))],
        "another sparse tensor": [packed("sparse_coo", Content(b"b"))],
        "unknown": [packed("subclass", None, 0), packed("subclass", Content(None), 0)],
        "an object": [ExtraEntry("w", Content(b"a")), ExtraEntry("w", Content(b"a"))],
        "another object": [ExtraEntry("w", Content(b"b"))],
        "a number": [ExtraEntry("w", value=3), ExtraEntry("w", value=3)],
        "a float": [ExtraEntry("w", value=3.0)],
        "a list": [
            ExtraEntry("w", value=[1, {"a": None}]),
            ExtraEntry("w", value=[1, {"a": None}]),
        ],
    }


def test_entries_with_equal_content_are_the_same(tmp_path: Path) -> None:
    """The comparison is symmetric, and fingerprints agree with it."""
    every = [(kind, one) for kind, group in entries(tmp_path).items() for one in group]
    for (kind, one), (other_kind, other) in product(every, every):
        alike = kind == other_kind
        assert same_values(one, other) == alike, (kind, other_kind)
        assert (fingerprint(one) == fingerprint(other)) == alike, (kind, other_kind)
        if isinstance(one, TensorEntry) and isinstance(other, TensorEntry):
            comparable = (one.shape, one.dtype) == (other.shape, other.dtype)
            found = difference(one, other, 0.0, 0.0) if comparable else None
            assert not comparable or (found is None) == alike


@pytest.mark.parametrize("dtype", [name for name in BY_NAME if not name.startswith("q")])
@pytest.mark.parametrize("tolerance", [0.0, 1e-9])
def test_differing_elements_are_counted_for_every_dtype(dtype: str, tolerance: float) -> None:
    """Also for bits and half bytes, which torch cannot convert to numbers."""
    size = itemsize(dtype)
    left, right = (
        bytes(5 * size),
        bytes(2 * size) + bytes([1] * size) + bytes(size) + bytes([1] * size),
    )
    one, other = (
        in_row_major("w", dtype, (5,), Storage(lazy(data, [1, 3]))) for data in (left, right)
    )
    if hasattr(torch, dtype):
        found = difference(one, other, tolerance, 0.0)
        assert found is not None
        assert found.text.startswith("2 of 5 elements differ")
    assert difference(one, one, tolerance, 0.0) is None


def test_unknown_content_is_never_the_same() -> None:
    tensor = TensorEntry("w", "float32", (2,), (1,), 0, None, "sparse_coo", 8)
    unknown: list[TensorEntry | ExtraEntry] = [
        tensor,
        replace(tensor, payload=Content(None)),
        ExtraEntry("w"),
        ExtraEntry("w", Content(None)),
    ]
    # nothing proves that unknown content was written, even to a replaced file
    for one in unknown[:4]:
        section = Section(
            "", "state_dict", *(((one,), ()) if isinstance(one, TensorEntry) else ((), (one,)))
        )
        checkpoint = Checkpoint("a.pt", "torch_zip", 8, (section,))
        assert [problem.key for problem in verify(checkpoint, fingerprints(checkpoint))] == ["w"]
    for one, other in product(unknown, map(copy, unknown)):
        assert same_values(one, other) == (one.payload is not None and one.payload is other.payload)
    empty, dense = (
        replace(tensor, packed_bytes=0),
        replace(tensor, storage=Storage(Lazy(8, lambda: [bytes(8)]))),
    )
    assert not any(same_values(*pair) for pair in permutations([tensor, empty, dense], 2))


@pytest.mark.parametrize("name", ["w.pt", "w.safetensors", "w.dcp", "shards"])
def test_an_edit_in_place_is_verified(tmp_path: Path, name: str) -> None:
    """Bytes of the source are overwritten when the output is read back."""
    save_file({"long.x": torch.arange(6.0), "long.y": torch.ones(4)}, tmp_path / "in.safetensors")
    out = f"{tmp_path}/{name}" + ("/" if name == "shards" else "")
    command = (
        ["convert", "--max-shard-size", "30"]
        if name == "shards"
        else ["remap", "--rule", "long.x => long.z"]
    )
    assert main([command[0], str(tmp_path / "in.safetensors"), "-o", out, *command[1:]]) == 0
    assert (
        main(["remap", out.rstrip("/"), "--in-place", "--rule", "long.{k} => {k}", "--verify"]) == 0
    )


KINDS: dict[str, Callable[[float], Any]] = {
    "sparse": lambda x: torch.tensor([[0.0, x], [0.0, 0.0]]).to_sparse(),
    "sparse rows": lambda x: torch.tensor([[0.0, x], [0.0, 0.0]]).to_sparse_csr(),
    "quantized": lambda x: torch.quantize_per_tensor(torch.tensor([x, 0.0]), 0.5, 0, torch.qint8),
    "scale": lambda x: torch.quantize_per_tensor(torch.tensor([0.0]), x, 0, torch.qint8),
    "conjugated": lambda x: torch.tensor([1 + x * 1j]).conj(),
    "number": lambda x: x,
    "set": lambda x: {x},
    "not a number": lambda x: {"x": x, "nan": float("nan")},
    "nested": lambda x: {"a": [torch.tensor([x])]},
    # Objects that differ in one part of their pickle: state, arguments, items, pairs, or function
    "state": lambda x: Namespace(x=x),
    "arguments": lambda x: Decimal(x),
    "items": lambda x: deque([x]),
    "pairs": lambda x: defaultdict(list, a=x),
    "state of an object with arguments": lambda x: partial(max, key=x),
    "function": lambda x: partial(max if x == 1 else min, 1),
}


@pytest.mark.parametrize("kind", KINDS)
def test_diff_values_reports_different_content(kind: str, tmp_path: Path, run: Run) -> None:
    for name, value in (("one", 1.0), ("same", 1.0), ("other", 2.0)):
        torch.save({"weight": torch.ones(2), "odd": KINDS[kind](value)}, tmp_path / f"{name}.pt")
    same, other = (
        run("diff", tmp_path / "one.pt", tmp_path / f"{n}.pt", "--values")
        for n in ("same", "other")
    )
    assert (same.status, other.status) == (0, 1)
    assert "odd" in other.out
    assert run("diff", tmp_path / "one.pt", tmp_path / "other.pt").status == 0  # without --values
