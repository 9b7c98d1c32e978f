"""Readers of a file that belongs to a folder: rank files, journals, a project's defaults.

Each function returns a reader of bytes that writes them into an otherwise valid folder, and most
return seeds too.
"""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from ckpttool.cli.app import main
from ckpttool.diffing.baseline import _ignores
from ckpttool.diffing.options import DiffOptions
from ckpttool.formats import deepspeed as deepspeed_reader
from ckpttool.formats.opening import open_checkpoint
from ckpttool.io import transaction

DEEPSPEED = Path(__file__).parents[1] / "data" / "deepspeed-0.19.8"
Reader = Callable[[bytes], object]


# Rank files


def _of_rank(rank: int) -> bytes:
    """Save the file of one of two ranks, without running the other."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
    try:
        mesh, buffer = init_device_mesh("cpu", (2,)), io.BytesIO()
        sharded = DTensor.from_local(torch.ones(2, 3) + rank, mesh, [Shard(0)])
        torch.save(
            {
                "model": {
                    "w": sharded,
                    "b": DTensor.from_local(torch.ones(2), mesh, [Replicate()]),
                },
                "n": 3,
            },
            buffer,
        )
        return buffer.getvalue()
    finally:
        dist.destroy_process_group()


def rank_file(folder: Path) -> Reader:
    """Fuzz the first of two rank files; the second is valid."""

    def read(data: bytes) -> object:
        if not folder.exists():
            folder.mkdir()
            (folder / "rank_1.pt").write_bytes(_of_rank(1))
        (folder / "rank_0.pt").write_bytes(data)
        return open_checkpoint(str(folder / "rank_*.pt")).sections

    return read


def rank_files() -> list[bytes]:
    return [_of_rank(0)]


# DeepSpeed


def deepspeed(folder: Path, stage: int, name: str) -> Reader:
    """Fuzz one file of a folder of that ZeRO stage; the others are read only once."""
    read_file = deepspeed_reader.read_file
    once = cache(read_file)

    def read(data: bytes) -> object:
        if not folder.exists():
            shutil.copytree(_of_stage(stage), folder)
        (folder / name).write_bytes(data)
        cached = lambda path: (read_file if path.endswith(name) else once)(path)  # noqa: E731
        with patch.object(deepspeed_reader, "read_file", cached):
            return open_checkpoint(str(folder)).sections

    return read


def deepspeed_file(stage: int, name: str) -> Callable[[], list[bytes]]:
    return lambda: [(_of_stage(stage) / name).read_bytes()]


def _of_stage(stage: int) -> Path:
    return DEEPSPEED / f"zero-{stage}" / "global_step2"


# Journals


def _edited(folder: Path) -> tuple[Path, bytes]:
    """Return a file that was edited in place, and its undo journal."""
    folder.mkdir()
    path = folder / "m.safetensors"
    save_file({"a.w": torch.ones(4), "b": torch.zeros(2, 2)}, path)
    assert main(["remap", str(path), "--rule", "a.{x} => z.{x}", "--in-place", "--quiet"]) == 0
    return path, transaction.record_of(path).read_bytes()


def undo_journal(folder: Path) -> tuple[Reader, Callable[[], list[bytes]]]:
    """Fuzz the undo journal of an edit in place; undo must not write to any other file."""
    original: dict[str, bytes] = {}

    def seeds() -> list[bytes]:
        shutil.rmtree(folder, ignore_errors=True)
        path, record = _edited(folder)
        (folder / "other").write_bytes(b"kept")
        original["file"] = path.read_bytes()
        return [record]

    def read(data: bytes) -> object:
        path = folder / "m.safetensors"
        path.write_bytes(original["file"])
        record = transaction.record_of(path)
        record.write_bytes(data)
        transaction.undo_edit(path, fsync=False)
        assert (folder / "other").read_bytes() == b"kept"
        return None

    return read, seeds


# Configuration of a project


def ignore_file(path: Path) -> Reader:
    """Fuzz the file that `--ignore-file` names."""

    def read(data: bytes) -> object:
        path.write_bytes(data)
        return _ignores(DiffOptions(ignore_file=str(path)))

    return read


IGNORED = (
    b"# list\nmissing model.norm.* # initialized\nshape,dtype re:(a+)+b #"
    b" intended\nunexpected *.bias # no bias\n"
)
