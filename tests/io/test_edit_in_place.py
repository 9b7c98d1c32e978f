"""Edits in place: only names are written, nothing is lost at any moment, and the way back gives the same bytes."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import ckpttool
from ckpttool.cli.app import main
from ckpttool.core.errors import CkptError
from ckpttool.formats.registry import FORMATS
from ckpttool.io import patch, syscalls, temporary, transaction, undo
from command import Run, notes_in
from places import DATA

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
            syscalls.fallocate(file.fileno(), patch._INSERT, 0, 4096)
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
    assert run("undo", source)[0] == 0
    assert source.read_bytes() == old
    status, _, said = run("undo", source)
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
    assert run("undo", source)[0] == 0
    assert source.read_bytes() == old


def test_the_inverse_rename_gives_the_same_bytes_and_can_be_undone(source: Path, run: Run) -> None:
    old = source.read_bytes()
    way(run, source, f"a.{{x}} => {LONG}{{x}}")
    renamed = source.read_bytes()
    way(run, source, f"{LONG}{{x}} => a.{{x}}")
    assert source.read_bytes() == old
    assert run("undo", source).status == 0
    assert source.read_bytes() == renamed
    assert records(Path()) == []


@pytest.mark.parametrize("metadata", [{}, {"format": "pt"}, {"note": "x" * 5000}])
def test_metadata_is_changed_like_names(source: Path, metadata: dict[str, str]) -> None:
    save_file(load_file(source), source, {"was": "there"})
    found = ckpttool.open_checkpoint(str(source))
    asked = FORMATS["safetensors"].layout_in_place(replace(found, metadata=metadata), source.name)
    done = undo.edit(asked, ".", keep=True, fsync=True)
    if done.way == "copied" and len(str(metadata)) > 5000:
        assert not moves(Path())
        return
    assert done.way == "edited"
    with safe_open(source, "pt") as file:
        assert (file.metadata() or {}) == metadata
        assert file.get_tensor("a.w").tolist() == list(range(9_000))


@pytest.mark.parametrize(
    ("make", "words"),
    [(lambda path: os.link(path, "other"), "second name"), (lambda path: path.chmod(0o440), "read-only")],
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
    assert run("undo", source)[0] == 0
    assert "a.w" in load_file("blobs/x.safetensors")


def test_what_changed_since_is_not_undone(source: Path, run: Run) -> None:
    way(run, source, "a.{x} => z.{x}")
    save_file({"other": torch.ones(5)}, source)
    before = source.read_bytes()
    status, _, said = run("undo", source)
    assert status == 2
    assert "has changed since" in said
    assert source.read_bytes() == before


def test_undo_stands_alone(source: Path, run: Run) -> None:
    assert run("undo", f"{source}::x")[0] == 2


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


WAYS_OUT: dict[str, Callable[[str], object]] = {
    "undo": lambda path: main(["undo", path]),
    "library": ckpttool.undo,
    "of the folder": lambda path: main(["undo", "."]),
    "the next writing command": lambda path: main(["remap", path, "--in-place", "--rule", "none.{x} => z.{x}"]),
}


@pytest.mark.parametrize("way_out", WAYS_OUT)
def test_each_way_out_gives_the_old_file_back(source: Path, way_out: str) -> None:
    old = source.read_bytes()
    dies_at("apply", ["remap", str(source), "--rule", f"a.{{x}} => {LONG}{{x}}", "--in-place"])
    if not moves(Path()):
        pytest.skip("this file system moves no blocks")
    assert source.read_bytes() != old
    assert len(records(Path())) == 1
    WAYS_OUT[way_out](str(source))
    assert source.read_bytes() == old
    assert records(Path()) == []


@pytest.fixture
def living() -> Iterator[int]:
    """The number of another process that lives."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process.pid
        process.kill()


@pytest.mark.parametrize("what", ["files of a folder", "a file"])
@pytest.mark.parametrize(
    ("other", "age", "goes_on"),
    [
        ({}, 0, False),
        ({}, 1e6, False),  # slow, but alive
        ({"pid": 1 << 23}, 0, True),
        ({"started": 1}, 0, True),  # another process had the number
        ({"boot": "00000000"}, 0, True),  # the machine was started anew
        *(({far: value}, 1e6, False) for far, value in (("host", "00000000"), ("space", 1))),  # nothing is known of it
    ],
)
def test_what_a_process_began_is_left_to_it_as_long_as_it_lives(
    source: Path, run: Run, living: int, what: str, other: dict[str, Any], age: float, goes_on: bool
) -> None:
    owner = replace(temporary._owner(living), **other)
    name = f".in.{owner}-00000000.ckpttool."
    if what == "a file":
        dies_at("apply", ["remap", str(source), "--rule", "a.{x} => z.{x}", "--in-place"])
        journal = next(Path().glob(".*.edit")).rename(f"{name}edit")
    else:
        row = transaction.Replaced(str(source), f"{name}tmp", (0, 0))
        source.rename(str(row.old))
        save_file({"a.w": torch.zeros(1)}, source)
        journal = Path(f"{name}edit")
        journal.write_bytes(transaction.text([row]))
    os.utime(journal, (time.time() - age,) * 2)
    before = source.read_bytes()
    status, _, said = run("undo", source)
    if not goes_on:
        assert (status, source.read_bytes(), journal.exists()) == (2, before, True)
        assert ("on another machine or in another container" if other else "just being") in said
        status = run("undo", source, "--force").status
    assert (status, journal.exists()) == ((2, True) if other == {} else (0, False))


def test_behind_a_link_too(source: Path) -> None:
    Path("blobs").mkdir()
    source.rename("blobs/x.safetensors")
    source.symlink_to("blobs/x.safetensors")
    old = source.read_bytes()
    dies_at("apply", ["remap", str(source), "--rule", "a.{x} => z.{x}", "--in-place"])
    assert source.read_bytes() != old
    assert main(["inspect", str(source)]) == 2
    assert main(["undo", str(source)]) == 0
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
            syscalls.fallocate(file.fileno(), patch._COLLAPSE, 0, added)
            syscalls.fallocate(file.fileno(), patch._INSERT, at, added)
        assert source.read_bytes() != old
        assert main(["undo", str(source)]) == 0
        assert source.read_bytes() == old


def test_a_file_that_took_its_place_is_left_alone(source: Path, run: Run) -> None:
    dies_at("apply", ["remap", str(source), "--rule", "a.{x} => z.{x}", "--in-place"])
    os.unlink(source)
    save_file({"other": torch.ones(50_000)}, source)
    other = source.read_bytes()
    status, _, said = run("undo", source)
    assert status == 2
    assert "not the file that an interrupted edit was of" in said
    assert source.read_bytes() == other
    os.system(said.split("has replaced it: ")[1].strip())
    assert run("inspect", source)[0] == 0


@pytest.mark.parametrize("name", ["../out", "/etc/hosts", "in.safetensors/x", "", "..", "a\0", "\ud800", "a" * 300])
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


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("start", "1e999"),  # no integer
        ("length", "9" * 40),  # more than there is
        ("name", '"gone.safetensors"'),
        ("name", "[" * 100_000),  # deeper than Python goes
    ],
)
def test_a_way_back_that_says_what_is_not_so_is_refused(source: Path, run: Run, field: str, value: str) -> None:
    assert run("remap", source, "--rule", "a.{x} => z.{x}", "--in-place").status == 0
    record, edited = transaction.record_of(source), source.read_bytes()
    line, rest = record.read_bytes().split(b"\n", 1)
    record.write_bytes(
        re.sub(rb'("%s"): [^,]*' % field.encode(), rb"\1: " + value.encode(), line, count=1) + b"\n" + rest
    )
    status, _, said = run("undo", source)
    assert status == 2
    assert ("has changed since" if "gone" in value else "cannot be read") in said
    os.system(said.split(": ")[-1].strip())  # the hint: rm FILE
    assert source.read_bytes() == edited
    assert "nothing to undo" in run("undo", source).err


def test_a_way_back_that_was_changed_leads_back_or_nowhere(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every number of the record, of every file in it, by every kind of change: the old bytes, or those that are there.

    The record of shards: of two safetensors, whose headers are written, and of an index, which is written whole.
    """
    monkeypatch.chdir(tmp_path)
    save_file({"a.w": torch.arange(9_000.0), "b": torch.ones(3)}, "in.safetensors")
    assert run("convert", "in.safetensors", "-o", "m/", "--max-shard-size", "20KB").status == 0
    old = {path: path.read_bytes() for path in Path("m").iterdir()}
    way(run, Path("m"), "a.{x} => longer.{x}")
    (record,) = Path("m").glob(".*.undo")
    edited = {path: path.read_bytes() for path in old}
    line, _, rest = record.read_bytes().partition(b"\n")

    def led_back(value: Any, rest: bytes) -> bool:
        record.write_bytes(json.dumps(value).encode() + b"\n" + rest)
        try:
            ckpttool.undo("m", no_fsync=True)
        except CkptError as error:
            said = error.message
        else:
            assert {path: path.read_bytes() for path in old} == old
            for path, data in edited.items():
                path.write_bytes(data)
            return True
        assert "cannot be read" in said or "has changed since" in said
        assert {path: path.read_bytes() for path in old} == edited
        return False

    assert led_back(json.loads(line), rest)
    count = len(json.loads(line)["files"])
    assert count == 3
    for number in range(count):
        for field in ("before", "start", "length", "shift", "head", "tail"):
            for change in (1, -1, 4096, -4096, 1 << 40, -(1 << 40)):
                value = json.loads(line)
                value["files"][number][field] += change
                assert not led_back(value, rest), (number, field, change)
        for at, which in enumerate(("before", "index", "sample", "content")):
            value = json.loads(line)
            value["files"][number]["hashes"][at] = "00" * 16
            assert led_back(value, rest) == (which in ("before", "index"))
    for changed in (rest + b"x", rest[:-1]):
        assert not led_back(json.loads(line), changed)
    assert not led_back(json.loads(line) | {"schema": "ckpttool.edit/2"}, rest)


def test_what_was_changed_since_in_the_same_place_is_not_undone(source: Path, run: Run) -> None:
    """A file of the same size and the same data, in which one name is another."""
    way(run, source, "a.{x} => z.{x}")
    for old, new in ((b'"z.w"', b'"y.w"'), (torch.arange(4.0).numpy().tobytes(), bytes(16))):
        edited = source.read_bytes()
        source.write_bytes(edited.replace(old, new, 1))
        changed = source.read_bytes()
        assert changed != edited
        status, _, said = run("undo", source)
        assert (status, source.read_bytes()) == (2, changed)
        assert "has changed since" in said
        source.write_bytes(edited)
    assert run("undo", source).status == 0


def test_shards_in_folders_of_their_own_are_written_anew(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("m/sub").mkdir(parents=True)
    save_file({"a.w": torch.arange(9.0)}, "m/sub/one.safetensors")
    save_file({"a.b": torch.ones(3)}, "m/two.safetensors")
    index = {"metadata": {"total_size": 48}, "weight_map": {"a.w": "sub/one.safetensors", "a.b": "two.safetensors"}}
    Path("m/model.safetensors.index.json").write_text(json.dumps(index))
    assert way(run, Path("m"), "a.{x} => z.{x}")["way"] == "copied"
    assert load_file("m/sub/one.safetensors")["z.w"].tolist() == list(range(9))
    assert {entry.key for entry in ckpttool.open_checkpoint("m").sections[0].tensors} == {"z.w", "z.b"}


def test_two_processes_do_not_edit_at_once(source: Path, run: Run) -> None:
    with transaction.locked(source.resolve()):
        status, _, said = run("remap", source, "--rule", "a.{x} => z.{x}", "--in-place")
    assert status == 2
    assert "just being edited" in said
    assert "a.w" in load_file(source)


def test_shards_change_together(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_file({"a.w": torch.arange(9_000.0), "a.b": torch.ones(3), "c": torch.zeros(2)}, "in.safetensors")
    assert run("convert", "in.safetensors", "-o", "m/", "--max-shard-size", "20KB")[0] == 0
    shutil.copytree("m", "old")
    assert way(run, Path("m"), f"a.{{x}} => {LONG}{{x}}")["way"] == ("edited" if moves(tmp_path) else "copied")
    assert LONG + "w" in {entry.key for entry in ckpttool.open_checkpoint("m").sections[0].tensors}
    if moves(tmp_path):
        assert run("undo", "m")[0] == 0
        for name in os.listdir("old"):
            assert Path("m", name).read_bytes() == Path("old", name).read_bytes()


def test_shards_of_which_one_cannot_be_edited_are_written_anew(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was edited before it goes back, and is then read although its clock has gone on."""
    monkeypatch.chdir(tmp_path)
    state = {"a.w": torch.arange(9_000.0), "a.b": torch.arange(9_000.0) + 1}
    save_file(state, "in.safetensors")
    assert run("convert", "in.safetensors", "-o", "m/", "--max-shard-size", "40KB")[0] == 0
    real, moved = syscalls.fallocate, []

    def fallocate(descriptor: int, mode: int, start: int, length: int) -> None:
        moved.append(mode)
        if moved.count(patch._INSERT) == 2 and mode == patch._INSERT:
            raise OSError(errno.EOPNOTSUPP, "not here")
        real(descriptor, mode, start, length)

    monkeypatch.setattr(syscalls, "fallocate", fallocate)
    assert way(run, Path("m"), f"a.{{x}} => {LONG}{{x}}")["way"] == "copied"
    found = {key: value for path in Path("m").glob("*.safetensors") for key, value in load_file(path).items()}
    assert found.keys() == {LONG + "w", LONG + "b"}
    assert all(torch.equal(found[LONG + name], state["a." + name]) for name in "wb")


def test_shards_that_are_links_are_left_alone(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a cache of Hugging Face, whose snapshots share their blobs."""
    monkeypatch.chdir(tmp_path)
    save_file({"a.w": torch.arange(9_000.0), "a.b": torch.ones(3)}, "in.safetensors")
    Path("cache/snapshots/one").mkdir(parents=True)
    assert run("convert", "in.safetensors", "-o", "cache/blobs/", "--max-shard-size", "20KB")[0] == 0
    blobs = {path: path.read_bytes() for path in Path("cache/blobs").iterdir()}
    for path in blobs:
        Path("cache/snapshots/one", path.name).symlink_to(f"../../blobs/{path.name}")
    assert "share" in str(way(run, Path("cache/snapshots/one"), "a.{x} => z.{x}")["reason"])
    assert {path: path.read_bytes() for path in blobs} == blobs
    assert run("inspect", "cache/snapshots/one")[0] == 0
    assert run("undo", "cache/snapshots/one")[0] == 0
    assert all(Path("cache/snapshots/one", path.name).is_symlink() for path in blobs)


# torch zip


def saved(tmp_path: Path, state: object) -> Path:
    torch.save(state, tmp_path / "in.pt")
    return tmp_path / "in.pt"


WEIGHTS = torch.arange(3_000.0)
STATES = {
    "tied": {"a.w": WEIGHTS, "a.t": WEIGHTS, "b": torch.ones(2)},
    "views": {"a.w": WEIGHTS[100:200], "a.v": WEIGHTS[::2], "b": torch.zeros(0)},
    "nested": {"model": {"a.w": WEIGHTS, "b": torch.ones(1)}, "epoch": 3, "loose": torch.ones(5)},
    "parameters": {"a.w": torch.nn.Parameter(WEIGHTS), "b": torch.nn.Parameter(torch.ones(2), requires_grad=False)},
    "odd ones": {"a.s": torch.eye(3).to_sparse(), "a.q": torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)},
    "a model": {f"a.{key}": value for key, value in torch.nn.Linear(30, 40).state_dict().items()},
}


@pytest.mark.filterwarnings("ignore:.*quantized")
@pytest.mark.parametrize("name", STATES)
def test_a_new_pickle_and_a_new_directory_behind_the_old_ones(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """`torch.load` reads it by all its ways; what is dead goes with the next copy; cutting the file off undoes it."""
    monkeypatch.setenv("TORCH_SERIALIZATION_DEBUG", "1")  # torch then checks the places of storages that it computes
    path = saved(tmp_path, STATES[name])
    old = path.read_bytes()
    rule = "a.{x} => longer.name.{x}"
    assert run("remap", path, "--rule", rule, "-o", tmp_path / "copy.pt")[0] == 0
    assert way(run, path, rule)["way"] == "edited"
    assert path.read_bytes()[: len(old)] == old
    assert zipfile.ZipFile(path).testzip() is None
    want = torch.load(tmp_path / "copy.pt", weights_only=False)
    for mmap in (False, True):
        assert str(torch.load(path, weights_only=False, mmap=mmap)) == str(want)
    if name != "odd ones":
        torch.load(path, map_location="meta", weights_only=False)
    assert run("diff", path, tmp_path / "copy.pt", "--values")[0] == 0
    ckpttool.write(ckpttool.open_checkpoint(str(path)), str(tmp_path / "compact.pt"))
    assert (tmp_path / "compact.pt").read_bytes() == (tmp_path / "copy.pt").read_bytes()
    assert way(run, path, "longer.name.{x} => a.{x}")["way"] == "edited"
    assert path.read_bytes() == old


@pytest.mark.parametrize("name", ["training-torch-2.5.1.pt", "training-torch-2.9.1.pt", "lightning-2.6.6.ckpt"])
def test_files_of_other_versions(tmp_path: Path, run: Run, name: str) -> None:
    """All keys of the model get another name, the optimizer's ids stay: as in a copy, and back to the byte."""
    path = tmp_path / name
    shutil.copy(DATA / name, path)
    rule = r"re:(.*) => other.\1"
    assert run("remap", path, "--rule", rule, "-o", tmp_path / f"copy{path.suffix}")[0] == 0
    assert way(run, path, rule)["way"] == "edited"
    assert run("diff", path, tmp_path / f"copy{path.suffix}", "--values")[0] == 0
    assert path.read_bytes() != (DATA / name).read_bytes()
    assert way(run, path, r"re:other\.(.*) => \1")["way"] == "edited"
    assert path.read_bytes() == (DATA / name).read_bytes()


def test_edits_of_edits(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Renamed, a storage in the middle left out, renamed again: the file grows by names alone, and reads right."""
    monkeypatch.setenv("TORCH_SERIALIZATION_DEBUG", "1")
    path = saved(tmp_path, {name: torch.full((5_000,), at) for at, name in enumerate("abcd")})
    old = path.stat().st_size
    way(run, path, "a => z")
    status, out, _ = run("remap", path, "--drop", "b", "--in-place", "--format", "json")
    assert status == 0
    assert json.loads(out)["written"]["way"] == "edited"
    assert "ckpttool convert" in str(notes_in(json.loads(out)))
    way(run, path, "c => y")
    assert old < path.stat().st_size < old + 5_000
    for mmap in (False, True):
        found = torch.load(path, mmap=mmap)
        assert {key: int(value[-1]) for key, value in found.items()} == {"z": 0, "y": 2, "d": 3}
    assert torch.load(path, map_location="meta")["d"].shape == (5_000,)
    assert run("convert", path, "--in-place")[0] == 0
    assert path.stat().st_size < old - 19_000
    assert list(torch.load(path)) == ["z", "y", "d"]


def test_archives_beyond_four_gibibytes(tmp_path: Path, run: Run) -> None:
    """Sparse ones: the new records lie where only zip64 reaches."""
    if shutil.disk_usage(tmp_path).free < 6 << 30:
        pytest.skip("no room")
    with torch.serialization.skip_data():
        torch.save({"a.w": torch.empty(5 << 28), "b": torch.empty(3)}, tmp_path / "in.pt")
    path = tmp_path / "in.pt"
    size = path.stat().st_size
    assert size > 5 << 30
    assert path.stat().st_blocks * 512 < 1 << 20
    assert way(run, path, "a.{x} => z.{x}")["way"] == "edited"
    assert path.stat().st_size < size + 4096
    assert torch.load(path, mmap=True)["z.w"].shape == (5 << 28,)
    assert run("undo", path)[0] == 0
    assert path.stat().st_size == size


def test_torch_files_that_die_half_written(tmp_path: Path, run: Run) -> None:
    path = saved(tmp_path, STATES["nested"])
    old = path.read_bytes()
    for step in ("write_all", "apply"):
        dies_at(step, ["remap", str(path), "--rule", "a.{x} => z.{x}", "--in-place"])
        assert run("inspect", path)[0] == 2
        assert run("undo", path)[0] == 0
        assert path.read_bytes() == old


@pytest.mark.parametrize("name", ["a.safetensors", "a.pt"])
def test_an_edit_that_changes_nothing_keeps_the_way_back(tmp_path: Path, run: Run, name: str) -> None:
    path = tmp_path / name
    state = {"a": torch.ones(2)}
    torch.save(state, path) if name.endswith(".pt") else save_file(state, path)
    before = path.read_bytes()
    assert way(run, path, "a => b")["way"] == "edited"
    changed, inode = path.read_bytes(), path.stat().st_ino
    assert run("remap", path, "--in-place", "--rule", "b => b").status == 1
    assert (path.read_bytes(), path.stat().st_ino) == (changed, inode)
    assert main(["undo", str(path)]) == 0
    assert path.read_bytes() == before


def test_an_edit_that_is_not_allowed_is_no_reason_to_write_anew(
    source: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot be moved is another matter."""
    old, plain = source.read_bytes(), patch.apply
    for rule, number, copied in (
        ("a.{x} => z.{x}", errno.EPERM, False),
        (f"a.{{x}} => {LONG}{{x}}", errno.EIO, False),
        (f"a.{{x}} => {LONG}{{x}}", errno.EPERM, True),
    ):
        refusals = [OSError(number, os.strerror(number))]

        def refused(*args: Any, refusals: list[OSError] = refusals, **how: Any) -> None:
            if refusals:
                raise refusals.pop()
            plain(*args, **how)

        monkeypatch.setattr(patch, "apply", refused)
        status, _, said = run("remap", source, "--rule", rule, "--in-place")
        assert (status, source.read_bytes() == old) == ((0, False) if copied else (2, True))
        assert copied or f"in.safetensors: {os.strerror(number)}\nhint: it is as it was" in said


def test_where_not_even_going_back_is_possible_the_next_command_does(
    source: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, plain = source.resolve().read_bytes(), syscalls.write_all

    def failing(descriptor: int, data: bytes) -> None:
        if os.fstat(descriptor).st_ino == source.stat().st_ino:
            plain(descriptor, data[:9])
            raise OSError(errno.EIO, "Input/output error")
        plain(descriptor, data)

    with monkeypatch.context() as inside:
        inside.setattr(patch, "write_all", failing)
        for line in (["remap", source, "--rule", "a.{x} => z.{x}", "--in-place"], ["undo", source]):
            status, _, said = run(*line)
            assert status == 2
            assert "is only partly written, and cannot be restored now: Input/output error" in said
    assert run("undo", source).status == 0
    assert source.read_bytes() == old


def test_behind_a_url_nothing_is_undone(run: Run) -> None:
    status, _, said = run("undo", "memory://nowhere/a.safetensors")
    assert status == 2
    assert "nothing to undo\nhint: files of a URL are never edited in place" in said


def test_a_file_that_only_seems_torn_is_said_to_be_another(source: Path, run: Run) -> None:
    """Blocks of the right number that are none, in a file of the right size: only the bytes tell."""
    if not moves(Path()):
        pytest.skip("this file system moves no blocks")
    old = source.stat().st_size
    dies_at("_move", ["remap", str(source), "--rule", f"a.{{x}} => {LONG}{{x}}", "--in-place"])
    added = source.stat().st_size - old
    with open(source, "wb") as file:
        file.write(bytes(8192))
        file.truncate(8192 + added)
        file.seek(8192 + added)
        file.write(b"x" * (old - 8192))
    status, _, said = run("undo", source)
    assert status == 2
    assert "not the file that an interrupted edit was of" in said


def test_a_record_of_what_no_edit_does_is_not_believed(source: Path) -> None:
    """Data that is moved, with bytes behind it."""
    with open(source, "rb") as file:
        back = patch.inverse(file.fileno(), patch.Patch(source.stat().st_size, 4096, 10, -4096, b"", b""))
    assert back.tail
    row = transaction.Patched(source.name, transaction.Change(back, b"", b""), b"", b"")
    with pytest.raises(CkptError, match="it contradicts itself"):
        transaction.parse(transaction.text([row]), source)


def test_what_would_write_much_is_written_anew(source: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patch, "_MOST", 10)
    assert way(run, source, "a.{x} => z.{x}")["way"] == "copied"
    assert "z.w" in load_file(source)
