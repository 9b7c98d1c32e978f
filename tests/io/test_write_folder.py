"""Folders appear complete or not at all; an existing one keeps its unrelated files."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

import fsspec
import pytest

from ckpttool.core.checkpoint import Lazy, Span
from ckpttool.core.errors import CkptError
from ckpttool.io.pieces import Digest, Link, Piece, Ready
from ckpttool.io.write import Contents, WriteOptions, preflight_folder, write_folder


def failing_data() -> Lazy:
    def produce() -> list[bytes]:
        raise CkptError("broken", hint="")

    return Lazy(4, produce)


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_new_folder_has_the_default_mode(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write_folder({"sub/a": [Piece(b"xx")], "index": [Piece(b"y")]}, str(out))
    (tmp_path / "other").mkdir()
    assert names(out) == ["index", "sub/a"]
    assert out.stat().st_mode == (tmp_path / "other").stat().st_mode
    assert sorted(os.listdir(tmp_path)) == ["other", "out"]


def test_failed_write_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(CkptError, match="broken"):
        write_folder({"a": [Piece(b"x")], "b": [Piece(failing_data())]}, str(tmp_path / "out"))
    assert list(tmp_path.iterdir()) == []


def test_failed_write_leaves_an_existing_folder_unchanged(tmp_path: Path) -> None:
    (tmp_path / "index").write_bytes(b"old")
    with pytest.raises(CkptError, match="broken"):
        write_folder({"index": [Piece(failing_data())]}, str(tmp_path), stale={"index"})
    assert (tmp_path / "index").read_bytes() == b"old"
    assert names(tmp_path) == ["index"]


def test_old_checkpoint_is_replaced_and_other_files_stay(tmp_path: Path) -> None:
    for name in ("index", "shard-1", "shard-2", "README", "sub/x"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"old")
    write_folder({"shard-1": [Piece(b"new")], "index": [Piece(b"new")]}, str(tmp_path), stale={"shard-1", "shard-2"})
    assert names(tmp_path) == ["README", "index", "shard-1", "sub/x"]
    assert (tmp_path / "shard-1").read_bytes() == (tmp_path / "index").read_bytes() == b"new"


def test_linked_file_is_copied(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.write_bytes(b"bytes")
    out = tmp_path / "out"
    write_folder({"d": Link(str(data)), "index": [Piece(b"i")]}, str(out))
    assert (out / "d").read_bytes() == b"bytes"
    assert not (out / "d").samefile(data)


def test_file_linked_to_itself_is_kept(tmp_path: Path) -> None:
    (tmp_path / "d").write_bytes(b"bytes")
    (tmp_path / ".metadata").write_bytes(b"old")
    files: dict[str, list[Piece] | Link] = {"d": Link(str(tmp_path / "d")), ".metadata": [Piece(b"new")]}
    write_folder(files, str(tmp_path), stale={"d", ".metadata"})
    assert names(tmp_path) == [".metadata", "d"]
    assert (tmp_path / ".metadata").read_bytes() == b"new"


def test_output_larger_than_free_space_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"")
    huge = Piece(Span(str(tmp_path / "x"), 0, 1 << 60))
    with pytest.raises(CkptError, match="are free"):
        write_folder({"a": [huge]}, str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_preflight(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    out = tmp_path / "out"
    out.mkdir()

    def check(out: Path, present: Collection[str] = (), source: str = "elsewhere.pt", **how: bool) -> None:
        preflight_folder(str(out), present, source, **{"force": False, "in_place": False, **how})

    check(out)
    check(tmp_path / "new")
    check(out, source="s3://bucket/a.pt")
    check(out, {"model.safetensors"}, force=True)
    with pytest.raises(CkptError, match="is a file"):
        check(tmp_path / "file")
    with pytest.raises(CkptError, match="no such folder"):
        check(tmp_path / "none" / "out")
    with pytest.raises(CkptError, match="holds a checkpoint"):
        check(out, {"model.safetensors"})
    for source in (str(out), str(out / "model.safetensors")):
        with pytest.raises(CkptError, match="folder of the source"):
            check(out, {"model.safetensors"}, source, force=True)
        check(out, {"model.safetensors"}, source, in_place=True)


def test_linked_url_is_downloaded(tmp_path: Path) -> None:
    fs = fsspec.filesystem("memory")
    fs.pipe_file("/links/a", b"data")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "a").write_bytes(b"old")
    write_folder({"a": Link("memory://links/a")}, str(tmp_path / "out"))
    assert (tmp_path / "out" / "a").read_bytes() == b"data"
    fs.rm("/links", recursive=True)


def test_ready_file_is_moved_without_a_digest(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"data")
    (tmp_path / "made").write_bytes(b"made")
    digests: dict[str, Digest] = {}
    ready = Ready(str(tmp_path / "made"), ())
    files: Contents = {"a": Link(str(tmp_path / "a")), "made": ready, "index": [Piece(b"i")]}
    write_folder(files, str(tmp_path / "out"), WriteOptions(digests=digests))
    assert [(tmp_path / "out" / name).read_bytes() for name in files] == [b"data", b"made", b"i"]
    assert {Path(path).name for path in digests} == {"a", "index"}
    assert not (tmp_path / "made").exists()
