"""Guarantees for every output: sources are never overwritten, changes are noticed, one of two
processes wins.
"""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckpttool import CkptError, open_checkpoint
from ckpttool.core.checkpoint import Lazy, Span
from ckpttool.evaluate.torch_eval import load
from ckpttool.io import syscalls, temporary, transaction
from ckpttool.io.pieces import Piece, stream
from ckpttool.io.write import WriteOptions
from ckpttool.io.write import write_file as write
from ckpttool.io.write_folder import write_folder
from command import main

STATE = {"a.weight": torch.arange(12.0), "b": torch.ones(2)}
RENAME = ["--rule", "a.{x} => z.{x}"]


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    save_file(STATE, "in.safetensors")
    return tmp_path / "in.safetensors"


def names(folder: Path) -> set[str]:
    return set(os.listdir(folder))


# Nothing is overwritten without --force


def test_report_replaces_a_file_only_with_force(source: Path) -> None:
    line = ["remap", source.name, *RENAME, "--dry-run", "--report=r.json"]
    Path("r.json").write_text("mine")
    assert main(line) == 2
    assert Path("r.json").read_text() == "mine"
    assert main([*line, "--force"]) == 0
    assert json.loads(Path("r.json").read_text())


@pytest.mark.parametrize(
    "command",
    ["inspect CKPT", "diff CKPT CKPT", "explain weight --model names.json", "trace names.json"],
)
def test_every_command_needs_force_to_replace_a_report(
    source: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    Path("net.py").write_text("import torch\nbuild = torch.nn.Linear\n")
    assert main(["trace", "net.py:build(in_features=2, out_features=2)", "-o", "names.json"]) == 0
    Path("r.md").write_text("mine")
    words = command.replace("CKPT", source.name).split()
    capsys.readouterr()
    assert main([*words, "--report", "r.md"]) == 2
    assert "r.md exists\nhint: pass --force" in capsys.readouterr().err
    assert main([*words, "--report", "r.md", "--force"]) == 0
    assert Path("r.md").read_text() != "mine"


@pytest.mark.parametrize(
    "words",
    [
        "remap in.json -o out.safetensors --rules rules.json --report rules.json",
        "remap in.json -o out.safetensors --rule b=>c --report in.json",
        "remap in.json -o out.safetensors --rule b=>c --report link.json",
        "inspect in.json --report in.json",
        "remap in.json -o out.safetensors --rule b=>c --report r.json --report r.json",
    ],
)
def test_source_is_never_overwritten(source: Path, words: str) -> None:
    os.rename(source, "in.json")
    Path("link.json").symlink_to("in.json")
    Path("rules.json").write_text('[[rule]]\nfrom = "b"\nto = "c"\n')
    before = {path: path.read_bytes() for path in Path().iterdir()}
    assert main([*(word.replace("=>", " => ") for word in words.split()), "--force"]) == 2
    assert {path: path.read_bytes() for path in Path().iterdir() if path in before} == before


def test_shard_of_the_source_folder_is_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_file(STATE, "in.safetensors")
    shards = tmp_path / "llama"
    assert main(["convert", "in.safetensors", "-o", "llama/", "--max-shard-size", "20B"]) == 0
    before = {path: path.read_bytes() for path in shards.iterdir()}
    shard = next(str(path) for path in before if path.suffix == ".safetensors")
    assert main(["remap", "llama", "-o", shard, "--rule", "b => c", "--force"]) == 2
    assert {path: path.read_bytes() for path in shards.iterdir()} == before


def test_only_one_of_several_processes_succeeds(source: Path) -> None:
    line = [sys.executable, "-m", "ckpttool", "remap", source.name, *RENAME, "--no-fsync", "-o"]
    for out in ("out.safetensors", "new/"):
        processes = [
            subprocess.Popen([*line, out], stderr=subprocess.PIPE, text=True) for _ in range(3)
        ]
        err = [process.communicate()[1] for process in processes]
        assert sorted(process.returncode for process in processes) == [0, 2, 2], err
    assert names(source.parent) == {"in.safetensors", "out.safetensors", "new"}


def test_file_created_during_a_write_is_kept(tmp_path: Path) -> None:
    out = tmp_path / "out"

    def late() -> Iterator[bytes]:
        out.write_bytes(b"other")
        yield b"x"

    with pytest.raises(CkptError, match="meanwhile"):
        write([Piece(Lazy(1, lambda: list(late())))], str(out), WriteOptions(replace=False))
    assert out.read_bytes() == b"other"
    assert names(tmp_path) == {"out"}


def test_files_created_in_a_folder_during_a_write_are_kept(tmp_path: Path) -> None:
    (tmp_path / "index").write_text("old")

    def late() -> list[bytes]:
        (tmp_path / "log").write_text("late")
        return [b"x"]

    write_folder({"index": [Piece(Lazy(1, late))]}, str(tmp_path))
    assert names(tmp_path) == {"index", "log"}


def test_folder_changed_by_another_process_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "index").write_text("old")

    def other() -> list[bytes]:
        (tmp_path / "index").write_text("theirs")
        return [b"x"]

    with pytest.raises(CkptError, match="another process"):
        write_folder({"index": [Piece(Lazy(1, other))]}, str(tmp_path))
    assert (tmp_path / "index").read_text() == "theirs"
    assert names(tmp_path) == {"index"}


# Sources


@pytest.mark.parametrize("keep_times", [False, True])
def test_source_that_changes_while_it_is_read_is_refused(source: Path, keep_times: bool) -> None:
    """Size and inode stay the same; if the mtime is reset too, only the ctime shows the change."""
    checkpoint = open_checkpoint(str(source))
    before = source.stat()

    def change() -> list[bytes]:
        with source.open("r+b") as file:
            file.seek(-4, os.SEEK_END)
            file.write(b"\1\2\3\4")
        if keep_times:
            os.utime(source, ns=(before.st_atime_ns, before.st_mtime_ns))
        return [b"x"]

    span = Span(str(source), 0, checkpoint.nbytes)
    with pytest.raises(CkptError, match="was changed while it was read"):
        write([Piece(span), Piece(Lazy(1, change))], "out")
    assert names(source.parent) == {"in.safetensors"}


def test_source_that_became_shorter_is_refused(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads may be short; only an empty one means that the file ends."""
    plain = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, buffers, at: plain(file, [buffers[0][:7]], at))
    span = Span(str(source), 10, source.stat().st_size)
    with pytest.raises(
        CkptError, match=re.escape(f"ends at byte {source.stat().st_size:,}, it was longer")
    ):
        list(stream([Piece(span)]))


def test_source_that_was_removed_or_replaced_is_refused(source: Path) -> None:
    """This also holds if nothing is written and a tensor is only loaded."""
    (entry, *_) = open_checkpoint(str(source)).sections[0].tensors

    def remove() -> list[bytes]:
        source.unlink()
        return [b"x"]

    with pytest.raises(CkptError, match="was changed while it was read"):
        write([Piece(Span(str(source), 0, 4)), Piece(Lazy(1, remove))], "out")
    save_file({key: value + 1 for key, value in STATE.items()}, source)
    with pytest.raises(CkptError, match="was changed while it was read"):
        load(entry)
    assert names(source.parent) == {"in.safetensors"}


def test_verify_fails_if_the_disk_holds_other_bytes(
    source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put = syscalls.put

    def damaging(staged: Path, place: Path, *, replace: bool) -> None:
        with staged.open("r+b") as file:
            file.seek(9)
            file.write(b" ")
        put(staged, place, replace=replace)

    monkeypatch.setattr("ckpttool.io.write.put", damaging)
    assert main(["remap", source.name, *RENAME, "-o", "out.safetensors", "--verify"]) == 2
    assert "what was written is not what the disk holds" in capsys.readouterr().err


# Signals and leftover files


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_signal_removes_partial_output(source: Path, number: signal.Signals) -> None:
    with source.open("r+b") as file:  # large, and sparse
        header = json.dumps(
            {"a.w": {"dtype": "U8", "shape": [1 << 32], "data_offsets": [0, 1 << 32]}}
        ).encode()
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + (1 << 32))
    line = [
        sys.executable,
        "-m",
        "ckpttool",
        "remap",
        source.name,
        *RENAME,
        "-o",
        "out.safetensors",
    ]
    # The parent of the test run may ignore the signal, and a child would inherit that.
    default = partial(signal.signal, number, signal.SIG_DFL)
    process = subprocess.Popen(line, stderr=subprocess.PIPE, text=True, preexec_fn=default)
    deadline = time.monotonic() + 300
    while names(source.parent) == {"in.safetensors"} and time.monotonic() < deadline:
        time.sleep(0.01)
    # Python ignores exceptions in some callbacks, for example at the end of an import
    time.sleep(0.1)
    process.send_signal(number)
    err = process.communicate(timeout=60)[1]
    assert process.returncode == 128 + number, err
    assert names(source.parent) == {"in.safetensors"}


def test_ignored_signal_stays_ignored(tmp_path: Path) -> None:
    code = (
        "import signal, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN)\nfrom"
        " ckpttool.io.syscalls import *\n"
    )
    code += (
        "with ended_by_signals(), uninterrupted():\n   "
        " signal.raise_signal(signal.SIGHUP)\nprint('on')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "on\n", done.stderr


def test_temporary_name_contains_its_owner() -> None:
    name = temporary.temporary_name("model.pt")
    owner = temporary.owner_of(name)
    assert owner == temporary.me()
    assert temporary.is_dead(name, 0)  # this process is not writing it
    assert temporary.owner_of(".model.pt.tmp") is None
    assert temporary.owner_of(name.replace(".ckpttool.tmp", ".tmp")) is None
    now = time.time()
    for parts, dead in (
        (("00000000", "00000000", 1, 1, 1), False),  # another machine
        ((temporary.me().host, "00000000", 1, 1, 1), True),  # before this machine was rebooted
        # a reused pid
        ((temporary.me().host, temporary.me().boot, temporary.me().space, os.getppid(), 1), True),
        # another container
        ((temporary.me().host, temporary.me().boot, temporary.me().space + 1, 1, 1), False),
    ):
        other = f".x.{temporary.Owner(*parts)}-00000000.ckpttool.tmp"
        assert temporary.is_dead(other, now) == dead
        assert temporary.is_dead(other, now - 90_000)


def test_only_leftovers_of_dead_processes_are_removed(tmp_path: Path, source: Path) -> None:
    dead = f".x.{temporary.Owner(temporary.me().host, '00000000', 1, 1, 1)}-00000000.ckpttool.tmp"
    alive = f".x.{temporary.Owner('00000000', '00000000', 1, 1, 1)}-00000000.ckpttool.tmp"
    for name in (dead, alive, ".x.tmp", "y.ckpttool.tmp"):
        (tmp_path / name).write_text("")
    assert main(["inspect", source.name]) == 0
    assert names(tmp_path) == {dead, alive, ".x.tmp", "y.ckpttool.tmp", "in.safetensors"}
    assert main(["remap", source.name, *RENAME, "-o", "out.safetensors"]) == 0
    assert names(tmp_path) == {
        alive,
        ".x.tmp",
        "y.ckpttool.tmp",
        "in.safetensors",
        "out.safetensors",
    }


@pytest.mark.parametrize(
    "name", ["../out", "/etc/x", "a/../../b", "a\0b", "\ud800", "a" * 300, 5, None]
)
@pytest.mark.parametrize("field", ["name", "old"])
def test_journal_with_an_invalid_path_is_refused(tmp_path: Path, name: object, field: str) -> None:
    dead = (
        tmp_path
        / f".x.{temporary.Owner(temporary.me().host, '00000000', 1, 1, 1)}-00000000.ckpttool.edit"
    )
    row = {"name": "a", "old": None, "state": None, field: name}
    dead.write_text(json.dumps({"schema": "ckpttool.record/1", "files": [row]}))
    with pytest.raises(CkptError, match="cannot be read"):
        transaction.recover(tmp_path)
    assert dead.exists()


def test_journal_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CkptError, match="cannot be read"):
        transaction.parse(b'{"files": ' + b"[" * 100_000, tmp_path / "journal")


# Flushes to disk


@pytest.mark.parametrize("number", [errno.EIO, errno.EINVAL])
def test_failed_flush_of_the_folder_is_reported(
    source: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Only EINVAL is ignored: some file systems cannot flush a folder."""
    plain = os.fsync

    def failing(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        plain(descriptor)

    monkeypatch.setattr(os, "fsync", failing)
    message = (
        "out is written and complete, but the disk does not confirm that it stays:"
        " Input/output error"
    )
    with pytest.raises(CkptError, match=message) if number == errno.EIO else nullcontext():
        write([Piece(b"x")], "out")
    assert Path("out").read_bytes() == b"x"


def test_file_is_flushed_before_the_rename_and_folder_after_it(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With --no-fsync, nothing is flushed."""
    done: list[str] = []

    def recorded(name: str, call: Callable[..., object]) -> Callable[..., object]:
        def wrapped(*args: object, **how: object) -> object:
            folder = (
                name == "fsync"
                and isinstance(args[0], int)
                and stat.S_ISDIR(os.fstat(args[0]).st_mode)
            )
            done.append("folder" if folder else name)
            return call(*args, **how)

        return wrapped

    for name in ("fsync", "link", "replace"):
        monkeypatch.setattr(os, name, recorded(name, getattr(os, name)))
    assert main(["remap", source.name, *RENAME, "-o", "one.safetensors"]) == 0
    assert done == ["fsync", "link", "folder"]
    done.clear()
    assert main(["remap", source.name, *RENAME, "-o", "one.safetensors", "--force"]) == 0
    assert done == ["fsync", "replace", "folder"]
    done.clear()
    assert main(["remap", source.name, *RENAME, "--in-place"]) == 0
    assert done == ["fsync", "folder", "fsync", "folder"]  # the journal, then the file
    assert main(["undo", source.name]) == 0
    done.clear()
    assert main(["convert", source.name, "-o", "m/", "--max-shard-size", "20B"]) == 0
    assert done.count("fsync") == len(os.listdir("m"))
    assert done[-2:] == ["folder", "folder"]
    done.clear()
    assert (
        main(["remap", source.name, "-o", "two.safetensors", "--rule", "b => c", "--no-fsync"]) == 0
    )
    assert done == ["link"]


# Permissions


@pytest.mark.parametrize(
    ("mode", "umask", "expected"),
    [(0o600, 0o022, 0o600), (0o644, 0o027, 0o640), (0o664, 0, 0o664), (0o400, 0, 0o600)],
)
def test_output_is_not_more_readable_than_its_source(
    source: Path, mode: int, umask: int, expected: int
) -> None:
    source.chmod(mode)
    before = os.umask(umask)
    try:
        assert main(["remap", source.name, *RENAME, "-o", "out.safetensors"]) == 0
        assert main(["remap", source.name, *RENAME, "-o", "out/"]) == 0
        Path("old.safetensors").write_bytes(b"")
        Path("old.safetensors").chmod(0o666)
        assert main(["remap", source.name, *RENAME, "-o", "old.safetensors", "--force"]) == 0
    finally:
        os.umask(before)
    for out in ("out.safetensors", "out/model.safetensors"):
        assert stat.S_IMODE(os.stat(out).st_mode) == expected, out
    assert stat.S_IMODE(os.stat("old.safetensors").st_mode) & 0o077 & ~mode == 0
    assert stat.S_IMODE(os.stat("out").st_mode) & 0o044 & ~mode == 0


def test_dangling_and_circular_symlinks_are_refused(
    source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("out.safetensors").symlink_to("elsewhere.safetensors")
    Path("loop.safetensors").symlink_to("loop.safetensors")
    assert main(["remap", source.name, *RENAME, "-o", "out.safetensors"]) == 2
    assert "a link to a file that does not exist: elsewhere.safetensors" in capsys.readouterr().err
    for force in ([], ["--force"]):
        assert main(["remap", source.name, *RENAME, "-o", "loop.safetensors", *force]) == 2
    assert not Path("elsewhere.safetensors").exists()
    assert main(["remap", source.name, *RENAME, "-o", "out.safetensors", "--force"]) == 0
    assert set(load_file("elsewhere.safetensors")) == {"z.weight", "b"}


@pytest.mark.skipif(
    os.name != "posix" or os.geteuid() != 0, reason="only root can change the owner of a file"
)
def test_symlink_of_another_user_in_a_shared_folder_is_refused(
    source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shared = source.parent / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    Path("precious.safetensors").write_text("mine")
    (shared / "out.safetensors").symlink_to(source.parent / "precious.safetensors")
    os.chown(shared / "out.safetensors", 12_345, 12_345, follow_symlinks=False)
    assert main(["remap", source.name, *RENAME, "-o", "shared/out.safetensors", "--force"]) == 2
    assert "another user" in capsys.readouterr().err
    assert Path("precious.safetensors").read_text() == "mine"
    for owner in (
        os.geteuid(),
        shared.stat().st_uid,
    ):  # the user's own link, and one that belongs to the owner of the folder
        os.chown(shared / "out.safetensors", owner, owner, follow_symlinks=False)
        assert main(["remap", source.name, *RENAME, "-o", "shared/out.safetensors", "--force"]) == 0
        assert set(load_file("precious.safetensors")) == {"z.weight", "b"}
        os.chown(shared, 12_345, 12_345)


def test_command_runs_outside_of_the_main_thread(source: Path) -> None:
    statuses: list[int] = []
    thread = threading.Thread(
        target=lambda: statuses.append(main(["remap", source.name, *RENAME, "-o", "o.safetensors"]))
    )
    thread.start()
    thread.join()
    assert statuses == [0]
