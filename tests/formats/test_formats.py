"""One suite over every format: the index matches the reference library, which also loads every
output; a rename and its inverse restore the same bytes, and a conversion and its inverse restore
the values.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from ckpttool.cli.app import main
from ckpttool.formats.detect_folder import open_checkpoint

State = dict[str, torch.Tensor]
INDEX = "model.safetensors.index.json"
MANY = "3,000 keys"


def filled(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of that dtype with bytes that differ as much as possible."""
    count = math.prod(shape) * dtype.itemsize
    if dtype == torch.bool:
        return torch.arange(math.prod(shape)).remainder(2).bool().reshape(shape)
    return (torch.arange(count) % 120).to(torch.uint8).view(dtype).reshape(shape)


INTEGERS = ("int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64")
STATES: dict[str, Callable[[], State]] = {
    "0-dim": lambda: {"step": torch.tensor(3.5), "n": torch.tensor(7)},
    "empty": lambda: {
        "none": torch.empty(0),
        "rows": torch.empty(3, 0, dtype=torch.int64),
        "w": torch.ones(2),
    },
    "bool": lambda: {"mask": filled((3, 5), torch.bool)},
    "integers": lambda: {name: filled((4,), getattr(torch, name)) for name in INTEGERS},
    "half": lambda: {"bf16": filled((5, 3), torch.bfloat16), "fp16": filled((5, 3), torch.float16)},
    "fp8": lambda: {
        str(d).removeprefix("torch."): filled((3, 3), d)
        for d in (
            torch.float8_e4m3fn,
            torch.float8_e5m2,
            torch.float8_e4m3fnuz,
            torch.float8_e5m2fnuz,
        )
    },
    "complex": lambda: {"c64": filled((2, 3), torch.complex64)},
    MANY: lambda: {
        f"layers.{i // 100}.{i % 100}.weight": torch.full((1,), float(i)) for i in range(3_000)
    },
    "names": lambda: {
        name: torch.full((2,), float(i))
        for i, name in enumerate(
            ["plain", ".leading", "trailing.", "a..b", "foo@1.w", "with space", "ключ.веса", '"q"']
        )
    },
}
ALL = "all in one file"
ALONE = ("0-dim", "empty")  # files with few bytes


def state_of(name: str, kind: str) -> State:
    if name != ALL:
        return STATES[name]()
    parts = [
        build() for name, build in STATES.items() if name != MANY and (kind, name) not in UNLOADABLE
    ]
    return {key: tensor for part in parts for key, tensor in part.items()}


@dataclass(frozen=True)
class Kind:
    """A format: how the reference library writes and loads it, and the name of an output."""

    save: Callable[[State, Path], None]
    load: Callable[[Path], State]
    out: str
    keeps_bytes: bool = True  # a rename and its inverse restore the same files


def _save_sharded(state: State, folder: Path) -> None:
    folder.mkdir()
    shards = [shard for i in range(2) if (shard := dict(list(state.items())[i::2]))]
    names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    for name, shard in zip(names, shards):
        save_file(shard, folder / name, {"format": "pt"})
    size = sum(tensor.nbytes for tensor in state.values())
    weight_map = {key: name for name, shard in zip(names, shards) for key in shard}
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _load_sharded(folder: Path) -> State:
    if not (folder / INDEX).exists():  # a single file has no index, as with save_pretrained
        return load_file(folder / "model.safetensors")
    index = json.loads((folder / INDEX).read_text())
    shards = {name: load_file(folder / name) for name in set(index["weight_map"].values())}
    return {key: shards[name][key] for key, name in index["weight_map"].items()}


def _load_dcp(folder: Path) -> State:
    dcp_to_torch_save(folder, folder.parent / f"{folder.name}.joined.pt")
    return torch.load(folder.parent / f"{folder.name}.joined.pt", weights_only=True)


def _load_zip(path: Path) -> State:
    loaded: State = torch.load(path, weights_only=True, mmap=True)
    return dict(loaded)


KINDS = {
    "safetensors": Kind(save_file, load_file, "out.safetensors"),
    "torch_zip": Kind(torch.save, _load_zip, "out.pt"),
    "sharded": Kind(_save_sharded, _load_sharded, f"out/{INDEX}"),
    "dcp": Kind(
        lambda state, path: dcp.save(state, checkpoint_id=path), _load_dcp, "out.dcp", False
    ),
    "torch_legacy": Kind(
        lambda state, path: torch.save(state, path, _use_new_zipfile_serialization=False),
        lambda path: dict(torch.load(path, weights_only=True)),
        "",  # read only
    ),
}
WRITTEN = [kind for kind in KINDS if KINDS[kind].out]
# torch 2.13 writes these and cannot load them
UNLOADABLE = {("torch_legacy", "integers"), ("torch_legacy", "fp8")}


def assert_equal(left: State, right: State) -> None:
    assert left.keys() == right.keys()
    for key in left:
        assert (left[key].dtype, left[key].shape) == (right[key].dtype, right[key].shape), key
        both = (t.contiguous().reshape(-1).view(torch.uint8) for t in (left[key], right[key]))
        assert torch.equal(*both), key


def source(kind: str, state: State, folder: Path) -> Path:
    path = (
        folder
        / f"in{'.pt' if kind.startswith('torch') else '.safetensors' if kind == 'safetensors' else ''}"
    )
    KINDS[kind].save(state, path)
    return path


def remap(path: Path, kind: str, folder: Path, *options: str) -> Path:
    out = folder / KINDS[kind].out
    out.parent.mkdir(exist_ok=True, parents=True)
    assert main(["remap", str(path), "-o", str(out), "--no-fsync", *options]) == 0
    return out.parent if out.name == INDEX else out


def contents(path: Path) -> dict[str, bytes]:
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    return {str(file.relative_to(path)): file.read_bytes() for file in files if file.is_file()}


@pytest.mark.parametrize(
    ("kind", "name"), [p for p in itertools.product(KINDS, STATES) if p not in UNLOADABLE]
)
def test_the_index_matches_the_reference_library(kind: str, name: str, tmp_path: Path) -> None:
    state = STATES[name]()
    path = source(kind, state, tmp_path)
    checkpoint = open_checkpoint(str(path))
    loaded = KINDS[kind].load(path)
    found = {e.key: (e.dtype, e.shape, e.nbytes) for s in checkpoint.sections for e in s.tensors}
    assert found == {
        key: (str(t.dtype).removeprefix("torch."), tuple(t.shape), t.numel() * t.element_size())
        for key, t in loaded.items()
    }


@pytest.mark.parametrize("name", [ALL, *ALONE])
@pytest.mark.parametrize(
    ("kind", "target"), [pair for pair in itertools.permutations(KINDS, 2) if pair[1] in WRITTEN]
)
def test_a_conversion_loads_and_its_inverse_restores_the_values(
    kind: str, target: str, name: str, tmp_path: Path
) -> None:
    state = state_of(name, kind)
    path = source(kind, state, tmp_path)
    there = remap(path, target, tmp_path, "--verify")
    assert_equal(KINDS[target].load(there), state)
    if kind in WRITTEN:
        back = remap(there, kind, tmp_path / "back")
        assert_equal(KINDS[kind].load(back), state)


@pytest.mark.parametrize(("kind", "name"), list(itertools.product(WRITTEN, [ALL, *ALONE, MANY])))
def test_a_rename_loads_and_its_inverse_restores_the_bytes(
    kind: str, name: str, tmp_path: Path
) -> None:
    state = state_of(name, kind)
    path = source(kind, state, tmp_path)
    renamed = remap(path, kind, tmp_path, "--rule", "{k*} => deep.er.{k*}")
    assert_equal(
        KINDS[kind].load(renamed), {f"deep.er.{key}": tensor for key, tensor in state.items()}
    )
    back = remap(renamed, kind, tmp_path / "back", "--rule", "deep.er.{k*} => {k*}")
    assert_equal(KINDS[kind].load(back), state)
    if KINDS[kind].keeps_bytes:
        assert contents(back) == contents(path)


def test_shared_and_strided_tensors_stay_so_in_torch_files(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    state = {"base": base, "tied": base, "column": base[:, 1], "transposed": base.t()}
    torch.save(state, tmp_path / "in.pt")
    loaded = _load_zip(remap(tmp_path / "in.pt", "torch_zip", tmp_path, "--rule", "{k} => m.{k}"))
    assert_equal(loaded, {f"m.{key}": tensor for key, tensor in state.items()})
    assert len({tensor.untyped_storage().data_ptr() for tensor in loaded.values()}) == 1
    assert [tensor.stride() for tensor in loaded.values()] == [
        tensor.stride() for tensor in state.values()
    ]
