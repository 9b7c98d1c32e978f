"""Leftovers of interrupted commands: who owns them, and when they are removed or recovered."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckpttool import CkptError
from ckpttool.io import patch, syscalls, temporary, transaction
from ckpttool.io.pieces import digest_on_disk
from ckpttool.io.temporary import me
from ckpttool.io.write_folder import _can_move
from command import main

AS_ROOT = pytest.mark.skipif(
    os.name != "posix" or os.geteuid() != 0, reason="only root can be another user"
)
DEAD = replace(me(), pid=1 << 23)
OTHER = 12_345


def name(owner: object, ending: str = "tmp", filename: str = "x") -> str:
    return f".{filename}.{owner}-00000000.ckpttool.{ending}"


def _journal(filename: str, descriptor: int, change: transaction.PatchRecord) -> bytes:
    done = change.patch
    back = transaction.PatchRecord(patch.inverse(descriptor, done), b"", b"")
    sample = patch.sample_of(descriptor, done.start, done.length)
    return transaction.record_bytes(
        [transaction.Patched(filename, back, sample, patch.hash_of(done))]
    )


def interrupted(folder: Path, files: dict[str, bytes], owner: object = DEAD) -> Path:
    """Write the files and a journal that says they were added to the folder."""
    for filename, data in files.items():
        (folder / filename).write_bytes(data)
    journal = folder / name(owner, "edit")
    rows = [
        transaction.Replaced(filename, None, transaction.state_of(folder / filename))
        for filename in files
    ]
    journal.write_bytes(transaction.record_bytes(rows))
    return journal


def test_foreign_name_has_no_owner() -> None:
    assert not temporary.is_dead("model.pt", 0)
    assert not temporary.is_alive("model.pt")
    assert temporary.is_alive(name(temporary._owner(os.getppid())))
    assert not temporary.is_alive(name(replace(temporary._owner(os.getppid()), host="00000000")))
    assert not temporary.is_alive(name(replace(temporary._owner(os.getppid()), boot="00000000")))
    assert not temporary.is_alive(name(replace(temporary._owner(os.getppid()), space=1)))
    assert len(temporary.temporary_name("重" * 200).encode()) < 255


def test_process_without_a_known_start_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without /proc, only the pid tells if a process is alive."""
    monkeypatch.setattr(temporary, "_text", lambda path: "")
    owner = temporary._owner.__wrapped__(os.getppid())
    assert owner.started == 0
    monkeypatch.setattr(temporary, "me", lambda: replace(owner, pid=os.getpid()))
    assert not temporary.is_dead(name(owner), 0)
    assert temporary.is_dead(name(replace(owner, pid=1 << 23)), time.time())
    monkeypatch.setattr(os, "stat", lambda path: (_ for _ in ()).throw(FileNotFoundError))
    assert temporary._owner.__wrapped__(os.getppid()).space == 0


def test_journal_of_a_dead_edit_is_not_removed(tmp_path: Path) -> None:
    for ending in ("edit", "tmp"):
        (tmp_path / name(DEAD, ending)).write_text("")
    temporary.remove_left(tmp_path)
    assert len(os.listdir(tmp_path)) == 2  # the journal may refer to the other file
    (tmp_path / name(DEAD, "edit")).unlink()
    (tmp_path / name(replace(DEAD, pid=DEAD.pid + 1), "edit")).write_text("")
    temporary.remove_left(tmp_path)
    assert os.listdir(tmp_path) == [name(replace(DEAD, pid=DEAD.pid + 1), "edit")]
    temporary.remove_left(tmp_path / "none")


def test_leftovers_are_removed_after_recovery(tmp_path: Path) -> None:
    save_file({"a.w": torch.ones(2)}, tmp_path / "in.safetensors")
    old = (tmp_path / "in.safetensors").read_bytes()
    descriptor = os.open(tmp_path / "in.safetensors", os.O_RDWR)
    change = transaction.PatchRecord(
        patch.Patch(len(old), 8, len(old) - 8, bytes(8), b""), b"", b""
    )
    (tmp_path / name(DEAD, "edit")).write_bytes(_journal("in.safetensors", descriptor, change))
    patch.apply(descriptor, change.patch, fsync=False)
    os.close(descriptor)
    (tmp_path / name(DEAD)).write_text("litter")
    transaction.recover(tmp_path)
    assert os.listdir(tmp_path) == ["in.safetensors"]
    assert (tmp_path / "in.safetensors").read_bytes() == old


def test_journal_removed_by_another_process_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = interrupted(tmp_path, {"a": b"new"})
    (tmp_path / "a").unlink()
    plain = temporary.is_dead

    def faster(*args: Any) -> bool:
        journal.unlink(missing_ok=True)
        return plain(*args)

    monkeypatch.setattr(temporary, "is_dead", faster)
    transaction.recover(tmp_path)
    assert os.listdir(tmp_path) == []


# Other users


@contextmanager
def as_other_user() -> Iterator[None]:
    """Run the block as another user who is not root."""
    os.setresuid(OTHER, OTHER, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a world-writable folder with a world-readable checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        monkeypatch.chdir(folder)
        save_file({"a": torch.ones(2)}, "in.safetensors")
        os.chmod("in.safetensors", 0o644)
        assert main(["remap", "in.safetensors", "-o", "warm.safetensors", "--rule", "a => b"]) == 0
        assert main(["remap", "in.safetensors", "-o", "warm/", "--rule", "a => b"]) == 0
        yield Path(folder)


def rename(out: str) -> int:
    return main(["remap", "in.safetensors", "-o", out, "--rule", "a => b"])


@AS_ROOT
def test_private_staging_folder_of_another_user_is_ignored(shared: Path) -> None:
    staging = shared / name(DEAD)
    staging.mkdir(0o700)
    with as_other_user():
        assert main(["inspect", "in.safetensors"]) == 0
        assert rename("out.safetensors") == 0
    assert [*load_file("out.safetensors")] == ["b"]
    assert staging.exists()


@AS_ROOT
def test_process_of_another_user_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(temporary, "_text", lambda path: "")
    with as_other_user():
        assert temporary._started(os.getppid()) == 0
        assert temporary._started(1 << 23) is None


@pytest.mark.skipif(
    not Path("/proc/self/stat").exists(), reason="the platform does not tell when a process started"
)
def test_start_of_a_process_is_known() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        ticks, uptime = (
            temporary._started(child.pid),
            float(Path("/proc/uptime").read_text().split()[0]),
        )
        child.kill()
    assert ticks is not None
    assert abs(uptime - ticks / os.sysconf("SC_CLK_TCK")) < 30
    assert temporary._started(child.pid) is None


def test_failed_staging_leaves_no_entry(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), temporary.staged_file(tmp_path / "gone" / "out"):
        pass
    with pytest.raises(FileNotFoundError), temporary.staged_folder(tmp_path / "gone", "out"):
        pass
    assert temporary._in_work == set()


@AS_ROOT
def test_edit_of_another_user_is_not_recovered(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "in.safetensors")
    journal = interrupted(tmp_path, {"added": b"x"})
    os.chown(journal, OTHER, -1)
    with pytest.raises(CkptError, match=rf"an interrupted edit of another user \(number {OTHER}\)"):
        transaction.recover(tmp_path)
    assert journal.exists()
    assert (tmp_path / "added").exists()
    transaction.recover(tmp_path, ["in.safetensors"])
    assert journal.exists()


@AS_ROOT
def test_write_only_and_read_only_folders(shared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for subfolder, mode in (("drop", 0o733), ("shelf", 0o755)):
        (shared / subfolder).mkdir()
        (shared / subfolder).chmod(mode)
    (shared / "shelf" / "mine").mkdir()
    os.chown(shared / "shelf" / "mine", OTHER, -1)
    capsys.readouterr()
    with as_other_user():
        assert rename("drop/out.safetensors") == 0
        for out in ("shelf/out.safetensors", "shelf/out/"):
            assert rename(out) == 2
            assert (
                "shelf: not writable\nhint: choose another folder for the output"
                in capsys.readouterr().err
            )
        assert not _can_move(shared / "shelf" / "mine")
        assert rename("shelf/mine") == 0
    assert (
        [*load_file("drop/out.safetensors")]
        == [*load_file("shelf/mine/model.safetensors")]
        == ["b"]
    )


@AS_ROOT
def test_replaced_output_keeps_its_owner(shared: Path) -> None:
    assert rename("out.safetensors") == 0
    os.chown("out.safetensors", OTHER, OTHER)
    assert (
        main(["remap", "in.safetensors", "-o", "out.safetensors", "--rule", "a => c", "--force"])
        == 0
    )
    found = os.stat("out.safetensors")
    assert (found.st_uid, found.st_gid) == (OTHER, OTHER)
    assert [*load_file("out.safetensors")] == ["c"]


# Other platforms


def test_commands_work_without_linux_system_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without locks, users, extent moves and page cache advice, everything is still written, but
    slower.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "fcntl", None)
    monkeypatch.setattr(sys, "platform", "other")
    for call in ("posix_fadvise", "geteuid", "sysconf", "SEEK_HOLE"):
        monkeypatch.delattr(os, call, raising=False)
    assert syscalls.memory() == sys.maxsize
    save_file({"a.w": torch.arange(400_000.0), "b": torch.ones(3)}, "in.safetensors")
    for rule, out in (
        ("a.{x} => z.{x}", ["-o", "out.safetensors", "--verify"]),
        ("a.{x} => y.{x}", ["--in-place"]),
    ):
        assert main(["remap", "in.safetensors", "--rule", rule, *out]) == 0
    for force in ([], ["--force"]):
        assert (
            main(["convert", "out.safetensors", "-o", "m/", "--max-shard-size", "1MB", *force]) == 0
        )
    assert {*load_file("in.safetensors")} == {"y.w", "b"}
    assert {*load_file("out.safetensors")} == {"z.w", "b"}
    assert main(["undo", "in.safetensors"]) == 0
    assert {*load_file("in.safetensors")} == {"a.w", "b"}
    assert not [filename for filename in os.listdir() if "ckpttool" in filename]
    assert digest_on_disk("out.safetensors")


def test_missing_libc_function_is_reported() -> None:
    if not sys.platform.startswith("linux"):
        pytest.skip("only on Linux")
    with pytest.raises(OSError, match="not implemented") as raised:
        syscalls._call("no_such_call", 1)
    assert raised.value.errno in syscalls.NOT_HERE


def test_second_signal_ends_only_an_insisting_block() -> None:
    """Signals with the default action end the process when the block has ended."""
    code = """
import signal, sys
from contextlib import nullcontext
from ckpttool.io.syscalls import *
handled, insisting = sys.argv[1] == "handled", sys.argv[2] == "insisting"
with ended_by_signals() if handled else nullcontext():
    try:
        with uninterrupted(insisting=insisting):
            signal.raise_signal(signal.SIGTERM)
            print("one", flush=True)
            signal.raise_signal(signal.SIGTERM)
            print("two", flush=True)
    except Terminated:
        print("ended", flush=True)
"""
    for handled, insisting, expected in (
        ("handled", "insisting", "one ended"),
        ("handled", "patient", "one two ended"),
        ("default", "insisting", "one two"),
    ):
        done = subprocess.run(
            [sys.executable, "-c", code, handled, insisting], capture_output=True, text=True
        )
        assert done.stdout.split() == expected.split(), (handled, insisting, done.stderr)
        assert done.returncode == (0 if handled == "handled" else -15)


def test_locked_file_cannot_be_locked_again(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x")
    with open(tmp_path / "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with (
            pytest.raises(CkptError, match="is being edited"),
            transaction.locked(tmp_path / "a"),
        ):
            pass
