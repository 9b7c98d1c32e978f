"""Safetensors shards with their own offsets: assembled as torch cut them, or every contradiction is
reported.
"""

from __future__ import annotations

import json
import struct
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from ckpttool import CkptError, open_checkpoint
from command import main
from torch_version import needs_torch

WHOLE = torch.arange(12.0).reshape(4, 3)


def shard(folder: Path, number: int, tensors: dict[str, torch.Tensor], info: Any) -> None:
    """Write the shard of a rank like `HuggingFaceStorageWriter`, with the offsets in `info`."""
    offsets = {key: {"saved_offsets": at} for key, at in info.items()}
    path = folder / f"shard-{number:05}-model-00001-of-00001.safetensors"
    save_file(tensors, path, {"DCP_SHARDING_INFO": json.dumps(offsets)})


def test_shards_of_two_ranks_are_assembled(tmp_path: Path) -> None:
    shard(tmp_path, 1, {"rows": WHOLE[:1].clone(), "b": torch.ones(2)}, {"rows": [0, 0], "b": [0]})
    shard(tmp_path, 2, {"rows": WHOLE[1:].clone()}, {"rows": [1, 0]})
    # another rank has the same part
    shard(tmp_path, 3, {"rows": WHOLE[1:].clone()}, {"rows": [1, 0]})
    assert main(["remap", str(tmp_path), "-o", str(tmp_path / "out.pt"), "--verify"]) == 0
    found = torch.load(tmp_path / "out.pt")
    assert found.keys() == {"rows", "b"}
    assert torch.equal(found["rows"], WHOLE)


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ((1, 2), "2: no"),
        ((1, 2, 4, 7), "7, without 3, 5, 6: no"),
        ((2,), "2, without 1: no"),
    ],
)
def test_a_note_says_that_the_number_of_ranks_is_unknown(
    tmp_path: Path, ranks: tuple[int, ...], text: str
) -> None:
    """A tensor may be in the shard of only one rank, and its last rows in the shard of the last
    rank.
    """
    for rank in ranks:
        shard(tmp_path, rank, {f"w{rank}": torch.ones(2)}, {f"w{rank}": [0]})
    (note,) = open_checkpoint(str(tmp_path)).notes
    assert note == (
        f"assembled from the shards up to rank {text} file says how many ranks there were"
    )


def test_a_note_says_that_one_file_holds_one_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shard(tmp_path, 1, {"rows": WHOLE[:2].clone()}, {"rows": [0, 0]})
    (file,) = tmp_path.iterdir()
    out = tmp_path / "half.pt"
    for command in (["inspect", str(file)], ["convert", str(file), "-o", str(out)]):
        assert main(command) == 0
        assert "holds one rank's chunks of the tensors" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("second", "offsets", "problem"),
    [
        (WHOLE[1:].int(), [1, 0], "chunks of float32 and int32 @ rows"),
        (WHOLE[1:], [2, 0], "its chunks hold 12 elements, it has 15 @ rows"),
        (WHOLE[:2], [0, 0], "its chunks hold 9 elements, it has 6 @ rows"),
        (WHOLE[1:], [0, 1], "two of its chunks overlap @ rows"),
        (WHOLE[1:, 0], [1], "a chunk at [0, 0] of [1, 3] elements is not inside [4] @ rows"),
        (WHOLE[1:], [1], "SHARD does not give the offsets of its chunk @ rows"),
        (WHOLE[1:], [-1, 0], "SHARD does not give the offsets of its chunk @ rows"),
        (WHOLE[1:], [True, 0], "SHARD does not give the offsets of its chunk @ rows"),
        (WHOLE[1:], [1 << 62, 0], "SHARD does not give the offsets of its chunk @ rows"),
        (WHOLE[1:2], [0, 0], "SHARD has other values at [0, 0] than another rank's shard @ rows"),
        (WHOLE[1:], "10", "SHARD does not give the offsets of its chunk @ rows"),
    ],
)
def test_shards_that_do_not_cover_a_tensor_are_refused(
    tmp_path: Path, second: torch.Tensor, offsets: Any, problem: str
) -> None:
    shard(tmp_path, 1, {"rows": WHOLE[:1].clone()}, {"rows": [0, 0]})
    shard(tmp_path, 2, {"rows": second.clone()}, {"rows": offsets})
    with pytest.raises(CkptError, match="its shards do not cover the tensors") as caught:
        open_checkpoint(str(tmp_path))
    assert problem.replace("SHARD", "shard-00002-model-00001-of-00001.safetensors") in map(
        str, caught.value.problems
    )


def test_a_tensor_without_elements_shares_no_bytes(tmp_path: Path) -> None:
    """Its offset equals another tensor's, at any position in the header."""
    info = {"b": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
    info |= {"a": {"dtype": "F32", "shape": [0, 4], "data_offsets": [0, 0]}}
    offsets = {"b": {"saved_offsets": [0]}, "a": {"saved_offsets": [0, 0]}}
    text = json.dumps({"__metadata__": {"DCP_SHARDING_INFO": json.dumps(offsets)}, **info}).encode()
    path = tmp_path / "shard-00001-model-00001-of-00001.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(4))
    (section,) = open_checkpoint(str(tmp_path)).sections
    assert {entry.key: entry.shape for entry in section.tensors} == {"b": (1,), "a": (0, 4)}


@pytest.mark.parametrize(
    "other",
    [
        {"rows": torch.ones(3, 4), "more": torch.ones(9)},
        {"rows": WHOLE.int(), "more": torch.ones(9)},
        {"lines": WHOLE, "more": torch.ones(9)},
    ],
)
def test_data_files_of_another_checkpoint_are_refused(
    tmp_path: Path, other: dict[str, torch.Tensor]
) -> None:
    needs_torch("2.8", "files of safetensors in a folder of torch.distributed.checkpoint")
    from torch.distributed.checkpoint.filesystem import SerializationFormat

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        writer = dcp.FileSystemWriter(
            tmp_path / "d", serialization_format=SerializationFormat.SAFETENSORS
        )
        dcp.save({"rows": WHOLE}, storage_writer=writer)
    (data,) = (tmp_path / "d").glob("*.distcp")
    assert open_checkpoint(str(tmp_path / "d")).sections[0].tensors[0].shape == (4, 3)
    save_file(other, data)
    with pytest.raises(CkptError, match=r"has no chunk of rows as \.metadata describes it"):
        open_checkpoint(str(tmp_path / "d"))
