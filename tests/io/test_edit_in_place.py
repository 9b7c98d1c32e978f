"""Edits in place: only names are written, nothing is lost at any moment, and the way back gives the same bytes."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import ckpttool
from ckpttool.cli.app import main
from ckpttool.io import edit_journal, patch
from command import Run

LONG = "z." + "a.much.longer.name." * 300


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    save_file({"a.w": torch.arange(9_000.0), "a.b": torch.ones(3), "c": torch.zeros(2)}, "in.safetensors")
    return Path("in.safetensors")


def way(run: Run, path: Path, rule: str, *more: str) -> dict[str, object]:
    status, out, said = run("remap", path, "--rule", rule, "--in-place", "--format", "json", *more)
    assert status == 0, said
    found: dict[str, object] = json.loads(out)["written"]
    return found


def moves(folder: Path) -> bool:
    """Whether the file system of the folder moves data by whole blocks."""
    with open(folder / "probe", "w+b") as file:
        file.write(bytes(8192))
        file.flush()
        try:
            patch._fallocate(file.fileno(), patch._INSERT, 0, 4096)
        except OSError:
            return False
        finally:
            os.unlink(folder / "probe")
    return True


def records(folder: Path) -> list[str]:
    return [name for name in os.listdir(folder) if "ckpttool" in name]


def test_a_rename_writes_the_header_alone(source: Path, run: Run) -> None:
    state, old = source.stat(), source.read_bytes()
    found = way(run, source, "a.{x} => z.{x}")
    assert found["way"] == "edited"
    assert isinstance(found["bytes"], int)
    assert found["bytes"] < 500
    assert source.stat().st_ino == state.st_ino
    assert source.stat().st_size == state.st_size
    assert load_file(source)["z.w"].tolist() == list(range(9_000))
    assert run("remap", source, "--undo")[0] == 0
    assert source.read_bytes() == old
    status, _, said = run("remap", source, "--undo")
    assert status == 2
    assert "nothing to undo" in said


def test_a_header_that_grows_moves_the_data_by_whole_blocks(source: Path, run: Run) -> None:
    old, inode = source.read_bytes(), source.stat().st_ino
    found = way(run, source, f"a.{{x}} => {LONG}{{x}}")
    assert load_file(source)[LONG + "w"].tolist() == list(range(9_000))
    assert (found["way"] == "edited") == moves(Path()) == (source.stat().st_ino == inode)
    if found["way"] == "copied":
        assert "extents" in str(found["reason"])
        pytest.skip("this file system moves no blocks")
    assert (source.stat().st_size - len(old)) % 4096 == 0
    assert run("remap", source, "--undo")[0] == 0
    assert source.read_bytes() == old


def test_the_inverse_rename_gives_the_same_bytes(source: Path, run: Run) -> None:
    old = source.read_bytes()
    way(run, source, f"a.{{x}} => {LONG}{{x}}")
    way(run, source, f"{LONG}{{x}} => a.{{x}}")
    assert source.read_bytes() == old
    assert records(Path()) == []


def test_metadata_is_names_too(source: Path, run: Run) -> None:
    found = ckpttool.remap(str(source), in_place=True, rule=["a.w => a.W"])
    assert found.written is not None
    assert found.written.way == "edited"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: os.link(path, "other"), "second name"),
        (lambda path: path.chmod(0o440), "read-only"),
    ],
)
def test_what_is_written_anew_all_the_same(source: Path, run: Run, make: Callable[[Path], object], words: str) -> None:
    make(source)
    old = source.read_bytes()
    assert words in str(way(run, source, "a.{x} => z.{x}")["reason"])
    assert "z.w" in load_file(source)
    assert not Path("other").exists() or Path("other").read_bytes() == old


def test_a_link_is_followed(source: Path, run: Run) -> None:
    Path("blobs").mkdir()
    source.rename("blobs/x.safetensors")
    source.symlink_to("blobs/x.safetensors")
    assert way(run, source, "a.{x} => z.{x}")["way"] == "edited"
    assert source.is_symlink()
    assert "z.w" in load_file("blobs/x.safetensors")
    assert run("remap", source, "--undo")[0] == 0
    assert "a.w" in load_file("blobs/x.safetensors")


def test_what_changed_since_is_not_undone(source: Path, run: Run) -> None:
    way(run, source, "a.{x} => z.{x}")
    save_file({"other": torch.ones(5)}, source)
    before = source.read_bytes()
    status, _, said = run("remap", source, "--undo")
    assert status == 2
    assert "has changed since" in said
    assert source.read_bytes() == before


def test_undo_stands_alone(source: Path, run: Run) -> None:
    assert run("remap", source, "--undo", "--rule", "a => b")[0] == 2
    assert run("remap", f"{source}::x", "--undo")[0] == 2
    assert run("remap", source, "--copy", "-o", "b.safetensors")[0] == 2


def test_who_has_the_file_mapped_keeps_its_tensors(source: Path, run: Run) -> None:
    """A header that fits leaves the data alone; where it does not, the file is written beside the mapped one."""
    with safe_open(source, "pt") as mapped:
        tensor = mapped.get_tensor("a.w")
        assert way(run, source, "a.{x} => z.{x}")["way"] == "edited"
        found = way(run, source, f"z.{{x}} => {LONG}{{x}}")
        assert found["way"] == "copied"
        assert "mapped" in str(found["reason"])
        assert tensor.tolist() == list(range(9_000))
    assert LONG + "w" in load_file(source)


# A process or a machine that dies


def dies_at(step: str, line: list[str]) -> None:
    """Runs the line in a process that is killed as soon as `step` of the edit has been done."""

    def child() -> None:
        call = getattr(patch, step)

        def once(*args: object, **how: object) -> None:
            call(*args, **how)
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(patch, step, once)
        main(line)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


READERS: dict[str, Callable[[str], object]] = {
    "inspect": lambda path: main(["inspect", path]),
    "diff": lambda path: main(["diff", path, path]),
    "library": ckpttool.open_checkpoint,
    "trying to": lambda path: main(["remap", path, "--dry-run"]),
    "as a folder": lambda path: main(["inspect", "."]),
}


@pytest.mark.parametrize("reader", READERS)
def test_whatever_reads_it_next_finds_the_old_file(source: Path, reader: str) -> None:
    old = source.read_bytes()
    dies_at("apply", ["remap", str(source), "--rule", f"a.{{x}} => {LONG}{{x}}", "--in-place"])
    if not moves(Path()):
        pytest.skip("this file system moves no blocks")
    assert source.read_bytes() != old
    assert len(records(Path())) == 1
    READERS[reader](str(source))
    assert source.read_bytes() == old
    assert records(Path()) == []


def test_behind_a_link_too(source: Path) -> None:
    Path("blobs").mkdir()
    source.rename("blobs/x.safetensors")
    source.symlink_to("blobs/x.safetensors")
    old = source.read_bytes()
    dies_at("apply", ["remap", str(source), "--rule", "a.{x} => z.{x}", "--in-place"])
    assert source.read_bytes() != old
    assert main(["inspect", str(source)]) == 0
    assert source.read_bytes() == old


def test_a_machine_that_died_while_the_data_was_moved(source: Path) -> None:
    """What ext4 and XFS leave when only the last extents were moved: the same call, further on in the file."""
    if not moves(Path()):
        pytest.skip("this file system moves no blocks")
    old = source.read_bytes()
    for at in (4096, 8192, 32768):
        dies_at("_move", ["remap", str(source), "--rule", f"a.{{x}} => {LONG}{{x}}", "--in-place"])
        with open(source, "r+b") as file:
            added = source.stat().st_size - len(old)
            patch._fallocate(file.fileno(), patch._COLLAPSE, 0, added)
            patch._fallocate(file.fileno(), patch._INSERT, at, added)
        assert source.read_bytes() != old
        assert main(["inspect", str(source)]) == 0
        assert source.read_bytes() == old


def test_a_file_that_took_its_place_is_left_alone(source: Path, run: Run) -> None:
    dies_at("apply", ["remap", str(source), "--rule", "a.{x} => z.{x}", "--in-place"])
    os.unlink(source)
    save_file({"other": torch.ones(50_000)}, source)
    other = source.read_bytes()
    status, _, said = run("inspect", source)
    assert status == 2
    assert "not the file that an interrupted edit was of" in said
    assert source.read_bytes() == other
    os.system(said.split("a whole one: ")[1].strip())
    assert run("inspect", source)[0] == 0


@pytest.mark.parametrize("name", ["../out", "/etc/hosts", "in.safetensors/x", "", ".."])
def test_a_journal_that_leads_out_of_its_folder(source: Path, run: Run, name: str) -> None:
    dies_at("apply", ["remap", str(source), "--rule", "a.{x} => z.{x}", "--in-place"])
    (journal,) = (Path(name) for name in records(Path()))
    line, rest = journal.read_bytes().split(b"\n", 1)
    value = json.loads(line)
    value["files"][0]["name"] = name
    journal.write_bytes(json.dumps(value).encode() + b"\n" + rest)
    status, _, said = run("inspect", source)
    assert status == 2
    assert "cannot be read" in said


def test_two_processes_do_not_edit_at_once(source: Path, run: Run) -> None:
    with edit_journal._locked(source.resolve()):
        status, _, said = run("remap", source, "--rule", "a.{x} => z.{x}", "--in-place")
    assert status == 2
    assert "just being edited" in said
    assert "a.w" in load_file(source)


def test_shards_change_together(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_file({"a.w": torch.arange(9_000.0), "a.b": torch.ones(3), "c": torch.zeros(2)}, "in.safetensors")
    assert run("remap", "in.safetensors", "-o", "m/", "--max-shard-size", "20KB")[0] == 0
    shutil.copytree("m", "old")
    assert way(run, Path("m"), f"a.{{x}} => {LONG}{{x}}")["way"] == ("edited" if moves(tmp_path) else "copied")
    assert run("inspect", "m")[0] == 0
    assert run("diff", "m", "old")[0] == 1
    if moves(tmp_path):
        assert run("remap", "m", "--undo")[0] == 0
        for name in os.listdir("old"):
            assert Path("m", name).read_bytes() == Path("old", name).read_bytes()
