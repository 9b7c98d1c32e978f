"""A command opens each file once; a file that another one replaced is opened again."""

from __future__ import annotations

import json
import os
from collections import Counter
from itertools import count
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import ckpttool
from ckpttool import CkptError
from ckpttool.io import handles
from ckpttool.io.files import opened
from command import Run

STATE = {f"layers.{number}.weight": torch.full((64, 8), float(number)) for number in range(6)}
RENAME = ("--rule", "layers.{x*} => blocks.{x*}")


@pytest.fixture
def opens(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count by name how often a file is opened for reading."""
    counts: Counter[str] = Counter()
    plain = os.open

    def counted(path: Any, flags: int, *args: Any, **how: Any) -> int:
        if not flags & (os.O_WRONLY | os.O_RDWR | getattr(os, "O_DIRECTORY", 0)):
            counts[os.path.basename(os.fspath(path))] += 1
        return plain(path, flags, *args, **how)

    monkeypatch.setattr(os, "open", counted)
    return counts


def write(folder: Path, form: str) -> tuple[Path, set[str]]:
    """Write `STATE` in the form; return its path and the names of its files."""
    path = folder / form
    if form == "a.pt":
        torch.save(STATE, path)
    elif form == "old.pt":
        torch.save(STATE, path, _use_new_zipfile_serialization=False)
    elif form == "a.dcp":
        dcp.save({"model": STATE}, checkpoint_id=path)
    else:
        save_file(STATE, folder / "a.safetensors")
        if form == "shards":
            ckpttool.convert(str(folder / "a.safetensors"), f"{path}/", max_shard_size="5kB")
    return path, {own.name for own in path.iterdir()} if path.is_dir() else {path.name}


@pytest.mark.parametrize("form", ["a.safetensors", "a.pt", "old.pt", "shards", "a.dcp"])
@pytest.mark.parametrize("command", ["inspect", "stats", "remap", "diff"])
def test_a_command_opens_each_file_once(
    tmp_path: Path, run: Run, opens: Counter[str], form: str, command: str
) -> None:
    path, names = write(tmp_path, form)
    out = tmp_path / ("out" if path.is_dir() else "out.safetensors")
    lines = {
        "inspect": ("inspect", path),
        "stats": ("inspect", path, "--stats"),
        "remap": ("remap", path, *RENAME, "-o", f"{out}/" if path.is_dir() else out),
        "diff": ("diff", path, path, "--values"),
    }
    opens.clear()
    assert run(*lines[command]).status == 0
    assert {name: count for name, count in opens.items() if name in names and count > 1} == {}
    assert not handles._kept


def test_only_some_files_stay_open(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, opens: Counter[str]
) -> None:
    path, names = write(tmp_path, "shards")
    monkeypatch.setattr(handles, "_MOST", 2)
    most = 0
    plain = handles.acquire

    def counted(path: str, **how: Any) -> handles.Handle:
        nonlocal most
        handle = plain(path, **how)
        most = max(most, len(handles._kept))
        return handle

    monkeypatch.setattr(handles, "acquire", counted)
    assert run("inspect", path, "--stats").status == 0
    assert most == 2
    assert len(names) > 3


def test_another_file_at_the_path_is_opened(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"first")
    with handles.kept():
        with opened(str(path)) as file:
            (tmp_path / "b").write_bytes(b"second")
            os.replace(tmp_path / "b", path)
            assert file.read() == b"first"
            with opened(str(path)) as other:
                assert other.read() == b"second"
            assert file.read_at(0, 5) == b"first"
        path.unlink()
        with pytest.raises(CkptError, match="No such file"), opened(str(path)):
            pass
    assert not handles._kept


def test_two_readers_of_a_file_have_their_own_positions(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(bytes(range(10)))
    with handles.kept(), opened(str(path)) as first, opened(str(path)) as second:
        assert first.read(4) == bytes(range(4))
        assert second.read(2) == bytes(range(2))
        assert first.read() == bytes(range(4, 10))
        second.seek(8)
        assert second.read(5) == bytes([8, 9])
        assert second.read() == b""


def test_files_are_closed_after_errors(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    path.write_bytes(b"PK\3\4 not a checkpoint")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(CkptError):
            ckpttool.open_checkpoint(str(path))
        with pytest.raises(CkptError), opened(str(tmp_path)):
            pass
    assert len(os.listdir("/proc/self/fd")) == before


def test_files_of_a_replaced_folder_are_closed(tmp_path: Path, run: Run) -> None:
    """NFS keeps a removed file that is open, so its folder could not be removed."""
    path, names = write(tmp_path, "shards")
    with handles.kept():
        assert len(ckpttool.open_checkpoint(str(path)).sections[0].tensors) == len(STATE)
        assert {Path(own).name for own in handles._kept} >= names - {"model.safetensors.index.json"}
        ckpttool.remap(str(tmp_path / "a.safetensors"), f"{path}/", force=True, rule=[RENAME[1]])
        assert not [own for own in handles._kept if own.startswith(f"{path}/")]


def test_shards_are_opened_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind NFS, an open file is several requests: those of many shards overlap, and each shard
    is opened once.
    """
    state = {f"layers.{number}.weight": torch.zeros(2) for number in range(12)}
    paths = []
    weight_map = {}
    for number, (key, tensor) in enumerate(state.items()):
        path = tmp_path / f"model-{number + 1:05}-of-00012.safetensors"
        save_file({key: tensor}, path)
        weight_map[key] = path.name
        paths.append(str(path))
    index = {"metadata": {}, "weight_map": weight_map}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))

    opened: list[str] = []
    turns = count()
    first_two = Barrier(2)
    open_file = handles._opened

    def open_late(path: str, pipes: bool) -> int:
        opened.append(path)
        if path in paths and next(turns) < 2:
            first_two.wait(timeout=60)  # breaks if the files are opened one after the other
        return open_file(path, pipes)

    monkeypatch.setattr(handles, "_opened", open_late)
    monkeypatch.setattr(handles, "_FEW", 2)
    with handles.kept():
        handles.look_ahead(dict.fromkeys(paths, 8))
        assert ckpttool.open_checkpoint(str(tmp_path)).section("").keys == [*state]
    assert not first_two.broken
    assert sorted(path for path in opened if path in paths) == sorted(paths)


def test_announced_file_that_is_missing(tmp_path: Path) -> None:
    with handles.kept():
        handles.look_ahead({str(tmp_path / f"{number}.pt"): 8 for number in range(9)})
