"""Files replaced under a journal: wherever a process dies on the way, it can be gone to its end, and back."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpttool.core.errors import CkptError
from ckpttool.io import journal
from ckpttool.io.journal import NEW, OLD, Journal
from ckpttool.io.temporary import JOURNAL

BEFORE = {"index": b"old", "shard": b"old", "gone": b"old", "sub/deep": b"old", "mine": b"mine"}
PUT = {"shard": b"new", "sub/deep": b"new", "more/added": b"new", "index": b"new"}
AFTER = {"mine": b"mine", **PUT}
LIST = Journal(tuple(PUT), ("gone", "never there"))
RENAMES = 8  # four old ones out of the way, four new ones in


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def filled(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


@pytest.fixture
def staging(tmp_path: Path) -> Path:
    filled(tmp_path / "folder", BEFORE)
    filled(tmp_path / "staging" / NEW, PUT)
    (tmp_path / "staging" / OLD).mkdir()
    return tmp_path / "staging"


class Died(BaseException):
    """The process is not there any more."""


@pytest.fixture
def after(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Lets so many renames be made, and then one fail, or all of them."""
    rename = os.rename

    def set_up(count: int, error: BaseException, fails: int = 1) -> None:
        calls = [0]

        def counted(*args: Any) -> None:
            calls[0] += 1
            if count < calls[0] <= count + fails:
                raise error
            rename(*args)

        monkeypatch.setattr(os, "rename", counted)

    yield set_up
    monkeypatch.undo()


@pytest.mark.parametrize("way", ["on", "back", "back and on"])
@pytest.mark.parametrize("count", range(RENAMES + 1))
def test_from_wherever_it_died_it_leads_to_the_end_and_back(
    staging: Path, monkeypatch: pytest.MonkeyPatch, after: Callable[..., None], count: int, way: str
) -> None:
    folder = staging.parent / "folder"
    after(count, Died())
    if count < RENAMES:
        with pytest.raises(Died):
            journal._finish(staging, folder, LIST)
    else:
        journal._finish(staging, folder, LIST)
    found = content(folder)
    assert "index" not in found or found in (
        BEFORE,
        AFTER,
    )  # what makes it complete is there with all that belongs to it
    monkeypatch.undo()
    if way != "on":
        journal._take_back(staging, folder, LIST)
        assert content(folder) == BEFORE
        assert content(staging / NEW) == PUT
    if way != "back":
        journal._finish(staging, folder, LIST)
        assert content(folder) == AFTER
        assert content(staging / NEW) == {}


@pytest.mark.parametrize("way", ["on", "back"])
def test_what_others_did_meanwhile_is_left(
    staging: Path, monkeypatch: pytest.MonkeyPatch, after: Callable[..., None], way: str
) -> None:
    """A file is there again that goes, and one is gone that was put in."""
    folder = staging.parent / "folder"
    after(6, Died())
    with pytest.raises(Died):
        journal._finish(staging, folder, LIST)
    filled(folder, {"gone": b"theirs"})
    (folder / "shard").unlink()
    monkeypatch.undo()
    if way == "on":
        journal._finish(staging, folder, LIST)
        assert content(folder) == {name: data for name, data in AFTER.items() if name != "shard"} | {"gone": b"theirs"}
    else:
        journal._take_back(staging, folder, LIST)
        assert content(folder) == BEFORE


@pytest.mark.parametrize("count", range(1, RENAMES + 1))
def test_what_fails_on_the_way_is_taken_back(staging: Path, after: Callable[..., None], count: int) -> None:
    """One rename puts the journal into its place; where not even going back is possible the journal stays."""
    folder = staging.parent / "folder"
    after(count, OSError(5, "Input/output error"))
    with pytest.raises(OSError, match="Input/output"):
        journal.carry_out(staging, folder, LIST, fsync=False)
    assert content(folder) == BEFORE
    assert not (staging / JOURNAL).exists()


def test_where_not_even_going_back_is_possible_the_journal_stays(staging: Path, after: Callable[..., None]) -> None:
    after(3, OSError(5, "Input/output error"), fails=2)
    with pytest.raises(CkptError, match="half replaced, which cannot be finished now: Input/output error"):
        journal.carry_out(staging, staging.parent / "folder", LIST, fsync=False)
    found = journal.parse((staging / JOURNAL).read_bytes(), "journal", staging)
    assert found == LIST
