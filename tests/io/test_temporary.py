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
from ckpttool.io import edit_journal, journal, patch, reflink, temporary
from ckpttool.io.journal import Journal
from ckpttool.io.ranges import digest_on_disk
from ckpttool.io.temporary import JOURNAL, me
from ckpttool.io.write_folder import _can_move

AS_ROOT = pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="only root can be another user")
DEAD = replace(me(), pid=1 << 23)
OTHER = 12_345


def name(owner: object, ending: str = "tmp", own: str = "x") -> str:
    return f".{own}.{owner}-00000000.ckpttool.{ending}"


def begun(folder: Path, files: dict[str, bytes], owner: object = DEAD) -> Path:
    """A staging folder whose journal says that the files are to be put into the folder."""
    staging = folder / name(owner)
    for own, data in files.items():
        (staging / "new").mkdir(parents=True, exist_ok=True)
        (staging / "new" / own).write_bytes(data)
    (staging / "old").mkdir()
    (staging / JOURNAL).write_bytes(Journal(tuple(files), ()).text())
    return staging


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
    assert [path.suffix for path in temporary.left_in(tmp_path)] == [".tmp"]
    assert temporary.left_in(tmp_path / "none") == []


def test_litter_beside_the_journal_of_an_edit(tmp_path: Path) -> None:
    save_file({"a.w": torch.ones(2)}, tmp_path / "in.safetensors")
    old = (tmp_path / "in.safetensors").read_bytes()
    descriptor = os.open(tmp_path / "in.safetensors", os.O_RDWR)
    change = edit_journal.Change(patch.Patch(len(old), 8, len(old) - 8, 0, bytes(8), b""), b"", b"")
    (tmp_path / name(DEAD, "edit")).write_bytes(
        edit_journal._text([edit_journal._entry("in.safetensors", descriptor, change)])
    )
    patch.apply(descriptor, change.patch, fsync=False)
    os.close(descriptor)
    (tmp_path / name(DEAD)).write_text("litter")
    journal.recover(tmp_path)
    assert os.listdir(tmp_path) == ["in.safetensors"]
    assert (tmp_path / "in.safetensors").read_bytes() == old
    edit_journal.go_back(tmp_path / name(DEAD, "edit"))


def test_what_another_process_finishes_meanwhile_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    staging = begun(tmp_path, {"a": b"new"})
    plain = temporary.is_dead

    def faster(*args: Any) -> bool:
        (staging / JOURNAL).unlink(missing_ok=True)
        return plain(*args)

    monkeypatch.setattr(temporary, "is_dead", faster)
    journal.recover(tmp_path)
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
    staging = begun(shared, {"other": b"x"})
    staging.chmod(0o700)
    with as_another():
        assert main(["inspect", "in.safetensors"]) == 0
        assert renamed("out.safetensors") == 0
    assert [*load_file("out.safetensors")] == ["b"]
    assert (staging / JOURNAL).exists()


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


def test_a_file_is_not_taken_back_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process has, between the look at its journal and at the file."""
    save_file({"a.w": torch.ones(2)}, tmp_path / "in.safetensors")
    before = (tmp_path / "in.safetensors").read_bytes()
    record = tmp_path / name(DEAD, "edit")
    with edit_journal.locked(tmp_path / "in.safetensors") as descriptor:
        change = edit_journal.Change(patch.Patch(len(before), 8, len(before) - 8, 0, bytes(8), b""), b"", b"")
        record.write_bytes(edit_journal._text([edit_journal._entry("in.safetensors", descriptor, change)]))
        os.pwrite(descriptor, b"x", 0)
    plain = edit_journal.locked

    def faster(path: Path) -> Any:
        record.unlink()
        return plain(path)

    monkeypatch.setattr(edit_journal, "locked", faster)
    edit_journal._go_back(record)
    assert (tmp_path / "in.safetensors").read_bytes() == b"x" + before[1:]


@AS_ROOT
def test_what_another_user_began_is_left_to_that_user(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "in.safetensors")
    staging = begun(tmp_path, {"in.safetensors": b"x"})
    os.chown(staging, OTHER, -1)
    with pytest.raises(CkptError, match=rf"an interrupted edit of another user \(number {OTHER}\)"):
        journal.recover(tmp_path)
    (staging / JOURNAL).unlink()
    journal.recover(tmp_path)
    assert staging.exists()
    staging.rename(tmp_path / "moved")
    edit = tmp_path / name(DEAD, "edit")
    edit.write_bytes(edit_journal._text([]))
    os.chown(edit, OTHER, -1)
    with pytest.raises(CkptError, match=rf"an interrupted edit of another user \(number {OTHER}\)"):
        journal.recover(tmp_path)
    assert edit.exists()
    assert len((tmp_path / "in.safetensors").read_bytes()) > 1


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
    assert reflink.memory() == sys.maxsize
    save_file({"a.w": torch.arange(400_000.0), "b": torch.ones(3)}, "in.safetensors")
    long = "z." + "a.much.longer.name." * 300
    for rule, out in (("a.{x} => z.{x}", ["-o", "out.safetensors", "--verify"]), ("a.{x} => y.{x}", ["--in-place"])):
        assert main(["remap", "in.safetensors", "--rule", rule, *out]) == 0
    assert main(["remap", "in.safetensors", "--undo"]) == 0
    assert main(["remap", "in.safetensors", "--rule", f"a.{{x}} => {long}{{x}}", "--in-place"]) == 0
    for force in ([], ["--force"]):
        assert main(["remap", "out.safetensors", "-o", "m/", "--max-shard-size", "1MB", *force]) == 0
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
        reflink._call("no_such_call", 1)
    assert raised.value.errno in reflink.NOT_HERE


def test_a_signal_that_comes_twice_ends_a_wait_for_the_network_and_nothing_else() -> None:
    """`insisting`, where Python handles it; what only ends the process does so once the block has ended."""
    code = """
import signal, sys
from contextlib import nullcontext
from ckpttool.io.interrupts import *
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
        with pytest.raises(CkptError, match="just being edited"), edit_journal.locked(tmp_path / "a"):
            pass
