"""In-place edits: only names are written, no data is lost at any moment, and undo restores the same
bytes.
"""

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
from ckpttool import CkptError
from ckpttool.formats.registry import FORMATS
from ckpttool.io import patch, syscalls, temporary, transaction, undo
from command import Run, main, notes_in
from places import DATA

LONG = "z." + "a.much.longer.name." * 300


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    save_file(
        {"a.w": torch.arange(9_000.0), "a.b": torch.ones(3), "c": torch.zeros(2)}, "in.safetensors"
    )
    return Path("in.safetensors")


def remap_in_place(run: Run, path: Path, rule: str, *more: str) -> dict[str, object]:
    status, out, err = run("remap", path, "--rule", rule, "--in-place", "--format", "json", *more)
    assert status == 0, err
    result: dict[str, object] = json.loads(out)["written"]
    return result


def record_names(folder: Path) -> list[str]:
    return [name for name in os.listdir(folder) if "ckpttool" in name]


def test_rename_writes_only_the_header(source: Path, run: Run) -> None:
    state, old = source.stat(), source.read_bytes()
    result = remap_in_place(run, source, "a.{x} => z.{x}")
    assert isinstance(result["bytes"], int)
    assert result["bytes"] < 500
    assert source.stat().st_ino == state.st_ino
    assert source.stat().st_size == state.st_size
    assert load_file(source)["z.w"].tolist() == list(range(9_000))
    assert run("undo", source)[0] == 0
    assert source.read_bytes() == old
    status, _, err = run("undo", source)
    assert status == 2
    assert "nothing to undo" in err


@pytest.mark.parametrize("metadata", [{}, {"format": "pt"}])
def test_metadata_is_edited_in_place(source: Path, metadata: dict[str, str]) -> None:
    save_file(load_file(source), source, {"was": "there, and longer"})
    result = ckpttool.open_checkpoint(str(source))
    layout = FORMATS["safetensors"].layout_in_place(replace(result, metadata=metadata), source.name)
    assert layout is not None
    undo.edit(layout, ".", fsync=True)
    with safe_open(source, "pt") as file:
        assert (file.metadata() or {}) == metadata
        assert file.get_tensor("a.w").tolist() == list(range(9_000))


def test_symlink_is_followed(source: Path, run: Run) -> None:
    Path("blobs").mkdir()
    source.rename("blobs/x.safetensors")
    source.symlink_to("blobs/x.safetensors")
    remap_in_place(run, source, "a.{x} => z.{x}")
    assert source.is_symlink()
    assert "z.w" in load_file("blobs/x.safetensors")
    assert run("undo", source)[0] == 0
    assert "a.w" in load_file("blobs/x.safetensors")


def test_undo_refuses_a_file_that_was_replaced(source: Path, run: Run) -> None:
    remap_in_place(run, source, "a.{x} => z.{x}")
    save_file({"other": torch.ones(5)}, source)
    before = source.read_bytes()
    status, _, err = run("undo", source)
    assert status == 2
    assert "has changed since" in err
    assert source.read_bytes() == before


def test_undo_does_not_accept_a_section(source: Path, run: Run) -> None:
    assert run("undo", f"{source}::x")[0] == 2


# Killed processes and crashed machines


def kill_after(step: str, line: list[str]) -> None:
    """Run the command line in a process that is killed as soon as it has finished `step` of the
    edit.
    """

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


RECOVERIES: dict[str, Callable[[str], object]] = {
    "undo": lambda path: main(["undo", path]),
    "library": ckpttool.undo,
    "undo of the folder": lambda path: main(["undo", "."]),
    "the next writing command": lambda path: main(
        ["remap", path, "--in-place", "--rule", "none.{x} => z.{x}"]
    ),
}


@pytest.mark.parametrize("recovery", RECOVERIES)
def test_each_recovery_restores_the_old_file(source: Path, recovery: str) -> None:
    old = source.read_bytes()
    kill_after("apply", ["remap", str(source), "--rule", "a.{x} => z.{x}", "--in-place"])
    assert source.read_bytes() != old
    assert len(record_names(Path())) == 1
    RECOVERIES[recovery](str(source))
    assert source.read_bytes() == old
    assert record_names(Path()) == []


@pytest.fixture
def live_pid() -> Iterator[int]:
    """Return the pid of another live process."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process.pid
        process.kill()


@pytest.mark.parametrize("edited", ["folder", "file"])
@pytest.mark.parametrize(
    ("other", "age", "recovers"),
    [
        ({}, 0, False),
        ({}, 1e6, False),  # slow, but alive
        ({"pid": 1 << 23}, 0, True),
        ({"started": 1}, 0, True),  # another process had this pid
        ({"boot": "00000000"}, 0, True),  # the machine was rebooted
        # its state is unknown
        *(({far: value}, 1e6, False) for far, value in (("host", "00000000"), ("space", 1))),
    ],
)
def test_edit_is_recovered_only_if_its_process_is_dead(
    source: Path,
    run: Run,
    live_pid: int,
    edited: str,
    other: dict[str, Any],
    age: float,
    recovers: bool,
) -> None:
    owner = replace(temporary._owner(live_pid), **other)
    name = f".in.{owner}-00000000.ckpttool."
    if edited == "file":
        kill_after("apply", ["remap", str(source), "--rule", "a.{x} => z.{x}", "--in-place"])
        journal = next(Path().glob(".*.edit")).rename(f"{name}edit")
    else:
        row = transaction.Replaced(str(source), f"{name}tmp", transaction.FileState(0, 0))
        source.rename(str(row.old))
        save_file({"a.w": torch.zeros(1)}, source)
        journal = Path(f"{name}edit")
        journal.write_bytes(transaction.record_bytes([row]))
    os.utime(journal, (time.time() - age,) * 2)
    before = source.read_bytes()
    status, _, err = run("undo", source)
    if not recovers:
        assert (status, source.read_bytes(), journal.exists()) == (2, before, True)
        assert ("on another machine or in another container" if other else "is being edited") in err
        status = run("undo", source, "--force").status
    assert (status, journal.exists()) == ((2, True) if other == {} else (0, False))


def test_interrupted_edit_behind_a_symlink_is_undone(source: Path) -> None:
    Path("blobs").mkdir()
    source.rename("blobs/x.safetensors")
    source.symlink_to("blobs/x.safetensors")
    old = source.read_bytes()
    kill_after("apply", ["remap", str(source), "--rule", "a.{x} => z.{x}", "--in-place"])
    assert source.read_bytes() != old
    assert main(["inspect", str(source)]) == 2
    assert main(["undo", str(source)]) == 0
    assert source.read_bytes() == old


def test_undo_leaves_a_replacement_of_the_torn_file_alone(source: Path, run: Run) -> None:
    kill_after("apply", ["remap", str(source), "--rule", "a.{x} => z.{x}", "--in-place"])
    os.unlink(source)
    save_file({"other": torch.ones(50_000)}, source)
    other = source.read_bytes()
    status, _, err = run("undo", source)
    assert status == 2
    assert "not the file that an interrupted edit was of" in err
    assert source.read_bytes() == other
    os.system(err.split("has replaced it: ")[1].strip())
    assert run("inspect", source)[0] == 0


def test_journal_with_an_invalid_file_name_is_refused(source: Path, run: Run) -> None:
    kill_after("apply", ["remap", str(source), "--rule", "a.{x} => z.{x}", "--in-place"])
    (journal,) = (Path(name) for name in record_names(Path()))
    line, rest = journal.read_bytes().split(b"\n", 1)
    value = json.loads(line)
    for name in ("../out", "/etc/hosts", "in.safetensors/x", "", "..", "a\0", "\ud800", "a" * 300):
        value["files"][0]["name"] = name
        journal.write_bytes(json.dumps(value).encode() + b"\n" + rest)
        status, _, err = run("inspect", source)
        assert status == 2
        assert "cannot be read" in err


JOURNAL = ".in.safetensors.00000000-00000000-1-2-3-00000000.ckpttool.edit"
RECORD = ".in.safetensors.ckpttool.undo"


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_folder(path: Path) -> None:
    path.mkdir()


def make_link(path: Path) -> None:
    os.mkfifo("pipe")
    path.symlink_to("pipe")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
@pytest.mark.parametrize("make", [make_pipe, make_folder, make_link])
@pytest.mark.parametrize("name", [JOURNAL, RECORD])
def test_journal_or_record_that_is_no_file_is_refused_at_once(
    source: Path, run: Run, name: str, make: Callable[[Path], None]
) -> None:
    """Reading a named pipe would wait for a process that writes to it."""
    make(source.with_name(name))
    lines = [["undo", str(source)]]
    if name == JOURNAL:
        lines += [
            ["inspect", str(source)],
            ["remap", str(source), "--rule", "a.{x} => z.{x}", "--in-place"],
        ]
    for line in lines:
        status, _, err = run(*line)
        assert status == 2
        assert f"{name} cannot be read: it is not a regular file" in err
    os.system(err.split("remove it: ")[1].strip())
    assert run("inspect", source).status == 0
    assert "nothing to undo" in run("undo", source).err


@pytest.mark.parametrize("state", [[], [1], [1, 2, 3], 0, 5, "x", [None, 1], {"a": 1}, [[1], 2]])
@pytest.mark.parametrize("name", [JOURNAL, RECORD])
def test_damaged_state_in_a_journal_or_record_is_refused(
    source: Path, run: Run, name: str, state: object
) -> None:
    row = {"name": source.name, "old": None, "state": state}
    record = {"schema": "ckpttool.record/1", "files": [row]}
    source.with_name(name).write_text(json.dumps(record) + "\n")
    commands = ["undo", "inspect"] if name == JOURNAL else ["undo"]
    for command in commands:
        status, _, err = run(command, source)
        assert status == 2
        assert f"{name} cannot be read: " in err
        assert "look at it, and remove it: rm " in err


def test_damaged_journal_next_to_a_folder_does_not_concern_it(source: Path, run: Run) -> None:
    source.with_name(JOURNAL).write_text("damaged")
    other = source.with_name("other")
    other.mkdir()
    save_file({"a.w": torch.ones(1)}, other / "in.safetensors")
    for _ in range(2):  # into a new folder, and into one that exists
        words = ("remap", other / "in.safetensors", "-o", "out/", "--rule", "a.{x} => z.{x}")
        assert run(*words, "--force").status == 0
    assert load_file("out/model.safetensors").keys() == {"z.w"}


def test_undo_of_a_missing_file_says_so(source: Path, run: Run) -> None:
    status, _, err = run("undo", source.with_name("absent.safetensors"))
    assert (status, "no such file: " in err, "nothing to undo" in err) == (2, True, False)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("start", "1e999"),  # not an integer
        ("length", "9" * 40),  # larger than the file
        ("name", '"gone.safetensors"'),
        ("name", "[" * 100_000),  # deeper than Python's recursion limit
    ],
)
def test_undo_record_with_a_wrong_field_is_refused(
    source: Path, run: Run, field: str, value: str
) -> None:
    assert run("remap", source, "--rule", "a.{x} => z.{x}", "--in-place").status == 0
    record, edited = transaction.record_of(source), source.read_bytes()
    line, rest = record.read_bytes().split(b"\n", 1)
    record.write_bytes(
        re.sub(rb'("%s"): [^,]*' % field.encode(), rb"\1: " + value.encode(), line, count=1)
        + b"\n"
        + rest
    )
    status, _, err = run("undo", source)
    assert status == 2
    assert ("is gone" if "gone" in value else "cannot be read") in err
    os.system(err.split(": ")[-1].strip())  # the hint: rm FILE
    assert source.read_bytes() == edited
    assert "nothing to undo" in run("undo", source).err


def test_modified_undo_record_restores_the_old_bytes_or_is_refused(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Change every number of the record of every file in several ways.

    The record covers two safetensors shards, of which only the headers were written, and an index
    that was rewritten.
    """
    monkeypatch.chdir(tmp_path)
    save_file({"a.w": torch.arange(9_000.0), "b": torch.ones(3)}, "in.safetensors")
    assert run("convert", "in.safetensors", "-o", "m/", "--max-shard-size", "20KB").status == 0
    old = {path: path.read_bytes() for path in Path("m").iterdir()}
    remap_in_place(run, Path("m"), "a.{x} => z.{x}")
    (record,) = Path("m").glob(".*.undo")
    edited = {path: path.read_bytes() for path in old}
    line, _, rest = record.read_bytes().partition(b"\n")

    def undo_with(value: Any, rest: bytes) -> bool:
        record.write_bytes(json.dumps(value).encode() + b"\n" + rest)
        try:
            ckpttool.undo("m", no_fsync=True)
        except CkptError as error:
            message = error.message
        else:
            assert {path: path.read_bytes() for path in old} == old
            for path, data in edited.items():
                path.write_bytes(data)
            return True
        assert "cannot be read" in message or "has changed since" in message
        assert {path: path.read_bytes() for path in old} == edited
        return False

    assert undo_with(json.loads(line), rest)
    count = len(json.loads(line)["files"])
    assert count == 3
    for number in range(count):
        for field in ("before", "start", "length", "head", "tail"):
            for change in (1, -1, 4096, -4096, 1 << 40, -(1 << 40)):
                value = json.loads(line)
                value["files"][number][field] += change
                assert not undo_with(value, rest), (number, field, change)
        for at, which in enumerate(("before", "index", "sample", "content")):
            value = json.loads(line)
            value["files"][number]["hashes"][at] = "00" * 16
            assert undo_with(value, rest) == (which in ("before", "index"))
    for changed in (rest + b"x", rest[:-1]):
        assert not undo_with(json.loads(line), changed)
    assert not undo_with(json.loads(line) | {"schema": "ckpttool.edit/2"}, rest)


def test_undo_refuses_a_file_with_changed_bytes(source: Path, run: Run) -> None:
    """The size is the same; one name, or some data, differs."""
    remap_in_place(run, source, "a.{x} => z.{x}")
    for old, new in ((b'"z.w"', b'"y.w"'), (torch.arange(4.0).numpy().tobytes(), bytes(16))):
        edited = source.read_bytes()
        source.write_bytes(edited.replace(old, new, 1))
        changed = source.read_bytes()
        assert changed != edited
        status, _, err = run("undo", source)
        assert (status, source.read_bytes()) == (2, changed)
        assert "has changed since" in err
        source.write_bytes(edited)
    assert run("undo", source).status == 0


def test_locked_file_is_not_edited(source: Path, run: Run) -> None:
    with transaction.locked(source.resolve()):
        status, _, err = run("remap", source, "--rule", "a.{x} => z.{x}", "--in-place")
    assert status == 2
    assert "is being edited" in err
    assert "a.w" in load_file(source)


def test_all_shards_are_edited_or_none(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_file(
        {"a.w": torch.arange(9_000.0), "a.b": torch.ones(3), "c": torch.zeros(2)}, "in.safetensors"
    )
    assert run("convert", "in.safetensors", "-o", "m/", "--max-shard-size", "20KB")[0] == 0
    shutil.copytree("m", "old")
    remap_in_place(run, Path("m"), "a.{x} => z.{x}")
    assert "z.w" in {entry.key for entry in ckpttool.open_checkpoint("m").sections[0].tensors}
    assert run("undo", "m")[0] == 0
    # one shard has no room
    assert run("remap", "m", "--in-place", "--rule", f"a.b => {LONG}b").status == 1
    for name in os.listdir("old"):
        assert Path("m", name).read_bytes() == Path("old", name).read_bytes()


def test_targets_of_symlinked_shards_are_not_edited(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the Hugging Face cache, in which snapshots share their blobs."""
    monkeypatch.chdir(tmp_path)
    save_file({"a.w": torch.arange(9_000.0), "a.b": torch.ones(3)}, "in.safetensors")
    Path("cache/snapshots/one").mkdir(parents=True)
    assert (
        run("convert", "in.safetensors", "-o", "cache/blobs/", "--max-shard-size", "20KB")[0] == 0
    )
    blobs = {path: path.read_bytes() for path in Path("cache/blobs").iterdir()}
    for path in blobs:
        Path("cache/snapshots/one", path.name).symlink_to(f"../../blobs/{path.name}")
    refused = run("remap", "cache/snapshots/one", "--rule", "a.{x} => z.{x}", "--in-place")
    assert (refused.status, "may share" in refused.err) == (1, True)
    assert {path: path.read_bytes() for path in blobs} == blobs
    assert all(Path("cache/snapshots/one", path.name).is_symlink() for path in blobs)


# torch zip


def save_state(tmp_path: Path, state: object) -> Path:
    torch.save(state, tmp_path / "in.pt")
    return tmp_path / "in.pt"


WEIGHTS = torch.arange(3_000.0)
STATES = {
    "tied": {"a.w": WEIGHTS, "a.t": WEIGHTS, "b": torch.ones(2)},
    "views": {"a.w": WEIGHTS[100:200], "a.v": WEIGHTS[::2], "b": torch.zeros(0)},
    "nested": {"model": {"a.w": WEIGHTS, "b": torch.ones(1)}, "epoch": 3, "loose": torch.ones(5)},
    "parameters": {
        "a.w": torch.nn.Parameter(WEIGHTS),
        "b": torch.nn.Parameter(torch.ones(2), requires_grad=False),
    },
    "unusual": {
        "a.s": torch.eye(3).to_sparse(),
        "a.q": torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8),
    },
    "a model": {f"a.{key}": value for key, value in torch.nn.Linear(30, 40).state_dict().items()},
}


@pytest.mark.filterwarnings("ignore:.*quantized")
@pytest.mark.parametrize("name", STATES)
def test_torch_zip_edit_appends_a_pickle_and_a_directory(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """`torch.load` reads it in every mode; a copy drops the unused records; truncating the file
    undoes the edit.
    """
    # torch then checks the storage offsets that it computes
    monkeypatch.setenv("TORCH_SERIALIZATION_DEBUG", "1")
    path = save_state(tmp_path, STATES[name])
    old = path.read_bytes()
    rule = "a.{x} => longer.name.{x}"
    assert run("remap", path, "--rule", rule, "-o", tmp_path / "copy.pt")[0] == 0
    remap_in_place(run, path, rule)
    assert path.read_bytes()[: len(old)] == old
    assert zipfile.ZipFile(path).testzip() is None
    expected = torch.load(tmp_path / "copy.pt", weights_only=False)
    for mmap in (False, True):
        assert str(torch.load(path, weights_only=False, mmap=mmap)) == str(expected)
    if name != "unusual":
        torch.load(path, map_location="meta", weights_only=False)
    assert run("diff", path, tmp_path / "copy.pt", "--values")[0] == 0
    ckpttool.write(ckpttool.open_checkpoint(str(path)), str(tmp_path / "compact.pt"))
    assert (tmp_path / "compact.pt").read_bytes() == (tmp_path / "copy.pt").read_bytes()
    remap_in_place(run, path, "longer.name.{x} => a.{x}")
    assert path.read_bytes() == old


@pytest.mark.parametrize(
    "name", ["training-torch-2.5.1.pt", "training-torch-2.9.1.pt", "lightning-2.6.6.ckpt"]
)
def test_files_of_other_torch_versions_are_edited_and_restored(
    tmp_path: Path, run: Run, name: str
) -> None:
    """All model keys are renamed and the optimizer ids stay, as in a copy; the inverse restores
    every byte.
    """
    path = tmp_path / name
    shutil.copy(DATA / name, path)
    rule = r"re:(.*) => other.\1"
    assert run("remap", path, "--rule", rule, "-o", tmp_path / f"copy{path.suffix}")[0] == 0
    remap_in_place(run, path, rule)
    assert run("diff", path, tmp_path / f"copy{path.suffix}", "--values")[0] == 0
    assert path.read_bytes() != (DATA / name).read_bytes()
    remap_in_place(run, path, r"re:other\.(.*) => \1")
    assert path.read_bytes() == (DATA / name).read_bytes()


def test_repeated_edits_of_a_torch_zip(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rename, drop a storage in the middle, rename again: the file grows only by the names and
    loads correctly.
    """
    monkeypatch.setenv("TORCH_SERIALIZATION_DEBUG", "1")
    path = save_state(tmp_path, {name: torch.full((5_000,), at) for at, name in enumerate("abcd")})
    old = path.stat().st_size
    remap_in_place(run, path, "a => z")
    status, out, _ = run("remap", path, "--drop", "b", "--in-place", "--format", "json")
    assert status == 0
    copy = next(
        note for note in notes_in(json.loads(out)) if "ckpttool convert" in note
    ).rpartition("ckpttool ")[2]
    remap_in_place(run, path, "c => y")
    assert old < path.stat().st_size < old + 5_000
    for mmap in (False, True):
        result = torch.load(path, mmap=mmap)
        assert {key: int(value[-1]) for key, value in result.items()} == {"z": 0, "y": 2, "d": 3}
    assert torch.load(path, map_location="meta")["d"].shape == (5_000,)
    assert run(*copy.split())[0] == 0
    copied = Path(copy.split()[-1])
    assert copied.stat().st_size < old - 19_000
    assert list(torch.load(copied)) == ["z", "y", "d"]


def test_torch_zip_over_4_gib_is_edited(tmp_path: Path, run: Run) -> None:
    """In a sparse file, the offsets of the new records need zip64."""
    if shutil.disk_usage(tmp_path).free < 6 << 30:
        pytest.skip("not enough disk space")
    with torch.serialization.skip_data():
        torch.save({"a.w": torch.empty(5 << 28), "b": torch.empty(3)}, tmp_path / "in.pt")
    path = tmp_path / "in.pt"
    size = path.stat().st_size
    assert size > 5 << 30
    assert path.stat().st_blocks * 512 < 1 << 20
    remap_in_place(run, path, "a.{x} => z.{x}")
    assert path.stat().st_size < size + 4096
    assert torch.load(path, mmap=True)["z.w"].shape == (5 << 28,)
    assert run("undo", path)[0] == 0
    assert path.stat().st_size == size


def test_half_written_torch_zip_is_undone(tmp_path: Path, run: Run) -> None:
    path = save_state(tmp_path, STATES["nested"])
    old = path.read_bytes()
    for step in ("write_all", "apply"):
        kill_after(step, ["remap", str(path), "--rule", "a.{x} => z.{x}", "--in-place"])
        assert run("inspect", path)[0] == 2
        assert run("undo", path)[0] == 0
        assert path.read_bytes() == old


@pytest.mark.parametrize("name", ["a.safetensors", "a.pt"])
def test_edit_without_changes_keeps_the_undo_record(tmp_path: Path, run: Run, name: str) -> None:
    path = tmp_path / name
    state = {"a": torch.ones(2)}
    torch.save(state, path) if name.endswith(".pt") else save_file(state, path)
    before = path.read_bytes()
    remap_in_place(run, path, "a => b")
    changed, inode = path.read_bytes(), path.stat().st_ino
    assert run("remap", path, "--in-place", "--rule", "b => b").status == 1
    assert (path.read_bytes(), path.stat().st_ino) == (changed, inode)
    assert main(["undo", str(path)]) == 0
    assert path.read_bytes() == before


def test_next_undo_restores_the_file_if_rollback_failed(
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
            status, _, err = run(*line)
            assert status == 2
            assert "is only partly written, and cannot be restored now: Input/output error" in err
    assert run("undo", source).status == 0
    assert source.read_bytes() == old


def test_undo_of_a_url_is_refused(run: Run) -> None:
    status, _, err = run("undo", "memory://nowhere/a.safetensors")
    assert status == 2
    assert "nothing to undo\nhint: files of a URL are never edited in place" in err


def test_contradictory_record_is_refused(source: Path) -> None:
    """The bytes before those that stay are not as many as the record says."""
    back = patch.Patch(source.stat().st_size, 4096, 10, b"", b"x")
    row = transaction.Patched(source.name, transaction.PatchRecord(back, b"", b""), b"", b"")
    with pytest.raises(CkptError, match="it contradicts itself"):
        transaction.parse(transaction.record_bytes([row]), source)


def test_change_of_many_bytes_is_refused(
    source: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patch, "_MOST", 10)
    done = run("remap", source, "--rule", "a.{x} => z.{x}", "--in-place")
    assert (done.status, "more changes than names" in done.err) == (1, True)
    assert "a.w" in load_file(source)


def test_failed_edit_leaves_the_file_as_it_was(
    source: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, plain = source.read_bytes(), patch.apply
    refusals = [OSError(errno.EIO, os.strerror(errno.EIO))]

    def refused(*args: Any, **how: Any) -> None:
        if refusals:
            raise refusals.pop()
        plain(*args, **how)

    monkeypatch.setattr(patch, "apply", refused)
    status, _, err = run("remap", source, "--rule", "a.{x} => z.{x}", "--in-place")
    assert (status, source.read_bytes() == old) == (2, True)
    assert f"in.safetensors: {os.strerror(errno.EIO)}\nhint: " in err
    assert "in.safetensors is as it was" in err
