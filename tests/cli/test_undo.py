"""`ckpttool undo` restores every in-place edit; of two concurrent edits only one succeeds."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import ckpttool
from command import Run, main
from places import DATA, DOCS

STATE = {"a.weight": torch.arange(2_000.0), "a.bias": torch.ones(3), "b.weight": torch.zeros(2, 2)}
RENAME = ("--rule", "a.{x} => z.{x}")
PROGRAM = DATA / "tagger-torch-2.9.1.pt2"


def sharded(ending: str) -> None:
    os.mkdir("in")
    names = {key: f"model-{i + 1:05}-of-00003.{ending}" for i, key in enumerate(STATE)}
    for key, name in names.items():
        (torch.save if ending == "bin" else save_file)({key: STATE[key]}, f"in/{name}")
    index = "pytorch_model.bin.index.json" if ending == "bin" else "model.safetensors.index.json"
    Path("in", index).write_text(json.dumps({"metadata": {}, "weight_map": names}))
    Path("in/config.json").write_text("{}")


def safetensors() -> None:
    save_file(STATE, "in.safetensors")
    os.chmod("in.safetensors", 0o640)


def one_file_in_a_folder() -> None:
    os.mkdir("in")
    save_file(STATE, "in/model.safetensors")
    Path("in/config.json").write_text("{}")


def zipped() -> None:
    torch.save({"model": STATE, "epoch": 3}, "in.pt")


# Name, which starts with the format's name in JSON -> function that makes the checkpoint, and the
# command line.
EDITS: dict[str, tuple[Callable[[], object], str]] = {
    "safetensors": (safetensors, "remap in.safetensors"),
    "safetensors of a folder": (one_file_in_a_folder, "remap in"),
    "torch_zip": (zipped, "remap in.pt"),
    "torch_zip, with a key dropped": (zipped, "remap in.pt --drop b.weight"),
    "sharded": (lambda: sharded("safetensors"), "remap in"),
    "sharded_bin": (lambda: sharded("bin"), "remap in"),
    "dcp": (lambda: dcp.save({"model": STATE, "step": 7}, checkpoint_id="in"), "remap in"),
    "dcp, with a key dropped": (
        lambda: dcp.save({"model": STATE, "step": 7}, checkpoint_id="in"),
        "remap in --drop b.weight",
    ),
}


def content(folder: Path = Path()) -> dict[str, tuple[int, bytes]]:
    return {
        str(path): (path.stat().st_mode, path.read_bytes() if path.is_file() else b"")
        for path in folder.rglob("*")
    }


def test_formats_page_lists_the_formats_edited_in_place() -> None:
    rows = [
        [cell.strip() for cell in row.split("|")]
        for row in (DOCS / "formats.md").read_text().splitlines()
    ]
    header = next(row for row in rows if "in place" in row)
    edited = {
        row[header.index("in JSON")].strip("`")
        for row in rows
        if len(row) == len(header) and row[header.index("in place")] == "yes"
    }
    assert edited == {name.split()[0].strip(",") for name in EDITS}


@pytest.mark.parametrize("name", EDITS)
def test_in_place_edit_can_be_undone(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    monkeypatch.chdir(tmp_path)
    make, line = EDITS[name]
    make()
    before = content()
    planned = run(*line.split(), *RENAME, "--in-place", "--dry-run", "--format", "json").data
    assert content() == before
    done = run(*line.split(), *RENAME, "--in-place", "--format", "json").data
    assert done["undo"]["command"] == planned["undo"]["command"]
    assert done["undo"]["bytes"] == planned["undo"]["bytes"]
    assert {name: file for name, file in content().items() if "ckpttool" not in name} != before
    assert main(shlex.split(done["undo"]["command"])[1:]) == 0
    assert content() == before
    status, _, err = run(*shlex.split(done["undo"]["command"])[1:])
    assert (status, "nothing to undo" in err) == (2, True)


def linked() -> None:
    safetensors()
    os.link("in.safetensors", "second")


def read_only() -> None:
    safetensors()
    os.chmod("in.safetensors", 0o440)


def legacy() -> None:
    torch.save(STATE, "in.pt", _use_new_zipfile_serialization=False)


def with_other_file() -> None:
    dcp.save({"model": STATE}, checkpoint_id="in")
    torch.save([1], "in/scaler.pt")


# The reason, and how the file and the command line are made.
REFUSED: list[tuple[str, Callable[[], object], str]] = [
    ("it has a second name (a hard link)", linked, "in.safetensors"),
    ("it is read-only", read_only, "in.safetensors"),
    ("its header has room for", safetensors, f"in.safetensors --rule b.{{x}}=>{'long.' * 30}{{x}}"),
    ("more than names would change", safetensors, "in.safetensors --drop b.weight"),
    ("the format has no place for new ones", legacy, "in.pt"),
    (
        "the format has no place for new ones",
        lambda: shutil.copy(PROGRAM, "in.pt2"),
        "in.pt2 --rule scale=>s",
    ),
    (
        "other files of the folder would be removed: scaler.pt",
        with_other_file,
        "in --drop scaler.pt",
    ),
]


@pytest.mark.parametrize(("reason", "make", "line"), REFUSED)
def test_what_cannot_be_edited_in_place_is_refused(
    reason: str,
    make: Callable[[], object],
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    run: Run,
) -> None:
    monkeypatch.chdir(tmp_path)
    make()
    rename = () if "--rule" in line else RENAME
    before = content()
    for more in ((), ("--dry-run",)):
        done = run("remap", *line.split(), *rename, "--in-place", *more)
        assert (done.status, content()) == (1, before), done.said
        first = done.err.splitlines()[0]
        assert "cannot be edited in place: " in first
        assert reason in first
        assert "hint: write another file: -o OUT" in done.err


def test_second_edit_replaces_the_undo_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    monkeypatch.chdir(tmp_path)
    for make, path in (
        (safetensors, "in.safetensors"),
        (lambda: dcp.save(STATE, checkpoint_id="in"), "in"),
    ):
        make()
        for rule in ("a.{x} => z.{x}", "z.{x} => y.{x}"):
            before = {name: file for name, file in content().items() if "ckpttool" not in name}
            assert run("remap", path, "--rule", rule, "--in-place").status == 0
        assert ckpttool.undo(path).way == "undone"
        assert content() == before


# Concurrent edits


@pytest.mark.parametrize("form", ["safetensors", "dcp"])
def test_one_of_two_concurrent_edits_is_refused(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    """The second one runs when the first one has written its journal, but not yet changed the
    file.
    """
    monkeypatch.chdir(tmp_path)
    path = "in.safetensors" if form == "safetensors" else "in"
    save_file(STATE, path) if form == "safetensors" else dcp.save(STATE, checkpoint_id=path)
    plain, statuses = os.fsync, list[int]()

    def fsync(descriptor: int) -> None:
        monkeypatch.setattr(os, "fsync", plain)
        line = ["remap", path, "--in-place", "--rule", "b.{x} => c.{x}"]
        statuses.append(
            subprocess.run(
                [sys.executable, "-m", "ckpttool", *line], capture_output=True
            ).returncode
        )
        plain(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    status, _, err = run("remap", path, *RENAME, "--in-place")
    assert (status, statuses) == (0, [2]), err
    names = {entry.key for entry in ckpttool.open_checkpoint(path).sections[0].tensors}
    assert names == {"z.weight", "z.bias", "b.weight"}


# Processes


@pytest.mark.parametrize("number", [1, 10, 90])
def test_ctrl_c_during_imports_prints_no_traceback(tmp_path: Path, number: int) -> None:
    """SIGINT is raised at the import with this number after the entry point has started."""
    save_file(STATE, tmp_path / "in.safetensors")
    code = f"""
import builtins, signal, sys
plain, count = builtins.__import__, 0
def importing(name, *args, **how):
    global count
    count += "ckpttool" in name or count > 0
    if count == {number}:
        count += 1
        signal.raise_signal(signal.SIGINT)
    return plain(name, *args, **how)
sys.argv = ["ckpttool", "inspect", "in.safetensors"]
signal.signal(signal.SIGINT, signal.default_int_handler)  # the parent of the test run may ignore it
from ckpttool.__main__ import process
builtins.__import__ = importing
sys.exit(process())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (130, "error: interrupted\n")


def test_child_process_of_a_rank_is_not_a_rank(tmp_path: Path) -> None:
    """A training script may call ckpttool on one rank only, so it must not wait for other ranks."""
    save_file(STATE, tmp_path / "in.safetensors")
    job = {
        "TORCHELASTIC_RUN_ID": "x",
        "RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }
    call = [sys.executable, "-m", "ckpttool", "inspect", "in.safetensors"]
    for words in (call, shlex.join(call)):
        code = (
            f"import subprocess, sys; sys.exit(subprocess.call({words!r},"
            f" shell={isinstance(words, str)}))"
        )
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=tmp_path,
            env={**os.environ, **job},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (done.returncode, "a.weight" in done.stdout) == (0, True), done.stderr


_WORK = """
import os, subprocess, sys
from multiprocessing import get_context
def work():
    call = [sys.executable, "-m", "ckpttool", "inspect", "in.safetensors"]
    done = subprocess.run(call, capture_output=True, text=True, timeout=60)
    return done.returncode, "a.weight" in done.stdout, done.stderr
def rank():
    job = {"TORCHELASTIC_RUN_ID": "x", "RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    os.environ.update(job)
    print(work(), flush=True)
def fork():
    process = get_context("fork").Process(target=rank)
    process.start()
    process.join()
def launch():
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch
    config = LaunchConfig(1, 1, 2, rdzv_backend="c10d", rdzv_endpoint="localhost:0", start_method="spawn")
    print(elastic_launch(config, work)()[0])
if __name__ == "__main__":
    globals()[sys.argv[1]]()
"""


@pytest.mark.parametrize("start", ["fork", "launch"])
def test_child_process_of_an_elastic_launch_worker_is_not_a_rank(
    start: str, tmp_path: Path
) -> None:
    """torch starts the worker as a function and sets RANK in the worker."""
    save_file(STATE, tmp_path / "in.safetensors")
    (tmp_path / "train.py").write_text(_WORK)
    done = subprocess.run(
        [sys.executable, "train.py", start],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.strip() == str((0, True, "")), done.stderr


def test_umask_is_never_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    """Otherwise a file created by another thread at that moment would be readable by everybody."""
    monkeypatch.chdir(tmp_path)
    before = os.umask(0o027)
    try:
        safetensors()
        os.chmod("in.safetensors", 0o666)
        set_umask = os.umask
        monkeypatch.setattr(os, "umask", lambda mask: pytest.fail("the umask is set"))
        plain = open
        for known in (True, False):
            if not known:  # as without /proc
                monkeypatch.setattr(
                    "builtins.open",
                    lambda path, *args: plain("/none" if "status" in str(path) else path, *args),
                )
            assert run("remap", "in.safetensors", *RENAME, "-o", f"{known}.safetensors").status == 0
            assert os.stat(f"{known}.safetensors").st_mode & 0o777 == 0o640
            assert run("remap", "in.safetensors", *RENAME, "-o", f"{known}/").status == 0
            assert os.stat(f"{known}").st_mode & 0o777 == 0o750
    finally:
        monkeypatch.undo()
        set_umask(before)


def test_an_edited_file_that_was_moved_can_be_moved_back(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_file({"a.w": torch.ones(2)}, "model.safetensors")
    before = Path("model.safetensors").read_bytes()
    assert run("remap", "model.safetensors", "--in-place", "--rule", "a.w => b.w").status == 0
    Path("model.safetensors").rename("moved.safetensors")
    done = run("undo", "model.safetensors")
    assert done.status == 2
    assert "is gone" in done.err
    assert "once the file has this name again" in done.err
    Path("moved.safetensors").rename("model.safetensors")
    assert run("undo", "model.safetensors").status == 0
    assert Path("model.safetensors").read_bytes() == before
