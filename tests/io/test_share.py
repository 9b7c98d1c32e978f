"""Reflink copies on real file systems in images; needs root, loop devices, mkfs.xfs and
mkfs.btrfs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from command import Run

MAKERS = {"xfs": ["mkfs.xfs", "-q"], "btrfs": ["mkfs.btrfs", "-q"]}
RENAME = ("--rule", "a.{x} => a.longer.name.than.before.{x}")
NBYTES = 32 << 20


@pytest.fixture(params=MAKERS)
def disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    maker, image, place = MAKERS[request.param], tmp_path / "image", tmp_path / "disk"
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    if os.geteuid() != 0 or shutil.which(maker[0], path=path) is None:
        pytest.skip(f"needs root and {maker[0]}")
    with open(image, "wb") as file:
        file.truncate(400 << 20)
    place.mkdir()
    subprocess.run(
        [*maker, image], check=True, env={**os.environ, "PATH": path}, stdout=subprocess.DEVNULL
    )
    if subprocess.run(["mount", "-o", "loop", image, place], stderr=subprocess.DEVNULL).returncode:
        pytest.skip(f"no loop device can be mounted as {request.param}")
    yield place
    subprocess.run(["umount", place], check=True)


def used(place: Path) -> int:
    """Return the number of used bytes of the file system."""
    subprocess.run(["sync", "-f", place], check=True)
    stats = os.statvfs(place)
    return (stats.f_blocks - stats.f_bfree) * stats.f_frsize


@pytest.mark.parametrize("metadata", [{}, {"note": "x" * 100}])
def test_renamed_safetensors_shares_its_data(
    disk: Path, run: Run, metadata: dict[str, str]
) -> None:
    tensor = torch.arange(NBYTES // 4, dtype=torch.int32)
    save_file({"a.w": tensor, "a.b": torch.ones(3)}, disk / "in.safetensors", metadata)
    before = used(disk)
    assert run("remap", disk / "in.safetensors", *RENAME, "-o", disk / "out.safetensors")[0] == 0
    assert used(disk) - before < NBYTES // 8
    os.unlink(disk / "in.safetensors")
    assert torch.equal(load_file(disk / "out.safetensors")["a.longer.name.than.before.w"], tensor)


def test_renamed_torch_zip_shares_its_storages(disk: Path, run: Run) -> None:
    state = {
        "a.b": torch.ones(3),
        "a.w": torch.arange(NBYTES // 8),
        "a.v": torch.arange(NBYTES // 8) + 1,
    }
    torch.save(state, disk / "in.pt")
    before = used(disk)
    assert run("remap", disk / "in.pt", *RENAME, "-o", disk / "out.pt")[0] == 0
    assert used(disk) - before < NBYTES // 8
    back = ("--rule", "a.longer.name.than.before.{x} => a.{x}")
    assert run("remap", disk / "out.pt", *back, "-o", disk / "back.pt")[0] == 0
    assert used(disk) - before < NBYTES // 8
    assert (disk / "back.pt").read_bytes() == (disk / "in.pt").read_bytes()
    os.unlink(disk / "in.pt")
    result = torch.load(disk / "out.pt", mmap=True)
    assert all(
        torch.equal(result[f"a.longer.name.than.before.{key[2:]}"], value)
        for key, value in state.items()
    )
    assert zipfile.ZipFile(disk / "out.pt").testzip() is None


def test_reflink_copy_has_the_bytes_of_a_plain_copy(disk: Path, tmp_path: Path, run: Run) -> None:
    save_file({"a.w": torch.arange(NBYTES // 4), "a.b": torch.ones(3)}, disk / "in.safetensors")
    assert run("remap", disk / "in.safetensors", *RENAME, "-o", disk / "out.safetensors")[0] == 0
    assert (
        run("remap", disk / "in.safetensors", *RENAME, "-o", tmp_path / "out.safetensors")[0] == 0
    )
    assert (disk / "out.safetensors").read_bytes() == (tmp_path / "out.safetensors").read_bytes()
    back = ("--rule", "a.longer.name.than.before.{x} => a.{x}")
    assert run("remap", disk / "out.safetensors", *back, "-o", disk / "back.safetensors")[0] == 0
    assert (disk / "back.safetensors").read_bytes() == (disk / "in.safetensors").read_bytes()


@pytest.mark.parametrize("verified", [False, True])
def test_bytes_are_read_instead_of_shared_if_they_are_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run, verified: bool
) -> None:
    """On any file system: a clone is a copy here."""
    tensor, shared = torch.arange(1 << 19, dtype=torch.int32), list[int]()
    save_file({"a.w": tensor}, tmp_path / "in.safetensors")
    content = (tmp_path / "in.safetensors").read_bytes()

    def clone(descriptor: int, span: Any, at: int) -> bool:
        shared.append(os.pwrite(descriptor, content[span.offset : span.offset + span.length], at))
        return True

    monkeypatch.setattr("ckpttool.io.fill._clone", clone)
    words = ["--verify"] if verified else []
    out = tmp_path / "out.safetensors"
    assert run("remap", tmp_path / "in.safetensors", *RENAME, "-o", out, *words)[0] == 0
    assert torch.equal(load_file(out)["a.longer.name.than.before.w"], tensor)
    assert bool(shared) is not verified


def test_later_write_to_the_source_does_not_change_the_copy(disk: Path, run: Run) -> None:
    save_file({"a.w": torch.arange(NBYTES // 4)}, disk / "in.safetensors")
    assert run("remap", disk / "in.safetensors", *RENAME, "-o", disk / "out.safetensors")[0] == 0
    old = (disk / "out.safetensors").read_bytes()
    with open(disk / "in.safetensors", "r+b") as file:
        file.seek(NBYTES // 2)
        file.write(b"changed" * 1000)
    assert (disk / "out.safetensors").read_bytes() == old
