"""Files of a folder replaced in a transaction: wherever the process dies, the old files can be restored."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckpttool.core.errors import CkptError
from ckpttool.io import transaction
from ckpttool.io.temporary import is_edit, me, owner_of

BEFORE = {"index": b"old", "shard": b"old", "removed": b"old", "sub/deep": b"old", "other": b"other"}
PUT = {"shard": b"new", "sub/deep": b"new", "more/added": b"new", "index": b"new"}
AFTER = {"other": b"other", **PUT}
RENAMES = 10  # the journal, four old files away, four new ones in, the journal again


def content(folder: Path) -> dict[str, bytes]:
    found = (path for path in folder.rglob("*") if path.is_file() and "ckpttool" not in path.name)
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def filled(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    filled(tmp_path / "new", PUT)
    return filled(tmp_path / "folder", BEFORE)


def switch(folder: Path, *, keep: bool = False) -> None:
    new = folder.parent / "new"
    rows = transaction.replaced_rows(new, folder, [*PUT, "removed", "never there"], keep=keep)
    transaction.replace_files(new, folder, rows, keep=keep, fsync=False)


class Died(BaseException):
    """The process is not there any more."""


@pytest.fixture
def after(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Let so many renames succeed, then one or more fail."""

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


def died(folder: Path) -> None:
    """Give all temporary files of this process to a dead one."""
    dead = replace(me(), pid=1 << 23)
    for path in [path for path in folder.iterdir() if owner_of(path.name)]:
        if is_edit(path.name):
            path.write_bytes(path.read_bytes().replace(str(me()).encode(), str(dead).encode()))
        path.rename(folder / path.name.replace(str(me()), str(dead)))


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("count", range(RENAMES + 1))
def test_wherever_a_process_dies_the_old_files_are_restored(
    folder: Path, monkeypatch: pytest.MonkeyPatch, after: Callable[..., None], count: int, keep: bool
) -> None:
    after(count, Died())
    if count < RENAMES:
        with pytest.raises(Died):
            switch(folder, keep=keep)
    else:
        switch(folder, keep=keep)
    found = content(folder)
    assert "index" not in found or found in (BEFORE, AFTER)  # the file that completes the set comes with all others
    monkeypatch.undo()
    died(folder)
    for other in ("other", "another"):  # of which the journal says nothing: it and the old files stay
        transaction.recover(folder, [other])
    assert bool(transaction.begun(folder)) == (1 <= count < RENAMES)
    transaction.recover(folder)
    assert content(folder) == (BEFORE if count < RENAMES else AFTER)
    assert not [path for path in folder.iterdir() if owner_of(path.name)]
    assert transaction.recover(folder) == []


def test_restoring_leaves_the_files_of_others(
    folder: Path, monkeypatch: pytest.MonkeyPatch, after: Callable[..., None]
) -> None:
    """An added file was replaced meanwhile."""
    after(RENAMES - 1, Died())
    with pytest.raises(Died):
        switch(folder)
    monkeypatch.undo()
    filled(folder, {"more/added": b"another"})
    died(folder)
    transaction.recover(folder)
    assert content(folder) == {**BEFORE, "more/added": b"another"}


@pytest.mark.parametrize("count", range(RENAMES))
def test_an_error_restores_all_files(folder: Path, after: Callable[..., None], count: int) -> None:
    after(count, OSError(5, "Input/output error"))
    with pytest.raises(OSError, match="Input/output"):
        switch(folder)
    assert content(folder) == BEFORE
    assert not [path for path in folder.iterdir() if "ckpttool" in path.name]


def test_if_restoring_fails_too_the_journal_stays(
    folder: Path, monkeypatch: pytest.MonkeyPatch, after: Callable[..., None]
) -> None:
    after(3, OSError(5, "Input/output error"), fails=2)
    with pytest.raises(CkptError, match="is only partly written, and cannot be restored now: Input/output error"):
        switch(folder)
    monkeypatch.undo()
    assert content(folder) != BEFORE
    with pytest.raises(CkptError, match="an interrupted edit was found"):
        transaction.check(folder, ["shard"], "target")
    transaction.recover(folder)
    assert content(folder) == BEFORE
