"""Files of a folder are replaced in a transaction: the old files can be restored after a crash at
any step.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckpttool import CkptError
from ckpttool.io import transaction
from ckpttool.io.temporary import is_edit, me, owner_of

BEFORE = {
    "index": b"old",
    "shard": b"old",
    "removed": b"old",
    "sub/deep": b"old",
    "other": b"other",
}
PUT = {"shard": b"new", "sub/deep": b"new", "more/added": b"new", "index": b"new"}
AFTER = {"other": b"other", **PUT}
RENAMES = 10  # write the journal, move 4 old files away, move 4 new ones in, remove the journal


def content(folder: Path) -> dict[str, bytes]:
    found = (path for path in folder.rglob("*") if path.is_file() and "ckpttool" not in path.name)
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def write_files(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def test_a_row_names_a_file_of_the_folder_and_one_that_we_hid(tmp_path: Path) -> None:
    for name, old in (("a", "b"), ("a", None), ("../a", None)):
        assert not transaction.Replaced(name, old, None).is_sound(tmp_path)
    assert transaction.Replaced("a", f".a.{me()}-00000000.ckpttool.tmp", None).is_sound(tmp_path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_files(tmp_path / "new", PUT)
    return write_files(tmp_path / "folder", BEFORE)


def switch(folder: Path) -> None:
    new = folder.parent / "new"
    rows = transaction.replaced_rows(new, folder, [*PUT, "removed", "never there"])
    transaction.replace_files(new, folder, rows, fsync=False)


class Died(BaseException):
    """Stand-in for a killed process."""


@pytest.fixture
def fail_after(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Let `count` renames succeed, then make one or more fail."""

    def set_up(count: int, error: BaseException, fails: int = 1) -> None:
        calls = [0]

        def counted(call: Callable[..., None]) -> Callable[..., None]:
            def called(*args: Any) -> None:
                calls[0] += 1
                if count < calls[0] <= count + fails:
                    raise error
                call(*args)

            return called

        monkeypatch.setattr(os, "rename", counted(os.rename))
        monkeypatch.setattr(os, "replace", counted(os.replace))

    yield set_up
    monkeypatch.undo()


def mark_as_dead(folder: Path) -> None:
    """Give all temporary files of this process to a dead one."""
    dead = replace(me(), pid=1 << 23)
    for path in [path for path in folder.iterdir() if owner_of(path.name)]:
        if is_edit(path.name):
            path.write_bytes(path.read_bytes().replace(str(me()).encode(), str(dead).encode()))
        path.rename(folder / path.name.replace(str(me()), str(dead)))


@pytest.mark.parametrize("count", range(RENAMES + 1))
def test_crash_at_any_step_restores_the_old_files(
    folder: Path, monkeypatch: pytest.MonkeyPatch, fail_after: Callable[..., None], count: int
) -> None:
    fail_after(count, Died())
    if count < RENAMES:
        with pytest.raises(Died):
            switch(folder)
    else:
        switch(folder)
    found = content(folder)
    # the index exists only with all other files
    assert "index" not in found or found in (BEFORE, AFTER)
    monkeypatch.undo()
    mark_as_dead(folder)
    for other in ("other", "another"):  # not in the journal, so the journal and the old files stay
        transaction.recover(folder, [other])
    assert bool(transaction.unfinished_edits(folder)) == (1 <= count < RENAMES)
    transaction.recover(folder)
    assert content(folder) == (BEFORE if count < RENAMES else AFTER)
    assert not [path for path in folder.iterdir() if owner_of(path.name)]
    assert transaction.recover(folder) == []


def test_recovery_keeps_files_of_other_processes(
    folder: Path, monkeypatch: pytest.MonkeyPatch, fail_after: Callable[..., None]
) -> None:
    """Another process has replaced an added file."""
    fail_after(RENAMES - 1, Died())
    with pytest.raises(Died):
        switch(folder)
    monkeypatch.undo()
    write_files(folder, {"more/added": b"another"})
    mark_as_dead(folder)
    transaction.recover(folder)
    assert content(folder) == {**BEFORE, "more/added": b"another"}


@pytest.mark.parametrize("count", range(RENAMES))
def test_error_restores_all_files(
    folder: Path, fail_after: Callable[..., None], count: int
) -> None:
    fail_after(count, OSError(5, "Input/output error"))
    with pytest.raises(OSError, match="Input/output"):
        switch(folder)
    assert content(folder) == BEFORE
    assert not [path for path in folder.iterdir() if "ckpttool" in path.name]


def test_journal_stays_if_rollback_failed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, fail_after: Callable[..., None]
) -> None:
    fail_after(3, OSError(5, "Input/output error"), fails=2)
    with pytest.raises(
        CkptError, match="is only partly written, and cannot be restored now: Input/output error"
    ):
        switch(folder)
    monkeypatch.undo()
    assert content(folder) != BEFORE
    with pytest.raises(CkptError, match="an interrupted edit was found"):
        transaction.check(folder, ["shard"], "target")
    transaction.recover(folder)
    assert content(folder) == BEFORE
