"""Values compared where they lie or as they are computed, and proofs that outlive the file they were made of."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from ckpttool.checkpoint import Lazy, Span
from ckpttool.cli.app import main
from ckpttool.evaluate.compare import fingerprints, same_values, verify
from ckpttool.formats.open import open_checkpoint
from ckpttool.io.ranges import same_data


def lazy(data: bytes, cuts: list[int]) -> Lazy:
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    return Lazy(len(data), lambda: [data[start:end] for start, end in pairwise(edges)])


@given(st.binary(max_size=20), st.lists(st.integers(0, 20)), st.lists(st.integers(0, 20)), st.integers(0, 20))
def test_the_same_bytes_however_they_come(data: bytes, first: list[int], second: list[int], at: int) -> None:
    assert same_data(lazy(data, first), lazy(data, second))
    if data:
        other = bytearray(data)
        other[at % len(data)] ^= 1
        assert not same_data(lazy(data, first), lazy(bytes(other), second))
        assert not same_data(lazy(data, first), lazy(data[:-1], second))


def test_a_span_and_what_is_computed(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"0123456789")
    span = Span(str(tmp_path / "f"), 2, 5)
    assert same_data(span, lazy(b"23456", [1]))
    assert not same_data(lazy(b"23457", [1]), span)
    assert same_data(span, Span(str(tmp_path / "f"), 2, 5))


def test_fingerprints_say_what_verify_says(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2), "c": torch.arange(6.0).reshape(2, 3).t()}
    torch.save(tensors, tmp_path / "one.pt")
    torch.save({**tensors, "b": torch.zeros(2), "d": torch.ones(1)}, tmp_path / "two.pt")
    one, two = (open_checkpoint(str(tmp_path / f"{name}.pt")) for name in ("one", "two"))
    assert verify(one, fingerprints(one)) == verify(one, one) == []
    assert verify(two, fingerprints(one)) == verify(two, one)
    assert {problem.key for problem in verify(two, one)} == {"b", "d"}
    assert {problem.problem for problem in verify(one, two)} == {"not in the output", "other bytes in the output"}


def test_tensors_of_two_files_are_compared_by_kind_and_bytes(tmp_path: Path) -> None:
    made = {
        "w": torch.ones(2),
        "zeros": torch.zeros(2),
        "bits": torch.ones(2).view(torch.int32),
        "row": torch.ones(1, 2),
    }
    torch.save({"w": torch.ones(2)}, tmp_path / "a.pt")
    torch.save(made, tmp_path / "b.pt")
    (mine,) = open_checkpoint(str(tmp_path / "a.pt")).sections[0].tensors
    others = open_checkpoint(str(tmp_path / "b.pt")).sections[0].tensors
    assert [other.key for other in others if same_values(mine, other)] == ["w"]
    assert [other.key for other in others if same_values(other, mine)] == ["w"]
    assert all(same_values(other, other) for other in others)


def test_a_tensor_is_no_object(tmp_path: Path) -> None:
    """Nor the digest of one another tensor: what manifests know."""
    torch.save({"w": torch.ones(2), "n": 3}, tmp_path / "a.pt")
    torch.save({"w": torch.zeros(2), "n": 4}, tmp_path / "b.pt")
    assert main(["inspect", str(tmp_path / "a.pt"), "--manifest", str(tmp_path / "a.json")]) == 0
    one, other, known = (open_checkpoint(str(tmp_path / name)).sections[0] for name in ("a.pt", "b.pt", "a.json"))
    (tensor,), (number,) = one.tensors, one.extras
    assert same_values(tensor, tensor)
    assert same_values(number, number)
    assert not same_values(tensor, number)
    assert not same_values(number, tensor)
    for mine, digest in ((tensor, known.tensors[0]), (number, known.extras[0])):
        assert same_values(mine, digest)
        assert same_values(digest, mine)
    for mine, digest in ((other.tensors[0], known.tensors[0]), (other.extras[0], known.extras[0])):
        assert not same_values(mine, digest)
        assert not same_values(digest, mine)


@pytest.mark.parametrize("name", ["w.pt", "w.safetensors", "w.dcp", "shards"])
def test_a_file_that_is_replaced_can_be_proved(tmp_path: Path, name: str) -> None:
    """Every byte of the source has moved, or is gone, when the output is read back."""
    save_file({"x": torch.arange(6.0), "y": torch.ones(4)}, tmp_path / "in.safetensors")
    out = f"{tmp_path}/{name}" + ("/" if name == "shards" else "")
    assert main(["remap", str(tmp_path / "in.safetensors"), "-o", out, "--max-shard-size", "30"]) == 0
    rule = "{k} => " + "a_long_name." * 20 + "{k}"
    assert main(["remap", out.rstrip("/"), "--in-place", "--rule", rule, "--verify"]) == 0
