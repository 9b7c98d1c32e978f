"""What was begun and left: whose it is, and what becomes of it, also of other users' and where nobody says."""

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

from ckpttool.cli.app import main
from ckpttool.core.errors import CkptError
from ckpttool.io import patch, syscalls, temporary, transaction
from ckpttool.io.pieces import digest_on_disk
from ckpttool.io.temporary import me
from ckpttool.io.write import _can_move

AS_ROOT = pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="only root can be another user")
DEAD = replace(me(), pid=1 << 23)
OTHER = 12_345


def name(owner: object, ending: str = "tmp", own: str = "x") -> str:
    return f".{own}.{owner}-00000000.ckpttool.{ending}"


def _journal(own: str, descriptor: int, change: transaction.Change) -> bytes:
    done = change.patch
    back = transaction.Change(patch.inverse(descriptor, done), b"", b"")
    sample = patch.sample_of(descriptor, done.start, done.length)
    return transaction.text([transaction.Patched(own, back, sample, patch.hash_of(done))])


def begun(folder: Path, files: dict[str, bytes], owner: object = DEAD) -> Path:
    """A journal that says that the files were added to the folder."""
    for own, data in files.items():
        (folder / own).write_bytes(data)
    journal = folder / name(owner, "edit")
    rows = [transaction.Replaced(own, None, transaction.state_of(folder / own)) for own in files]
    journal.write_bytes(transaction.text(rows))
    return journal


def test_a_name_that_is_none_of_ours_is_nobodys() -> None:
    assert not temporary.is_dead("model.pt", 0)
    assert not temporary.is_alive("model.pt")
    assert temporary.is_alive(name(temporary._owner(os.getppid())))
    assert not temporary.is_alive(name(replace(temporary._owner(os.getppid()), host="00000000")))
    assert not temporary.is_alive(name(replace(temporary._owner(os.getppid()), boot="00000000")))
    assert not temporary.is_alive(name(replace(temporary._owner(os.getppid()), space=1)))
    assert len(temporary.temporary_name("重" * 200).encode()) < 255


def test_where_the_system_does_not_say_when_a_process_began(monkeypatch: pytest.MonkeyPatch) -> None:
    """As without /proc: whether there is one of its number is known still."""
    monkeypatch.setattr(temporary, "_text", lambda path: "")
    own = temporary._owner.__wrapped__(os.getppid())
    assert own.started == 0
    monkeypatch.setattr(temporary, "me", lambda: replace(own, pid=os.getpid()))
    assert not temporary.is_dead(name(own), 0)
    assert temporary.is_dead(name(replace(own, pid=1 << 23)), time.time())
    monkeypatch.setattr(os, "stat", lambda path: (_ for _ in ()).throw(FileNotFoundError))
    assert temporary._owner.__wrapped__(os.getppid()).space == 0


def test_the_way_back_of_a_dead_edit_is_no_litter(tmp_path: Path) -> None:
    for ending in ("edit", "tmp"):
        (tmp_path / name(DEAD, ending)).write_text("")
    temporary.remove_left(tmp_path)
    assert len(os.listdir(tmp_path)) == 2  # the journal may refer to the other file
    (tmp_path / name(DEAD, "edit")).unlink()
    (tmp_path / name(replace(DEAD, pid=DEAD.pid + 1), "edit")).write_text("")
    temporary.remove_left(tmp_path)
    assert os.listdir(tmp_path) == [name(replace(DEAD, pid=DEAD.pid + 1), "edit")]
    temporary.remove_left(tmp_path / "none")


def test_litter_beside_the_journal_of_an_edit(tmp_path: Path) -> None:
    save_file({"a.w": torch.ones(2)}, tmp_path / "in.safetensors")
    old = (tmp_path / "in.safetensors").read_bytes()
    descriptor = os.open(tmp_path / "in.safetensors", os.O_RDWR)
    change = transaction.Change(patch.Patch(len(old), 8, len(old) - 8, 0, bytes(8), b""), b"", b"")
    (tmp_path / name(DEAD, "edit")).write_bytes(_journal("in.safetensors", descriptor, change))
    patch.apply(descriptor, change.patch, fsync=False)
    os.close(descriptor)
    (tmp_path / name(DEAD)).write_text("litter")
    transaction.recover(tmp_path)
    assert os.listdir(tmp_path) == ["in.safetensors"]
    assert (tmp_path / "in.safetensors").read_bytes() == old


def test_what_another_process_finishes_meanwhile_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = begun(tmp_path, {"a": b"new"})
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
def as_another() -> Iterator[None]:
    """The process is another user's, who is not root, inside."""
    os.setresuid(OTHER, OTHER, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in which everybody may write, with a checkpoint that everybody may read."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        monkeypatch.chdir(folder)
        save_file({"a": torch.ones(2)}, "in.safetensors")
        os.chmod("in.safetensors", 0o644)
        assert main(["remap", "in.safetensors", "-o", "warm.safetensors", "--rule", "a => b"]) == 0
        assert main(["remap", "in.safetensors", "-o", "warm/", "--rule", "a => b"]) == 0
        yield Path(folder)


def renamed(out: str) -> int:
    return main(["remap", "in.safetensors", "-o", out, "--rule", "a => b"])


@AS_ROOT
def test_what_another_user_keeps_to_himself_is_in_nobodys_way(shared: Path) -> None:
    """The staging folder of a run that lives, or of one that was killed."""
    staging = shared / name(DEAD)
    staging.mkdir(0o700)
    with as_another():
        assert main(["inspect", "in.safetensors"]) == 0
        assert renamed("out.safetensors") == 0
    assert [*load_file("out.safetensors")] == ["b"]
    assert staging.exists()


@AS_ROOT
def test_a_process_of_another_user_is_one_that_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(temporary, "_text", lambda path: "")
    with as_another():
        assert temporary._started(os.getppid()) == 0
        assert temporary._started(1 << 23) is None


def test_what_cannot_be_made_leaves_no_trace(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), temporary.staged_file(tmp_path / "gone" / "out"):
        pass
    with pytest.raises(FileNotFoundError), temporary.staged_folder(tmp_path / "gone", "out"):
        pass
    assert temporary._in_work == set()


@AS_ROOT
def test_what_another_user_began_is_left_to_that_user(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "in.safetensors")
    journal = begun(tmp_path, {"added": b"x"})
    os.chown(journal, OTHER, -1)
    with pytest.raises(CkptError, match=rf"an interrupted edit of another user \(number {OTHER}\)"):
        transaction.recover(tmp_path)
    assert journal.exists()
    assert (tmp_path / "added").exists()
    transaction.recover(tmp_path, ["in.safetensors"])
    assert journal.exists()


@AS_ROOT
def test_folders_that_may_be_written_and_not_read_or_read_and_not_written(
    shared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for own, mode in (("drop", 0o733), ("shelf", 0o755)):
        (shared / own).mkdir()
        (shared / own).chmod(mode)
    (shared / "shelf" / "mine").mkdir()
    os.chown(shared / "shelf" / "mine", OTHER, -1)
    capsys.readouterr()
    with as_another():
        assert renamed("drop/out.safetensors") == 0
        for out in ("shelf/out.safetensors", "shelf/out/"):
            assert renamed(out) == 2
            assert "shelf: not writable\nhint: choose another folder for the output" in capsys.readouterr().err
        assert not _can_move(shared / "shelf" / "mine")
        assert renamed("shelf/mine") == 0
    assert [*load_file("drop/out.safetensors")] == [*load_file("shelf/mine/model.safetensors")] == ["b"]


@AS_ROOT
def test_an_output_that_is_replaced_stays_its_owners(shared: Path) -> None:
    assert renamed("out.safetensors") == 0
    os.chown("out.safetensors", OTHER, OTHER)
    assert main(["remap", "in.safetensors", "-o", "out.safetensors", "--rule", "a => c", "--force"]) == 0
    found = os.stat("out.safetensors")
    assert (found.st_uid, found.st_gid) == (OTHER, OTHER)
    assert [*load_file("out.safetensors")] == ["c"]


# Other platforms


def test_without_the_calls_of_linux(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No locks, no users, no moving of extents, no advice to the page cache: all is written, if slower."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "fcntl", None)
    monkeypatch.setattr(sys, "platform", "other")
    for call in ("posix_fadvise", "geteuid", "sysconf", "SEEK_HOLE"):
        monkeypatch.delattr(os, call, raising=False)
    assert syscalls.memory() == sys.maxsize
    save_file({"a.w": torch.arange(400_000.0), "b": torch.ones(3)}, "in.safetensors")
    long = "z." + "a.much.longer.name." * 300
    for rule, out in (("a.{x} => z.{x}", ["-o", "out.safetensors", "--verify"]), ("a.{x} => y.{x}", ["--in-place"])):
        assert main(["remap", "in.safetensors", "--rule", rule, *out]) == 0
    assert main(["undo", "in.safetensors"]) == 0
    assert main(["remap", "in.safetensors", "--rule", f"a.{{x}} => {long}{{x}}", "--in-place"]) == 0
    for force in ([], ["--force"]):
        assert main(["convert", "out.safetensors", "-o", "m/", "--max-shard-size", "1MB", *force]) == 0
    assert {*load_file("in.safetensors")} == {f"{long}w", "b"}
    assert {*load_file("out.safetensors")} == {"z.w", "b"}
    assert main(["undo", "in.safetensors"]) == 0
    assert {*load_file("in.safetensors")} == {"a.w", "b"}
    assert not [own for own in os.listdir() if "ckpttool" in own]
    assert digest_on_disk("out.safetensors")


def test_a_call_that_the_library_of_the_system_lacks_is_said() -> None:
    if not sys.platform.startswith("linux"):
        pytest.skip("of Linux")
    with pytest.raises(OSError, match="not implemented") as raised:
        syscalls._call("no_such_call", 1)
    assert raised.value.errno in syscalls.NOT_HERE


def test_a_signal_that_comes_twice_ends_a_wait_for_the_network_and_nothing_else() -> None:
    """`insisting`, where Python handles it; what only ends the process does so once the block has ended."""
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
    for handled, insisting, said in (
        ("handled", "insisting", "one ended"),
        ("handled", "patient", "one two ended"),
        ("default", "insisting", "one two"),
    ):
        done = subprocess.run([sys.executable, "-c", code, handled, insisting], capture_output=True, text=True)
        assert done.stdout.split() == said.split(), (handled, insisting, done.stderr)
        assert done.returncode == (0 if handled == "handled" else -15)


def test_two_do_not_lock_what_one_has(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x")
    with open(tmp_path / "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(CkptError, match="just being edited"), transaction.locked(tmp_path / "a"):
            pass
