"""Folders behind URLs: nothing in them is replaced, and the store copies what it has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from safetensors.torch import save, save_file

import ckpttool
from ckpttool import CkptError
from ckpttool.core.checkpoint import Lazy
from ckpttool.io.pieces import Link, Piece
from ckpttool.io.preflight import check_file, check_folder
from ckpttool.io.remote import forget
from ckpttool.io.write_remote import write_folder

OUT = "memory://folders/m"


@pytest.fixture
def fs() -> Iterator[Any]:
    """Return a store with a folder of two files."""
    fs = fsspec.filesystem("memory")
    for name in ("shard", "mine"):
        fs.pipe_file(f"/folders/m/{name}", name.encode())
    forget(OUT)
    yield fs
    fs.rm("/folders", recursive=True)
    forget(OUT)


def test_existing_file_is_kept(fs: Any) -> None:
    """This also holds for files created after the check, while the new files are written; what was
    written goes.
    """
    check_folder(f"{OUT}/new/", (), "elsewhere.pt", force=False, in_place=False)
    fs.pipe_file("/folders/m/new/index", b"theirs")
    with pytest.raises(
        CkptError, match="new/index exists: another process has written it meanwhile"
    ):
        write_folder({"shard": [Piece(b"x")], "index": [Piece(b"y")]}, f"{OUT}/new/")
    assert fs.find("/folders/m/new") == ["/folders/m/new/index"]

    def late() -> list[bytes]:
        fs.pipe_file("/folders/m/late/index", b"theirs")
        return [b"y"]

    files = {"shard": [Piece(b"x")], "index": [Piece(Lazy(1, late))]}
    with pytest.raises(
        CkptError, match="late/index exists: another process has written it meanwhile"
    ):
        write_folder(files, f"{OUT}/late/")
    assert fs.find("/folders/m/late") == ["/folders/m/late/index"]
    assert fs.cat_file("/folders/m/late/index") == b"theirs"


def test_new_file_keeps_the_other_files(fs: Any) -> None:
    write_folder({"added": [Piece(b"x")]}, OUT)
    assert fs.find("/folders/m") == ["/folders/m/added", "/folders/m/mine", "/folders/m/shard"]
    assert fs.cat_file("/folders/m/added") == b"x"


def test_refused_outputs(fs: Any) -> None:
    how = {"force": True, "in_place": False}
    with pytest.raises(CkptError, match="m is a folder"):
        check_file(OUT, [], **how)
    with pytest.raises(CkptError, match="mine is a file"):
        check_folder(f"{OUT}/mine", (), "elsewhere.pt", **how)
    for source in (f"{OUT}/", f"{OUT}/shard"):
        with pytest.raises(CkptError, match="is the folder of the source"):
            check_folder(OUT, (), source, **how)
    check_folder(OUT, (), "memory://folders/elsewhere/shard", **how)


# Links


def test_linked_file_is_copied_within_the_store_if_possible(
    fs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "local").write_bytes(b"local")
    files = {
        "a": Link(f"{OUT}/mine"),
        "b": Link(str(tmp_path / "local")),
        "c": Link(f"file://{tmp_path}/local"),
    }
    copied, plain = list[str](), MemoryFileSystem.cp_file

    def counted(fs: Any, source: str, place: str, **how: Any) -> None:
        copied.append(source)
        plain(fs, source, place)

    monkeypatch.setattr(MemoryFileSystem, "cp_file", counted)
    write_folder(files, f"{OUT}/linked")
    assert [fs.cat_file(f"/folders/m/linked/{name}") for name in "abc"] == [
        b"mine",
        b"local",
        b"local",
    ]
    assert copied.count("/folders/m/mine") == 1


def test_a_checkpoint_that_came_meanwhile_is_not_mixed_with_another_one(
    fs: Any, tmp_path: Path
) -> None:
    """Also if its files have other names, and OUT was looked at before."""
    source = tmp_path / "a.safetensors"
    save_file({"a": torch.ones(4), "b": torch.ones(4)}, source)
    with pytest.raises(CkptError, match="holds no checkpoint"):
        ckpttool.inspect(OUT)
    fs.pipe_file("/folders/m/model.safetensors", save({"z": torch.ones(1)}))
    before = fs.find("/folders/m")
    with pytest.raises(CkptError, match=r"holds a checkpoint: model\.safetensors"):
        ckpttool.convert(str(source), f"{OUT}/", max_shard_size="20B")
    assert fs.find("/folders/m") == before


def test_a_file_that_changes_while_the_store_copies_it_is_refused(
    fs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = MemoryFileSystem.cp_file

    def changing(store: Any, source: str, place: str, **how: Any) -> None:
        plain(store, source, place)
        fs.pipe_file(source, b"longer than before")

    monkeypatch.setattr(MemoryFileSystem, "cp_file", changing)
    with pytest.raises(CkptError, match="mine was changed while it was read"):
        write_folder({"a": Link(f"{OUT}/mine")}, f"{OUT}/linked")
    assert not fs.exists("/folders/m/linked/a")
