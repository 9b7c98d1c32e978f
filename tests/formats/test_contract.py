"""Each format against its own library: see `tests/support/contract.py`."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from contract import FormatContract, State, assert_equal, remap

INDEX = "model.safetensors.index.json"


class TestSafetensors(FormatContract):
    name = "safetensors"
    ending = ".safetensors"
    out = "out.safetensors"
    edits = True

    def save(self, state: State, path: Path) -> None:
        save_file(state, path)

    def load(self, path: Path) -> State:
        return load_file(path)


class TestTorchZip(FormatContract):
    name = "torch_zip"
    ending = ".pt"
    out = "out.pt"
    edits = objects = True

    def save(self, state: State, path: Path) -> None:
        torch.save(state, path)

    def load(self, path: Path) -> State:
        return dict(torch.load(path, weights_only=True, mmap=True))


class TestTorchLegacy(FormatContract):
    name = "torch_legacy"
    ending = ".pt"
    # torch writes these and cannot load them
    lacks = frozenset(
        (
            *(torch.uint16, torch.uint32, torch.uint64),
            *(torch.float8_e4m3fn, torch.float8_e5m2),
            *(torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
        )
    )

    def save(self, state: State, path: Path) -> None:
        torch.save(state, path, _use_new_zipfile_serialization=False)

    def load(self, path: Path) -> State:
        return dict(torch.load(path, weights_only=True))


class TestSharded(FormatContract):
    name = "sharded"
    index = INDEX
    out = f"out/{INDEX}"
    single = "model.safetensors"
    edits = True

    def save_shard(self, shard: State, path: Path) -> None:
        save_file(shard, path, {"format": "pt"})

    def load_shard(self, path: Path) -> State:
        return load_file(path)

    def save(self, state: State, path: Path) -> None:
        path.mkdir()
        stem, ending = self.single.split(".")
        shards = [shard for first in (0, 1) if (shard := dict(list(state.items())[first::2]))]
        weight_map: dict[str, str] = {}
        for number, shard in enumerate(shards, 1):
            name = f"{stem}-{number:05}-of-{len(shards):05}.{ending}"
            self.save_shard(shard, path / name)
            weight_map |= dict.fromkeys(shard, name)
        size = sum(tensor.nbytes for tensor in state.values())
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        (path / self.index).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")

    def load(self, path: Path) -> State:
        if not (path / self.index).exists():  # one file has no index, as with save_pretrained
            return self.load_shard(path / self.single)
        weight_map = json.loads((path / self.index).read_text())["weight_map"]
        shards = {name: self.load_shard(path / name) for name in set(weight_map.values())}
        return {key: shards[name][key] for key, name in weight_map.items()}


class TestShardedBin(TestSharded):
    name = "sharded_bin"
    index = "pytorch_model.bin.index.json"
    out = f"out/{index}"
    single = "pytorch_model.bin"

    def save_shard(self, shard: State, path: Path) -> None:
        torch.save(shard, path)

    def load_shard(self, path: Path) -> State:
        return dict(torch.load(path, weights_only=True))


class TestDcp(FormatContract):
    name = "dcp"
    out = "out.dcp"
    keeps_bytes = False
    edits = objects = True

    def save(self, state: State, path: Path) -> None:
        dcp.save(state, checkpoint_id=path)

    def load(self, path: Path) -> State:
        file = path.parent / f"{path.name}.joined.pt"
        dcp_to_torch_save(path, file)
        return dict(torch.load(file, weights_only=True))


def test_shared_and_strided_tensors_stay_so_in_torch_files(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    state = {"base": base, "tied": base, "column": base[:, 1], "transposed": base.t()}
    torch.save(state, tmp_path / "in.pt")
    path = remap(tmp_path / "in.pt", tmp_path / "out.pt", "--rule", "{k} => m.{k}")
    loaded = torch.load(path, weights_only=True)
    assert_equal(loaded, {f"m.{key}": tensor for key, tensor in state.items()})
    assert len({tensor.untyped_storage().data_ptr() for tensor in loaded.values()}) == 1
    strides = [tensor.stride() for tensor in state.values()]
    assert [tensor.stride() for tensor in loaded.values()] == strides
