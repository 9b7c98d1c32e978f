"""Folders of a store that are replaced under a journal: from wherever the writer died, whoever looks next finishes."""

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


def staged(fs: Any, owner: object = DEAD) -> str:
    """The new files, beside the old ones."""
    home = f"{OUT}/.new.{owner}-00000000.ckpttool.tmp"
    for name, data in PUT.items():
        fs.pipe_file(f"{home.removeprefix('memory:/')}/{name}", data)
    return home


def content(fs: Any) -> dict[str, bytes]:
    found = {path.removeprefix("/journals/m/"): fs.cat_file(path) for path in fs.find("/journals/m")}
    return {name: data for name, data in found.items() if not temporary.owner_of(name.partition("/")[0])}


class Died(BaseException):
    """The process is not there any more."""


@pytest.mark.parametrize("fault", [Died(), OSError(5, "Slow Down")])
@pytest.mark.parametrize("count", range(12))  # the journal is written, two old files go, four new ones come, it goes
def test_from_wherever_it_died_it_leads_to_the_end(
    fs: Any, monkeypatch: pytest.MonkeyPatch, count: int, fault: BaseException
) -> None:
    home, calls = staged(fs), [0]
    for name in ("rm_file", "mv", "pipe_file"):
        plain = getattr(MemoryFileSystem, name)

        def failing(*args: Any, plain: Any = plain, **how: Any) -> Any:
            calls[0] += 1
            if calls[0] > count:
                raise fault
            return plain(*args, **how)

        monkeypatch.setattr(MemoryFileSystem, name, failing)
    said: BaseException | None = None
    try:
        remote_journal.replace(home, OUT, LIST.put, LIST.remove)
    except (Died, CkptError) as error:
        said = error
    assert (said is None) == (calls[0] <= count)
    assert not isinstance(said, CkptError) or ("half replaced" in said.message) == (count > 0)
    monkeypatch.undo()
    now = content(fs)
    assert "index" not in now or now in (BEFORE, AFTER)
    forget(OUT)
    remote_journal.recover(OUT)
    assert content(fs) == (BEFORE if count == 0 else AFTER)
    assert not [path for path in fs.find("/journals/m") if "ckpttool" in path]


@pytest.mark.parametrize("far", [False, True])
def test_what_another_process_began_is_left_to_it_as_long_as_it_may_live(fs: Any, far: bool) -> None:
    home = staged(fs, replace(me(), host="00000000") if far else DEAD)
    fs.pipe_file(f"{home.removeprefix('memory:/')}/{JOURNAL}", LIST.text())
    fs.pipe_file(f"{home.removeprefix('memory:/')}/half", b"what no journal lists")
    with pytest.raises(CkptError, match="may still go on" if far else "an interrupted edit was found"):
        remote_journal.check(OUT)
    if far:  # nothing is known of it, however old it is
        with pytest.raises(CkptError, match="may still go on") as raised:
            remote_journal.recover(OUT)
        assert f"ckpttool undo {OUT} --force" in raised.value.hint
    else:
        remote_journal.recover(OUT)
    assert content(fs) == (BEFORE if far else AFTER)
    assert any("ckpttool" in path for path in fs.find("/journals/m")) is far


@pytest.mark.parametrize("removed", [False, True])
def test_undo_takes_back_what_has_removed_nothing_and_finishes_the_rest(fs: Any, removed: bool) -> None:
    home = staged(fs)
    fs.pipe_file(f"{home.removeprefix('memory:/')}/{JOURNAL}", Journal(tuple(PUT), ("gone",)).text())
    if removed:
        fs.rm_file("/journals/m/index")
    forget(OUT)
    assert ckpttool.undo(OUT).way == ("finished" if removed else "rolled back")
    assert content(fs) == (AFTER if removed else BEFORE)
    assert not any("ckpttool" in path for path in fs.find("/journals/m"))


def test_what_a_process_that_lives_began_stays_however_old(fs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    home = staged(fs, me())
    monkeypatch.setattr(temporary, "_in_work", {home.rpartition("/")[2].removesuffix(".tmp")})
    remote_journal.recover(OUT)
    assert fs.find(home)  # its files, of which no journal says anything yet
    fs.pipe_file(f"{home.removeprefix('memory:/')}/{JOURNAL}", LIST.text())
    monkeypatch.setattr("ckpttool.io.remote_journal.time.time", lambda: time.time_ns() / 1e9 + 1e6)
    forget(OUT)
    with pytest.raises(CkptError, match="just being edited by another process"):
        remote_journal.recover(OUT)
    assert content(fs) == BEFORE


# What is there is not written over unasked


def test_what_came_into_the_folder_meanwhile_stays(fs: Any) -> None:
    """Also what comes while the files are made: after it was looked for."""
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


def test_new_files_beside_others_go_where_they_belong(fs: Any) -> None:
    write_folder({"beside": [Piece(b"x")]}, OUT, (), replace=False)
    assert content(fs) == {**BEFORE, "beside": b"x"}


def test_outputs_that_are_refused(fs: Any) -> None:
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


def test_a_file_that_is_taken_over_as_it_is_is_copied_by_the_store_or_through_here(
    fs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "local").write_bytes(b"local")
    files = {"a": Link(f"{OUT}/mine"), "b": Link(str(tmp_path / "local")), "c": Link(f"file://{tmp_path}/local")}
    copied, plain = list[str](), MemoryFileSystem.cp_file

    def counted(own: Any, source: str, place: str, **how: Any) -> None:
        copied.append(source)
        plain(own, source, place)

    monkeypatch.setattr(MemoryFileSystem, "cp_file", counted)
    write_folder(files, f"{OUT}/linked", (), replace=False)
    assert [fs.cat_file(f"/journals/m/linked/{name}") for name in "abc"] == [b"mine", b"local", b"local"]
    assert copied.count("/journals/m/mine") == 1
    write_folder({"a": Link(f"{OUT}/mine")}, f"{OUT}/proved", (), Held(), replace=False)
    assert fs.cat_file("/journals/m/proved/a") == b"mine"
    assert copied.count("/journals/m/mine") == 1  # nothing proves what a store has copied
