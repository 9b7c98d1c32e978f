"""Remote folders are replaced under a journal: if the writer dies at any step, the next command finishes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

import ckpttool
from ckpttool.core.checkpoint import Lazy
from ckpttool.core.errors import CkptError
from ckpttool.io import remote_journal, temporary
from ckpttool.io.pieces import Held, Link, Piece
from ckpttool.io.remote import forget
from ckpttool.io.remote_journal import JOURNAL, Journal
from ckpttool.io.temporary import me
from ckpttool.io.write import preflight, preflight_folder
from ckpttool.io.write_remote import write_folder

OUT = "memory://journals/m"
BEFORE = {"index": b"old", "shard": b"old", "second": b"old", "gone": b"old", "mine": b"mine"}
PUT = {"shard": b"new", "added": b"new", "second": b"new", "index": b"new"}
AFTER = {"mine": b"mine", **PUT}
LIST = Journal(tuple(PUT), ("gone", "never there"))
DEAD = replace(me(), pid=1 << 23)


@pytest.fixture
def fs() -> Iterator[Any]:
    fs = fsspec.filesystem("memory")
    for name, data in BEFORE.items():
        fs.pipe_file(f"/journals/m/{name}", data)
    forget(OUT)
    yield fs
    fs.rm("/journals", recursive=True)
    forget(OUT)


def stage(fs: Any, owner: object = DEAD) -> str:
    """Upload the new files to a staging folder and return its URL."""
    home = f"{OUT}/.new.{owner}-00000000.ckpttool.tmp"
    for name, data in PUT.items():
        fs.pipe_file(f"{home.removeprefix('memory:/')}/{name}", data)
    return home


def content(fs: Any) -> dict[str, bytes]:
    found = {path.removeprefix("/journals/m/"): fs.cat_file(path) for path in fs.find("/journals/m")}
    return {name: data for name, data in found.items() if not temporary.owner_of(name.partition("/")[0])}


class Died(BaseException):
    """Stand-in for a killed process."""


@pytest.mark.parametrize("fault", [Died(), OSError(5, "Slow Down")])
@pytest.mark.parametrize("count", range(12))  # write the journal, remove 2 files, move 4, remove the journal
def test_replacement_interrupted_at_any_step_is_finished(
    fs: Any, monkeypatch: pytest.MonkeyPatch, count: int, fault: BaseException
) -> None:
    home, calls = stage(fs), [0]
    for name in ("rm_file", "mv", "pipe_file"):
        plain = getattr(MemoryFileSystem, name)

        def failing(*args: Any, plain: Any = plain, **how: Any) -> Any:
            calls[0] += 1
            if calls[0] > count:
                raise fault
            return plain(*args, **how)

        monkeypatch.setattr(MemoryFileSystem, name, failing)
    raised: BaseException | None = None
    try:
        remote_journal.replace(home, OUT, LIST.put, LIST.remove)
    except (Died, CkptError) as error:
        raised = error
    assert (raised is None) == (calls[0] <= count)
    assert not isinstance(raised, CkptError) or ("half replaced" in raised.message) == (count > 0)
    monkeypatch.undo()
    now = content(fs)
    assert "index" not in now or now in (BEFORE, AFTER)
    forget(OUT)
    remote_journal.recover(OUT)
    assert content(fs) == (BEFORE if count == 0 else AFTER)
    assert not [path for path in fs.find("/journals/m") if "ckpttool" in path]


@pytest.mark.parametrize("is_on_another_machine", [False, True])
def test_journal_of_another_machine_is_not_recovered(fs: Any, is_on_another_machine: bool) -> None:
    home = stage(fs, replace(me(), host="00000000") if is_on_another_machine else DEAD)
    fs.pipe_file(f"{home.removeprefix('memory:/')}/{JOURNAL}", LIST.text())
    fs.pipe_file(f"{home.removeprefix('memory:/')}/half", b"not in the journal")
    with pytest.raises(
        CkptError, match="may still go on" if is_on_another_machine else "an interrupted edit was found"
    ):
        remote_journal.check(OUT)
    if is_on_another_machine:  # the state of the writer is unknown, however old the journal is
        with pytest.raises(CkptError, match="may still go on") as raised:
            remote_journal.recover(OUT)
        assert f"ckpttool undo {OUT} --force" in raised.value.hint
    else:
        remote_journal.recover(OUT)
    assert content(fs) == (BEFORE if is_on_another_machine else AFTER)
    assert any("ckpttool" in path for path in fs.find("/journals/m")) is is_on_another_machine


@pytest.mark.parametrize("removed", [False, True])
def test_undo_rolls_back_unless_files_were_removed(fs: Any, removed: bool) -> None:
    home = stage(fs)
    fs.pipe_file(f"{home.removeprefix('memory:/')}/{JOURNAL}", Journal(tuple(PUT), ("gone",)).text())
    if removed:
        fs.rm_file("/journals/m/index")
    forget(OUT)
    assert ckpttool.undo(OUT).way == ("finished" if removed else "rolled back")
    assert content(fs) == (AFTER if removed else BEFORE)
    assert not any("ckpttool" in path for path in fs.find("/journals/m"))


def test_old_journal_of_a_live_process_is_not_recovered(fs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    home = stage(fs, me())
    monkeypatch.setattr(temporary, "_in_work", {home.rpartition("/")[2].removesuffix(".tmp")})
    remote_journal.recover(OUT)
    assert fs.find(home)  # its staged files, before there is a journal
    fs.pipe_file(f"{home.removeprefix('memory:/')}/{JOURNAL}", LIST.text())
    monkeypatch.setattr("ckpttool.io.remote_journal.time.time", lambda: time.time_ns() / 1e9 + 1e6)
    forget(OUT)
    with pytest.raises(CkptError, match="just being edited by another process"):
        remote_journal.recover(OUT)
    assert content(fs) == BEFORE


# Nothing is overwritten without --force


def test_file_created_by_another_process_is_kept(fs: Any) -> None:
    """This also holds for files created after the check, while the new files are written."""
    preflight_folder(f"{OUT}/new/", (), "elsewhere.pt", force=False, in_place=False)
    fs.pipe_file("/journals/m/new/index", b"theirs")
    with pytest.raises(CkptError, match="new/index exists: another process has written it meanwhile"):
        write_folder({"shard": [Piece(b"x")], "index": [Piece(b"y")]}, f"{OUT}/new/", (), replace=False)
    assert fs.find("/journals/m/new") == ["/journals/m/new/index"]

    def late() -> list[bytes]:
        fs.pipe_file("/journals/m/late/index", b"theirs")
        return [b"y"]

    files = {"shard": [Piece(b"x")], "index": [Piece(Lazy(1, late))]}
    with pytest.raises(CkptError, match="late/index exists: another process has written it meanwhile"):
        write_folder(files, f"{OUT}/late/", (), replace=False)
    assert fs.cat_file("/journals/m/late/index") == b"theirs"
    write_folder(files, f"{OUT}/late/", (), replace=True)
    assert fs.cat_file("/journals/m/late/index") == b"y"


def test_new_file_keeps_the_other_files(fs: Any) -> None:
    write_folder({"added": [Piece(b"x")]}, OUT, (), replace=False)
    assert content(fs) == {**BEFORE, "added": b"x"}


def test_refused_outputs(fs: Any) -> None:
    how = {"force": True, "in_place": False}
    with pytest.raises(CkptError, match="m is a folder"):
        preflight(OUT, [], **how)
    with pytest.raises(CkptError, match="mine is a file"):
        preflight_folder(f"{OUT}/mine", (), "elsewhere.pt", **how)
    for source in (f"{OUT}/", f"{OUT}/shard"):
        with pytest.raises(CkptError, match="is the folder of the source"):
            preflight_folder(OUT, (), source, **how)
    preflight_folder(OUT, (), "memory://journals/elsewhere/shard", **how)


# Links


def test_linked_file_is_copied_within_the_store_if_possible(
    fs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "local").write_bytes(b"local")
    files = {"a": Link(f"{OUT}/mine"), "b": Link(str(tmp_path / "local")), "c": Link(f"file://{tmp_path}/local")}
    copied, plain = list[str](), MemoryFileSystem.cp_file

    def counted(fs: Any, source: str, place: str, **how: Any) -> None:
        copied.append(source)
        plain(fs, source, place)

    monkeypatch.setattr(MemoryFileSystem, "cp_file", counted)
    write_folder(files, f"{OUT}/linked", (), replace=False)
    assert [fs.cat_file(f"/journals/m/linked/{name}") for name in "abc"] == [b"mine", b"local", b"local"]
    assert copied.count("/journals/m/mine") == 1
    write_folder({"a": Link(f"{OUT}/mine")}, f"{OUT}/proved", (), Held(), replace=False)
    assert fs.cat_file("/journals/m/proved/a") == b"mine"
    assert (
        copied.count("/journals/m/mine") == 1
    )  # with checksums the file is sent from here: nothing proves a copy by the store
