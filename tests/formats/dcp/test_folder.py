"""Folders of torch.distributed.checkpoint: reading, renaming in ``.metadata``, conversion; torch is
the oracle.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import dcp_ranks
from ckpttool import CkptError, open_checkpoint
from command import main
from surroundings import limited
from torch_version import needs_torch


def remap(*words: object, status: int = 0) -> None:
    assert main(["convert" if "--max-shard-size" in words else "remap", *map(str, words)]) == status


def save(state: dict[str, Any], folder: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=folder)
    return folder


def loaded(folder: Path) -> Any:
    out = folder.parent / f"{folder.name}.loaded.pt"
    dcp_to_torch_save(folder, out)
    return torch.load(out, weights_only=False)


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right)
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and bool(left == right)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def trained(
    seed: int = 0, kind: Any = torch.optim.AdamW, **options: Any
) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    groups = [
        {"params": list(model[0].parameters())},
        {"params": list(model[1].parameters()), "lr": 0.5},
    ]
    optimizer = kind(groups, lr=0.1, **options)
    for _ in range(2):
        model(torch.randn(5, 4)).square().sum().backward()
        optimizer.step()
    return model, optimizer


def state_of(*arguments: Any, **options: Any) -> dict[str, Any]:
    weights, optimizer = get_state_dict(*arguments, options=StateDictOptions(**options))
    return {"model": weights, "optimizer": optimizer}


@pytest.fixture
def one(tmp_path: Path) -> Path:
    """A checkpoint of one rank with every kind of entry that DCP supports."""
    transposed = torch.arange(12.0).reshape(3, 4).t()
    rest = {
        "epoch": 3,
        "list": [1, {"a": torch.ones(2)}],
        "pair": (torch.ones(1), 2),
        "scale": torch.tensor(2.5),
    }
    return save(
        {**state_of(*trained()), **rest, "transposed": transposed, "text": "é"}, tmp_path / "one"
    )


# Reading, and conversion to files of torch.save and back


def test_sections_are_listed(one: Path) -> None:
    checkpoint = open_checkpoint(str(one))
    kinds = [(section.path, section.kind) for section in checkpoint.sections]
    assert kinds[:2] == [("model", "state_dict"), ("optimizer", "optimizer")]
    assert "epoch" in checkpoint.others
    assert {one.verdict for one in checkpoint.imports} <= {"known"}
    assert checkpoint.format == "dcp"
    assert checkpoint.nbytes == sum(path.stat().st_size for path in one.iterdir())
    assert (
        open_checkpoint(str(one / ".metadata")).sections[0].by_key().keys()
        == checkpoint.sections[0].by_key().keys()
    )


def test_conversion_to_torch_save_matches_torch(one: Path, tmp_path: Path) -> None:
    expected = loaded(one)
    remap(one, "-o", tmp_path / "out.pt", "--verify")
    assert same(torch.load(tmp_path / "out.pt", weights_only=True, mmap=True), expected)
    remap(tmp_path / "out.pt", "-o", tmp_path / "back.dcp", "--verify")
    assert same(loaded(tmp_path / "back.dcp"), expected)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_optimizer_ids_and_empty_states_are_kept(tmp_path: Path, kind: Any) -> None:
    model, optimizer = trained(kind=kind)
    state = {"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()}
    torch.save(state, tmp_path / "in.pt")
    remap(tmp_path / "in.pt", "-o", tmp_path / "mid.dcp", "--verify")
    torch_save_to_dcp(tmp_path / "in.pt", tmp_path / "torch")
    assert same(loaded(tmp_path / "mid.dcp"), loaded(tmp_path / "torch"))
    remap(tmp_path / "mid.dcp", "-o", tmp_path / "out.pt", "--verify")
    assert same(torch.load(tmp_path / "out.pt"), state)


@pytest.mark.parametrize("name", ["tensors", "files", "threads", "async"])
def test_chunks_of_two_ranks_are_assembled(ranks: Path, tmp_path: Path, name: str) -> None:
    expected = dcp_ranks.tensors()
    if name != "async":
        expected["old"] = torch.arange(24.0).reshape(4, 6)
    remap(ranks / name, "-o", tmp_path / "out.pt", "--verify")
    found = torch.load(tmp_path / "out.pt")
    assert found["model"].keys() == expected.keys()
    assert all(same(found["model"][key], expected[key]) for key in expected)
    assert (found["step"], found["names"], found["plain"].tolist()) == (7, ["a", "b"], [1, 1, 1])
    remap(f"{ranks / name}::model", "-o", tmp_path / "out.safetensors", "--verify")
    assert all(
        same(value, expected[key]) for key, value in load_file(tmp_path / "out.safetensors").items()
    )


@pytest.mark.parametrize("name", ["distcp", "shards", "consolidated"])
def test_safetensors_of_two_ranks_are_assembled(ranks: Path, tmp_path: Path, name: str) -> None:
    needs_torch("2.8", "files of safetensors in a folder of torch.distributed.checkpoint")
    expected = dcp_ranks.tensors()
    del expected["empty"]
    remap(ranks / name, "-o", tmp_path / "out.safetensors", "--verify")
    found = load_file(tmp_path / "out.safetensors")
    assert found.keys() == expected.keys()
    assert all(same(value, expected[key]) for key, value in found.items())
    remap(ranks / name, "-o", tmp_path / "out.dcp", "--rule", "rows => lines", "--verify")
    assert same(loaded(tmp_path / "out.dcp")["lines"], expected["rows"])


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"rows": {}}', '{"rows": {"saved_offsets": [0, 1, 2]}}', '{"rows": 5}', "{"],
)
def test_shards_without_offsets_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "shard-00001-model-00001-of-00001.safetensors"
    save_file({"rows": torch.ones(2, 2)}, path, {"DCP_SHARDING_INFO": text})
    with pytest.raises(CkptError, match="do not cover the tensors"):
        open_checkpoint(str(tmp_path))
    save_file(
        {"rows": torch.ones(2, 2)},
        path,
        {"DCP_SHARDING_INFO": '{"rows": {"saved_offsets": [1, 0]}}'},
    )
    with pytest.raises(CkptError, match="do not cover the tensors"):
        open_checkpoint(str(tmp_path))


def test_safetensors_are_converted_to_dcp_and_to_shards(tmp_path: Path) -> None:
    model, _ = trained()
    torch.save(model.state_dict(), tmp_path / "in.pt")
    remap(tmp_path / "in.pt", "-o", tmp_path / "in.safetensors")
    remap(tmp_path / "in.safetensors", "-o", tmp_path / "mid.dcp", "--verify")
    fresh, _ = trained(seed=1)
    state = fresh.state_dict()
    dcp.load(state, checkpoint_id=tmp_path / "mid.dcp")
    assert same(dict(state), dict(model.state_dict()))
    (tmp_path / "shards").mkdir()
    index = tmp_path / "shards/model.safetensors.index.json"
    remap(tmp_path / "mid.dcp", "-o", index, "--max-shard-size", "40", "--verify")
    assert len(list((tmp_path / "shards").iterdir())) > 3


def test_tied_weights_are_stored_once_and_stay_tied(tmp_path: Path) -> None:
    weight = torch.randn(400, 10)
    torch.save({"a": weight, "b": weight, "c": weight[3:]}, tmp_path / "in.pt")
    remap(tmp_path / "in.pt", "-o", tmp_path / "mid.dcp", "--verify")
    assert same(loaded(tmp_path / "mid.dcp"), {"a": weight, "b": weight, "c": weight[3:]})
    assert (tmp_path / "mid.dcp" / "__0_0.distcp").stat().st_size < 2.5 * weight.nbytes
    assert open_checkpoint(str(tmp_path / "mid.dcp")).sections[0].aliases() == {"b": "a"}
    remap(tmp_path / "mid.dcp", "-o", tmp_path / "out.pt")
    back = torch.load(tmp_path / "out.pt")
    assert back["a"].data_ptr() == back["b"].data_ptr()


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor(3),
        torch.tensor(True),
        torch.zeros(0, 3),
        torch.ones(3, dtype=torch.bfloat16),
        torch.ones(2, dtype=torch.complex64),
        torch.ones(4, dtype=torch.uint16),
        torch.ones(3).to(torch.float8_e4m3fn),
        torch.arange(6).reshape(2, 3)[:, 1:],
        torch.ones(1).expand(4, 5),
    ],
)
def test_tensors_of_every_kind_are_converted(tmp_path: Path, value: torch.Tensor) -> None:
    torch.save({"w": value, "é @ .x": value.clone()}, tmp_path / "in.pt")
    remap(tmp_path / "in.pt", "-o", tmp_path / "mid.dcp", "--verify")
    found = loaded(tmp_path / "mid.dcp")
    assert found["w"].dtype == value.dtype
    assert bits(found["w"]) == bits(found["é @ .x"]) == bits(value)
    remap(tmp_path / "mid.dcp", "-o", tmp_path / "out.pt", "--verify")
    assert bits(torch.load(tmp_path / "out.pt")["w"]) == bits(value)


def test_entries_that_dcp_cannot_hold_are_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "s": torch.eye(3).to_sparse()}, tmp_path / "in.pt")
    remap(tmp_path / "in.pt", "-o", tmp_path / "out.dcp", status=1)
    torch.save({"a": {"b": torch.ones(2)}, "a.b": torch.ones(2)}, tmp_path / "in.pt")
    remap(tmp_path / "in.pt", "-o", tmp_path / "out.dcp", status=1)
    assert not (tmp_path / "out.dcp").exists()


def test_storages_without_a_tensor_are_copied(tmp_path: Path) -> None:
    save({"w": torch.ones(2), "bare": (torch.arange(3.0).untyped_storage(), 1)}, tmp_path / "in")
    remap(tmp_path / "in", "-o", tmp_path / "out.pt")
    assert torch.load(tmp_path / "out.pt", weights_only=False)["bare"][0].nbytes() == 12
    remap(tmp_path / "out.pt", "-o", tmp_path / "back.dcp")
    assert loaded(tmp_path / "back.dcp")["bare"][0].nbytes() == 12


# Renames


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    needs_torch("2.7", "fully_shard without a GPU")
    folder = tmp_path_factory.mktemp("ranks")
    dcp_ranks.run("save", folder)
    return folder


def test_two_ranks_load_a_renamed_model_and_its_optimizer(ranks: Path, tmp_path: Path) -> None:
    remap(ranks / "fsdp", "-o", tmp_path / "renamed", "--rule", "{x*} => net.{x*}", "--verify")
    for name in ("__0_0.distcp", "__1_0.distcp"):
        assert (tmp_path / "renamed" / name).read_bytes() == (ranks / "fsdp" / name).read_bytes()
    state = loaded(ranks / "fsdp")
    expected = {
        "model": {f"net.{key}": value.tolist() for key, value in state["model"].items()},
        "exp_avg": {
            f"net.{key}": own["exp_avg"].tolist()
            for key, own in state["optimizer"]["state"].items()
        },
    }
    (tmp_path / "want.json").write_text(json.dumps(expected))
    dcp_ranks.run("load", tmp_path)


@pytest.mark.parametrize("flatten", [False, True])
def test_optimizer_keys_are_renamed_with_the_model(tmp_path: Path, flatten: bool) -> None:
    save(state_of(*trained(), flatten_optimizer_state_dict=flatten), tmp_path / "in")
    remap(tmp_path / "in", "-o", tmp_path / "out", "--rule", "{x*} => net.{x*}", "--verify")
    model, optimizer = trained(seed=1)
    whole = nn.ModuleDict({"net": model})
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    state = state_of(whole, optimizer, flatten_optimizer_state_dict=flatten)
    dcp.load(state, checkpoint_id=tmp_path / "out")
    set_state_dict(
        whole,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=options,
    )
    expected_model, expected_optimizer = trained()
    assert same(dict(model.state_dict()), dict(expected_model.state_dict()))
    found, expected = optimizer.state_dict(), expected_optimizer.state_dict()
    assert same(found["state"], expected["state"])
    assert [group["lr"] for group in found["param_groups"]] == [
        group["lr"] for group in expected["param_groups"]
    ]


def test_a_rename_and_its_inverse_restore_the_folder(one: Path, tmp_path: Path) -> None:
    remap(one, "-o", tmp_path / "out", "--rule", "{x*} => net.{x*}", "--verify")
    remap(
        tmp_path / "out",
        "-o",
        tmp_path / "back",
        "--rule",
        "{x*} => net.{x*}",
        "--reverse",
        "--verify",
    )
    assert same(loaded(tmp_path / "back"), loaded(one))
    before, after = (
        pickle.loads((folder / ".metadata").read_bytes()) for folder in (one, tmp_path / "back")
    )
    assert after.state_dict_metadata == before.state_dict_metadata
    assert after.planner_data == before.planner_data
    for index, info in after.storage_data.items():
        assert info == before.storage_data[index] or index.fqn.endswith(".params")


def test_in_place_keeps_the_data_files(one: Path, tmp_path: Path) -> None:
    """Renamed optimizer parameters are listed in a data file, so they need another folder."""
    folder = save({"model": loaded(one)["model"], "epoch": 3}, tmp_path / "weights")
    before = (folder / "__0_0.distcp").stat().st_ino
    expected = loaded(folder)
    remap(folder, "--in-place", "--rule", "{x*} => net.{x*}")
    assert (folder / "__0_0.distcp").stat().st_ino == before
    assert list(loaded(folder)["model"]) == [f"net.{key}" for key in expected["model"]]
    remap(folder, "--in-place", "--rule", "{x*} => net.{x*}", "--reverse")
    assert same(loaded(folder), expected)
    remap(one, "--in-place", "--rule", "{x*} => net.{x*}", status=1)


def test_a_rename_does_not_read_tensors(tmp_path: Path) -> None:
    """The data is a sparse file of a tebibyte, which cannot be copied."""
    save({"w": torch.ones(4)}, tmp_path / "in")
    change(tmp_path / "in", lambda metadata: far_away(metadata, 1 << 40))
    os.truncate(tmp_path / "in" / "__0_0.distcp", 1 << 40)
    remap(tmp_path / "in", "--in-place", "--rule", "w => v")
    assert [entry.key for entry in open_checkpoint(str(tmp_path / "in")).sections[0].tensors] == [
        "v"
    ]


# Malicious and damaged folders


def change(folder: Path, how: Callable[[Any], Any]) -> None:
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    metadata = how(metadata) or metadata
    path.write_bytes(pickle.dumps(metadata))


def far_away(metadata: Any, end: int) -> None:
    for info in metadata.storage_data.values():
        info.offset, info.length = end - 10, 10


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


class Properties:
    """Pickled as torch's `TensorProperties` of the dtype, possibly with more than the five of torch
    2.13.
    """

    def __init__(self, dtype: Any, *more: Any) -> None:
        self.state: Any = (*TensorProperties(dtype).__getstate__()[:5], *more)

    @classmethod
    def bare(cls) -> Properties:
        properties = cls(torch.float32)
        properties.state = {"dtype": 1}
        return properties

    def __reduce__(self) -> Any:
        return TensorProperties, (), self.state


def first_place(**changes: Any) -> Callable[[Any], None]:
    def change_metadata(metadata: Any) -> None:
        vars(metadata.storage_data[MetadataIndex("n")]).update(changes)

    return change_metadata


def of_w(**changes: Any) -> Callable[[Any], None]:
    return lambda metadata: vars(metadata.state_dict_metadata["w"]).update(changes)


def chunks(*boxes: tuple[list[int], list[int]]) -> Callable[[Any], None]:
    """Store the tensor `w` in these boxes, each at another offset of the file."""

    def change_metadata(metadata: Any) -> None:
        own = [ChunkStorageMetadata(torch.Size(at), torch.Size(size)) for at, size in boxes]
        metadata.state_dict_metadata["w"].chunks = own
        for number, chunk in enumerate(own):
            place = _StorageInfo("__0_0.distcp", 10 * number, 10)
            metadata.storage_data[MetadataIndex("w", chunk.offsets)] = place

    return change_metadata


def paths(**changes: Any) -> Callable[[Any], None]:
    return lambda metadata: metadata.planner_data.update(changes)


def odd_key(metadata: Any) -> None:
    metadata.state_dict_metadata[3] = metadata.state_dict_metadata.pop("w")


def wrong_place(
    file: str = "'__0_0.distcp'", offset: str = "OFFSET", length: str = "LENGTH"
) -> list[str]:
    return [f"not as torch writes it: {file}, byte {offset}, {length} bytes @ Metadata"]


NO_PATH = "is not the flat key of its path @ Metadata"
# The change, and every reported problem; None if its text varies
WRONG: dict[str, tuple[Callable[[Any], Any], list[str] | None]] = {
    "outside": (first_place(relative_path="../secret"), ["leads out of the folder @ ../secret"]),
    "itself": (
        first_place(relative_path=".metadata", offset=0, length=9),
        ["describes the folder, and holds no data @ .metadata"],
    ),
    "a missing file": (first_place(relative_path="gone"), ["the data file is missing @ gone"]),
    "no bytes": (
        first_place(length=0),
        ["it has no bytes: torch.save writes some for every item @ n"],
    ),
    "transformed": (
        first_place(transform_descriptors=["zstd"]),
        ["an extension encoded it: zstd @ n"],
    ),
    "past the end": (
        first_place(offset=1 << 50),
        ["__0_0.distcp ends at byte SIZE, before its data @ n"],
    ),
    "before the start": (first_place(offset=-1), wrong_place(offset="-1")),
    "a negative length": (first_place(length=-1), wrong_place(length="-1")),
    "an offset that is text": (first_place(offset="0"), wrong_place(offset="'0'")),
    "a length that is a bool": (first_place(length=True), wrong_place(length="True")),
    "a file that is a number": (first_place(relative_path=5), wrong_place("5")),
    "missing offsets": (
        lambda metadata: metadata.storage_data.clear(),
        ["storage_data has no place for it @ n", "storage_data has no place for it @ w"],
    ),
    "a huge shape": (
        of_w(size=torch.Size([1 << 40, 1 << 40])),
        ["its shape [1099511627776, 1099511627776] is too large @ w"],
    ),
    "a shape at the limit": (
        of_w(size=torch.Size([1 << 60])),
        [f"its chunks hold 4 elements, it has {1 << 60:,} @ w"],
    ),
    "a shape beyond the limit": (
        of_w(size=torch.Size([(1 << 60) + 1])),
        [f"its shape [{(1 << 60) + 1}] is too large @ w"],
    ),
    "the maximum number of dimensions": (
        of_w(size=torch.Size([1] * 64)),
        [f"a chunk at [0] of [4] elements is not inside {[1] * 64} @ w"],
    ),
    "a dtype of another module": (
        of_w(properties=Properties(np.float32)),
        ["unknown dtype numpy.float32 @ w"],
    ),
    "a class that is not a dtype": (
        of_w(properties=Properties(torch.Tensor)),
        ["unknown dtype torch.Tensor @ w"],
    ),
    "a dtype that is text": (of_w(properties=Properties("float32")), ["unknown dtype float32 @ w"]),
    "properties of a newer torch": (
        of_w(properties=Properties(torch.float32, None, None)),
        ["a newer torch wrote its properties: pip install -U ckpttool @ w"],
    ),
    "an object for a size": (of_w(size=Path("4")), ["its sizes are not a tuple @ w"]),
    "an invalid state": (of_w(size=torch.Size([4]), properties=Properties.bare()), None),
    "a list for a dict": (lambda metadata: vars(metadata).update(state_dict_metadata=[]), None),
    "a set for storage_data": (lambda metadata: vars(metadata).update(storage_data={1}), None),
    "a path of a number": (lambda metadata: metadata.planner_data.update({5: ("w",)}), None),
    "a huge rank": (of_w(size=torch.Size([1] * 100_000)), ["its sizes are not a tuple @ w"]),
    "one dimension too many": (of_w(size=torch.Size([1] * 65)), ["its sizes are not a tuple @ w"]),
    "sizes of text": (of_w(size="4"), ["its sizes are not a tuple @ w"]),
    "a size of text": (of_w(size=("4",)), ["sizes ['4'] @ w"]),
    "a negative size": (of_w(size=(-4,)), ["sizes [-4] @ w"]),
    "a gap": (of_w(size=torch.Size([5])), ["its chunks hold 4 elements, it has 5 @ w"]),
    "no chunks": (of_w(chunks=7), ["int instead of a list @ w"]),
    "no properties": (of_w(properties=7), ["int instead of a TensorProperties @ w"]),
    "an overlap": (chunks(([0], [2]), ([1], [2])), ["two of its chunks overlap @ w"]),
    "a chunk outside": (
        chunks(([0], [2]), ([3], [2])),
        ["a chunk at [3] of [2] elements is not inside [4] @ w"],
    ),
    "a chunk with other dimensions": (
        chunks(([0, 0], [2, 2])),
        ["a chunk at [0, 0] of [2, 2] elements is not inside [4] @ w"],
    ),
    "a path of another key": (paths(w=("w", 1 << 40)), [NO_PATH]),
    "swapped paths": (paths(w=("n",), n=("n", "x")), [NO_PATH]),
    "a deep path": (paths(w=("x",) * 100_000), [NO_PATH]),
    "a path with a bool": (paths(w=("w", True)), [NO_PATH]),
    "a list for a path": (paths(w=["w"]), [NO_PATH]),
    "no metadata": (
        lambda _: {"state_dict_metadata": {}},
        ["not as torch writes it: dict instead of a Metadata @ Metadata"],
    ),
    "a key that is a number": (odd_key, ["its key is not a string @ 3"]),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_metadata_is_refused(tmp_path: Path, name: str) -> None:
    folder = save({"w": torch.ones(4), "n": 3}, tmp_path / "m")
    (tmp_path / "secret").write_text("x")
    place = pickle.loads((folder / ".metadata").read_bytes()).storage_data[MetadataIndex("n")]
    how, expected = WRONG[name]
    change(folder, how)
    with pytest.raises(CkptError) as caught:
        open_checkpoint(str(folder))
    values = {
        "OFFSET": place.offset,
        "LENGTH": place.length,
        "SIZE": f"{(folder / '__0_0.distcp').stat().st_size:,}",
    }
    assert main(["inspect", str(folder)]) == 2
    if expected is None:
        assert len(caught.value.problems) == 1
        return
    for word, value in values.items():
        expected = [text.replace(word, str(value)) for text in expected]
    found = sorted(map(str, caught.value.problems))
    assert len(found) == len(expected)
    assert all(text.endswith(end) for text, end in zip(found, expected)), found


@pytest.mark.parametrize(
    ("by_key", "problem"),
    [
        ({"a": ("a",), "a.b": ("a", "b")}, "its path leads through another entry @ a.b"),
        ({"a.b": ("a", "b"), "a": ("a",)}, "its path leads through another entry @ a"),
        ({"a.0": ("a", 0), "a.b": ("a", "b")}, "neither a dict nor a list @ a"),
        ({"a.20000": ("a", 20000)}, "neither a dict nor a list @ a"),
        ({"a.10001": ("a", 10001)}, "neither a dict nor a list @ a"),
        ({"0": (0,), "1": (1,)}, None),
        ({"a.-1": ("a", -1)}, "neither a dict nor a list @ a"),
        ({".".join("x" * 300): tuple("x" * 300)}, "nested too deep @ x.x.x.x.x.x.x.x.x.x"),
    ],
)
def test_keys_that_do_not_form_a_state_dict_are_refused(
    tmp_path: Path, by_key: dict[str, Any], problem: str | None
) -> None:
    folder = save(dict.fromkeys(by_key, torch.ones(2)), tmp_path / "m")
    change(folder, paths(**by_key))
    with pytest.raises(CkptError, match="do not form a nested state dict") as caught:
        open_checkpoint(str(folder))
    assert list(map(str, caught.value.problems)) == ([problem] if problem else [])


def test_lists_keep_their_positions_if_an_item_is_missing(tmp_path: Path) -> None:
    folder = save({"a.0": torch.ones(1), "a.3": torch.ones(2)}, tmp_path / "m")
    change(folder, paths(**{"a.0": ("a", 0), "a.3": ("a", 3)}))
    remap(folder, "-o", tmp_path / "out.pt")
    assert [
        None if one is None else one.numel() for one in torch.load(tmp_path / "out.pt")["a"]
    ] == [1, None, None, 2]


@pytest.mark.parametrize("more", [(None,), (torch.Size([1]),)])
def test_a_property_of_a_newer_torch_is_kept(tmp_path: Path, more: Any) -> None:
    folder = save({"w": torch.ones(4)}, tmp_path / "m")
    change(folder, of_w(properties=Properties(torch.float32, *more)))
    remap(folder, "-o", tmp_path / "out", "--rule", "w => v")
    states: list[Any] = []
    with patch.object(TensorProperties, "__setstate__", lambda self, state: states.append(state)):
        pickle.loads((tmp_path / "out" / ".metadata").read_bytes())
    assert [state[5:] for state in states] == [more]


def test_metadata_beyond_a_limit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The size of the pickle is limited, and the number of chunks, which a pickle can repeat
    cheaply.
    """
    folder = save({"w": torch.ones(4), "x": torch.ones(4)}, tmp_path / "m")
    nbytes = (folder / ".metadata").stat().st_size
    with limited(pickle_bytes=nbytes):
        open_checkpoint(str(folder))
    with (
        limited(pickle_bytes=nbytes - 1),
        pytest.raises(
            CkptError,
            match=r"\.metadata is"
            r" too long",
        ),
    ):
        open_checkpoint(str(folder))
    monkeypatch.setattr("ckpttool.formats.dcp_metadata._MAX_CHUNKS", 2)
    open_checkpoint(str(folder))
    monkeypatch.setattr("ckpttool.formats.dcp_metadata._MAX_CHUNKS", 1)
    with pytest.raises(CkptError) as caught:
        open_checkpoint(str(folder))
    assert list(map(str, caught.value.problems)) == ["more than 1 chunks @ x"]


def test_shards_next_to_a_metadata_file_are_ignored(tmp_path: Path) -> None:
    folder = save({"w": torch.ones(4)}, tmp_path / "m")
    save_file({"v": torch.ones(2)}, folder / "shard-00001-model-00001-of-00001.safetensors")
    assert [entry.key for entry in open_checkpoint(str(folder)).sections[0].tensors] == ["w"]


def test_elements_smaller_than_a_byte_are_refused(tmp_path: Path) -> None:
    """Both in shards and in a file that .metadata names, because offsets are counted in
    elements.
    """
    described = {"w": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}
    metadata = {"__metadata__": {"DCP_SHARDING_INFO": '{"w": {"saved_offsets": [0]}}'}}
    raw = json.dumps({**metadata, **described}).encode()
    data = len(raw).to_bytes(8, "little") + raw + bytes(3)
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "shard-00001-model-00001-of-00001.safetensors").write_bytes(data)
    with pytest.raises(CkptError) as caught:
        open_checkpoint(str(tmp_path / "shards"))
    assert [problem.key for problem in caught.value.problems] == ["w"]
    folder = save({"w": torch.ones(4)}, tmp_path / "m")
    (folder / "__0_0.distcp").write_bytes(data)

    def start_at_zero(metadata: Any) -> None:
        for info in metadata.storage_data.values():
            info.offset, info.length = 0, len(data)

    change(folder, start_at_zero)
    with pytest.raises(CkptError, match=r"has no chunk of w as \.metadata describes it"):
        open_checkpoint(str(folder))


def test_chunks_in_files_of_both_kinds_are_assembled(tmp_path: Path) -> None:
    folder = save({"w": torch.arange(4.0)}, tmp_path / "m")
    torch.save(torch.tensor([0.0, 1.0]), folder / "first.distcp")
    save_file({"w": torch.tensor([2.0, 3.0])}, folder / "second.distcp")

    def cut(metadata: Any) -> None:
        chunks(([0], [2]), ([2], [2]))(metadata)
        for number, name in ((0, "first.distcp"), (2, "second.distcp")):
            place = _StorageInfo(name, 0, (folder / name).stat().st_size)
            metadata.storage_data[MetadataIndex("w", torch.Size([number]))] = place

    change(folder, cut)
    remap(folder, "-o", tmp_path / "out.pt")
    assert torch.load(tmp_path / "out.pt")["w"].tolist() == [0, 1, 2, 3]


def test_an_object_that_is_too_long_is_refused(tmp_path: Path) -> None:
    """An object that is not a tensor is read completely; if it is too long, only its size is
    reported.
    """
    folder = save({"n": 3}, tmp_path / "m")
    os.truncate(folder / "__0_0.distcp", 1 << 25)
    for length, message in (
        ((1 << 24) + 1, "n is 16,777,217 bytes and not a tensor"),
        (1 << 24, "n is not as torch.save"),
    ):
        change(folder, first_place(offset=0, length=length))
        with pytest.raises(CkptError, match=message):
            open_checkpoint(str(folder))


def test_items_that_share_bytes_are_refused(tmp_path: Path) -> None:
    """Also if the file is long enough for both, because it has unused bytes."""

    def shift(metadata: Any) -> None:
        first, second = sorted(metadata.storage_data.values(), key=lambda info: int(info.offset))[
            :2
        ]
        second.offset = first.offset + 1

    folder = save({"w": torch.ones(400), "x": torch.ones(400)}, tmp_path / "m")
    with open(folder / "__0_0.distcp", "ab") as file:
        file.write(bytes(10_000))
    assert open_checkpoint(str(folder))
    change(folder, shift)
    with pytest.raises(CkptError, match="do not fit") as caught:
        open_checkpoint(str(folder))
    assert [(problem.key, problem.problem) for problem in caught.value.problems] == [
        ("x", "it shares bytes in __0_0.distcp with w")
    ]


def test_pickled_code_is_never_executed(tmp_path: Path) -> None:
    folder = save({"w": torch.ones(4)}, tmp_path / "m")

    def hide(metadata: Any) -> None:
        metadata.storage_meta = Bomb(tmp_path / "ran")

    change(folder, hide)
    assert any("system" in name for name in open_checkpoint(str(folder)).globals)
    remap(folder, "-o", tmp_path / "out", "--rule", "w => v")
    assert b"posix" not in (tmp_path / "out" / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(pickle.dumps(Bomb(tmp_path / "ran")))
    with pytest.raises(CkptError):
        open_checkpoint(str(folder))
    save({"w": torch.ones(4), "n": Bomb(tmp_path / "ran")}, tmp_path / "items")
    open_checkpoint(str(tmp_path / "items"))
    remap(tmp_path / "items", "-o", tmp_path / "out.pt", "--keep-pickled-code")
    assert not (tmp_path / "ran").exists()


def test_missing_and_truncated_data_is_an_error(one: Path, tmp_path: Path) -> None:
    shutil.copytree(one, tmp_path / "cut")
    os.truncate(tmp_path / "cut" / "__0_0.distcp", 5000)
    with pytest.raises(CkptError, match="do not fit") as caught:
        open_checkpoint(str(tmp_path / "cut"))
    assert len(caught.value.problems) > 3
    (tmp_path / "cut" / "__0_0.distcp").unlink()
    with pytest.raises(CkptError, match="do not fit") as caught:
        open_checkpoint(str(tmp_path / "cut"))
    assert [problem.problem for problem in caught.value.problems] == ["the data file is missing"]
