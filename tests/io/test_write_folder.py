"""Folders appear complete or not at all, by one call or under a journal; an existing one keeps its
unrelated files.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import fsspec
import pytest

from ckpttool import CkptError
from ckpttool.core.checkpoint import Lazy, Span
from ckpttool.io import syscalls, temporary
from ckpttool.io.pieces import Digest, Files, Link, Piece, Ready
from ckpttool.io.preflight import check_folder
from ckpttool.io.transaction import recover
from ckpttool.io.write import WriteOptions
from ckpttool.io.write_folder import Contents, _can_move, home_of, write_folder


def failing_data() -> Lazy:
    def produce() -> list[bytes]:
        raise CkptError("broken", hint="")

    return Lazy(4, produce)


def files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_new_folder_has_the_default_mode(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write_folder({"sub/a": [Piece(b"xx")], "index": [Piece(b"y")]}, str(out))
    (tmp_path / "other").mkdir()
    assert files_in(out) == ["index", "sub/a"]
    assert out.stat().st_mode == (tmp_path / "other").stat().st_mode
    assert sorted(os.listdir(tmp_path)) == ["other", "out"]


def test_failed_write_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(CkptError, match="broken"):
        write_folder({"a": [Piece(b"x")], "b": [Piece(failing_data())]}, str(tmp_path / "out"))
    assert list(tmp_path.iterdir()) == []


def test_failed_write_leaves_an_existing_folder_unchanged(tmp_path: Path) -> None:
    (tmp_path / "index").write_bytes(b"old")
    with pytest.raises(CkptError, match="broken"):
        write_folder({"index": [Piece(failing_data())]}, str(tmp_path), stale={"index"})
    assert (tmp_path / "index").read_bytes() == b"old"
    assert files_in(tmp_path) == ["index"]


def test_old_checkpoint_is_replaced_and_other_files_stay(tmp_path: Path) -> None:
    for name in ("index", "shard-1", "shard-2", "README", "sub/x"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"old")
    write_folder(
        {"shard-1": [Piece(b"new")], "index": [Piece(b"new")]},
        str(tmp_path),
        stale={"shard-1", "shard-2"},
    )
    assert files_in(tmp_path) == ["README", "index", "shard-1", "sub/x"]
    assert (tmp_path / "shard-1").read_bytes() == (tmp_path / "index").read_bytes() == b"new"


def test_linked_file_is_copied(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.write_bytes(b"bytes")
    out = tmp_path / "out"
    write_folder({"d": Link(str(data)), "index": [Piece(b"i")]}, str(out))
    assert (out / "d").read_bytes() == b"bytes"
    assert not (out / "d").samefile(data)


def test_file_linked_to_itself_is_kept(tmp_path: Path) -> None:
    (tmp_path / "d").write_bytes(b"bytes")
    (tmp_path / ".metadata").write_bytes(b"old")
    files: dict[str, list[Piece] | Link] = {
        "d": Link(str(tmp_path / "d")),
        ".metadata": [Piece(b"new")],
    }
    write_folder(files, str(tmp_path), stale={"d", ".metadata"})
    assert files_in(tmp_path) == [".metadata", "d"]
    assert (tmp_path / ".metadata").read_bytes() == b"new"


def test_output_larger_than_free_space_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"")
    huge = Piece(Span(str(tmp_path / "x"), 0, 1 << 60))
    with pytest.raises(CkptError, match="are free"):
        write_folder({"a": [huge]}, str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_preflight(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    out = tmp_path / "out"
    out.mkdir()

    def check(
        out: Path, present: Collection[str] = (), source: str = "elsewhere.pt", **how: bool
    ) -> None:
        check_folder(str(out), present, source, **{"force": False, "in_place": False, **how})

    check(out)
    check(tmp_path / "new")
    check(out, source="s3://bucket/a.pt")
    check(out, {"model.safetensors"}, force=True)
    with pytest.raises(CkptError, match="is a file"):
        check(tmp_path / "file")
    with pytest.raises(CkptError, match="no such folder"):
        check(tmp_path / "none" / "out")
    with pytest.raises(CkptError, match="holds a checkpoint"):
        check(out, {"model.safetensors"})
    for source in (str(out), str(out / "model.safetensors")):
        with pytest.raises(CkptError, match="folder of the source"):
            check(out, {"model.safetensors"}, source, force=True)
        check(out, {"model.safetensors"}, source, in_place=True)


def test_linked_url_is_downloaded(tmp_path: Path) -> None:
    fs = fsspec.filesystem("memory")
    fs.pipe_file("/links/a", b"data")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "a").write_bytes(b"old")
    write_folder({"a": Link("memory://links/a")}, str(tmp_path / "out"))
    assert (tmp_path / "out" / "a").read_bytes() == b"data"
    fs.rm("/links", recursive=True)


def test_ready_file_is_moved_without_a_digest(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"data")
    (tmp_path / "made").write_bytes(b"made")
    digests: dict[str, Digest] = {}
    ready = Ready(str(tmp_path / "made"), ())
    files: Contents = {"a": Link(str(tmp_path / "a")), "made": ready, "index": [Piece(b"i")]}
    write_folder(files, str(tmp_path / "out"), WriteOptions(digests=digests))
    assert [(tmp_path / "out" / name).read_bytes() for name in files] == [b"data", b"made", b"i"]
    assert {Path(path).name for path in digests} == {"a", "index"}
    assert not (tmp_path / "made").exists()


NEW: Files = {"sub/shard": [Piece(b"new")], "index": [Piece(b"new")]}
BEFORE = {
    "index": "old",
    "sub/shard": "old",
    "sub/note": "mine",
    "log/deep/a": "mine",
    "README": "mine",
}
AFTER = {**BEFORE, "index": "new", "sub/shard": "new"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a checkpoint of two files, other files, and a symlink to a folder."""
    for name, text in BEFORE.items():
        (tmp_path / "m" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "m" / name).write_text(text)
    (tmp_path / "m" / "link").symlink_to("log")
    return tmp_path / "m"


def texts(folder: Path) -> dict[str, str]:
    assert os.readlink(folder / "link") == "log"
    found = (
        path
        for path in folder.rglob("*")
        if path.is_file() and not path.is_relative_to(folder / "link")
    )
    return {str(path.relative_to(folder)): path.read_text() for path in found}


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder.parent)) + [
        str(p) for p in folder.rglob("*") if temporary.owner_of(p.name)
    ]


def failing_with(number: int) -> Callable[..., None]:
    def refused(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    return refused


@pytest.mark.parametrize("fsync", [True, False])
@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EINVAL, errno.EXDEV, errno.EBUSY])
def test_journal_is_used_if_folders_cannot_be_exchanged(
    folder: Path, monkeypatch: pytest.MonkeyPatch, number: int, fsync: bool
) -> None:
    monkeypatch.setattr(syscalls, "renameat2", failing_with(number))
    inode = folder.stat().st_ino
    write_folder(NEW, str(folder), WriteOptions(fsync=fsync))
    assert texts(folder) == AFTER
    assert (names(folder), folder.stat().st_ino) == (["m"], inode)


@pytest.mark.parametrize("call", ["renameat2", "link", "mkdir"])
def test_other_errors_leave_the_folder_unchanged(
    folder: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    if call == "mkdir" and sys.version_info < (3, 11):
        pytest.skip("before Python 3.11, pathlib keeps its own reference to mkdir")
    if call == "renameat2":
        monkeypatch.setattr(syscalls, call, failing_with(errno.EIO))
    else:
        plain = getattr(os, call)

        def failing(path: Any, *more: Any, **how: Any) -> None:
            plain(path, *more, **how) if "README" not in str(path) and "deep" not in str(
                path
            ) else failing_with(errno.EIO)()

        monkeypatch.setattr(os, call, failing)
    with pytest.raises(CkptError, match="m: Input/output error"):
        write_folder(NEW, str(folder))
    monkeypatch.undo()
    assert (texts(folder), names(folder)) == (BEFORE, ["m"])


def test_failed_rename_of_a_new_folder_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "rename", failing_with(errno.EIO))
    with pytest.raises(CkptError, match="new: Input/output error"):
        write_folder(NEW, str(tmp_path / "new"))
    assert os.listdir(tmp_path) == []


@pytest.fixture
def meanwhile(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """Run a function when the new folder is complete, just before the two folders are exchanged."""

    def set_up(do: Callable[[], object]) -> None:
        plain, todo = syscalls.renameat2, [do]

        def exchanging(*args: Any) -> None:
            while todo:
                todo.pop()()
            plain(*args)

        monkeypatch.setattr(syscalls, "renameat2", exchanging)

    return set_up


def test_files_changed_meanwhile_are_kept(folder: Path, meanwhile: Any) -> None:
    def other() -> None:
        (folder / "late").write_text("late")
        (folder / "README").unlink()
        (folder / "README").write_text("another")

    meanwhile(other)
    inode = folder.stat().st_ino
    for path, bits in ((folder, 0o751), (folder / "sub", 0o710), (folder / "log", 0o701)):
        path.chmod(bits)
    write_folder(NEW, str(folder))
    assert texts(folder) == {**AFTER, "late": "late", "README": "another"}
    assert names(folder) == ["m"]
    assert folder.stat().st_ino != inode
    assert [
        stat.S_IMODE(path.stat().st_mode) for path in (folder, folder / "sub", folder / "log")
    ] == [*(0o751, 0o710, 0o701)]


@pytest.mark.parametrize("way", ["one call", "journal"])
@pytest.mark.parametrize("fsync", [True, False])
def test_every_folder_is_flushed_before_and_after_the_switch(
    folder: Path, monkeypatch: pytest.MonkeyPatch, fsync: bool, way: str
) -> None:
    """All folders with new entries are flushed; with fsync=False, none is."""
    plain, done = os.fsync, list[str]()

    def recorded(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            done.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        plain(descriptor)

    def exchanging(*args: Any) -> None:
        if way == "journal":
            failing_with(errno.ENOSYS)()
        done.append("=>")
        exchange(*args)

    exchange = syscalls.renameat2
    monkeypatch.setattr(syscalls, "renameat2", exchanging)
    monkeypatch.setattr(os, "fsync", recorded)
    write_folder(NEW, str(folder), WriteOptions(fsync=fsync))
    if not fsync:
        assert done == ["=>"] * (way == "one call")
    elif way == "one call":
        at = done.index("=>")
        assert {"new", "sub", "log", "deep"} <= {*done[done.index("new") + 2 : at]}
        assert done[at + 1 :] == [folder.parent.name]
    else:
        assert done[-2:] == ["m", folder.parent.name]


def test_home_of_the_staging_folder(folder: Path) -> None:
    """It is the parent if the folder can be replaced or does not exist yet, else the folder
    itself.
    """
    for place, home in (
        (folder, folder.parent),
        (folder.parent / "none", folder.parent),
        (Path("/proc"), Path("/proc")),
    ):
        assert home_of(place) == home


@pytest.mark.parametrize("is_reverted", [True, False])
def test_exchange_is_reverted_if_added_files_cannot_be_moved(
    folder: Path, meanwhile: Any, monkeypatch: pytest.MonkeyPatch, is_reverted: bool
) -> None:
    """If the folders cannot be exchanged again, the error says that the folder is replaced."""

    def other() -> None:
        (folder / "late").write_text("late")
        monkeypatch.setattr(os, "link", failing_with(errno.EIO))

    meanwhile(other)
    if not is_reverted:
        plain, calls = syscalls.renameat2, []

        def once(*args: Any) -> None:
            calls.append(args)
            plain(*args) if len(calls) == 1 else failing_with(errno.EIO)()

        monkeypatch.setattr(syscalls, "renameat2", once)
    with pytest.raises(CkptError) as raised:
        write_folder(NEW, str(folder))
    if is_reverted:
        assert "is as it was" in raised.value.hint
        assert texts(folder) == {**BEFORE, "late": "late"}
    else:
        assert (
            "is replaced and complete, but not what another process put into it"
            in raised.value.message
        )
        assert texts(folder) == AFTER
    assert names(folder) == ["m"]


def test_next_command_restores_the_folder_if_rollback_failed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(syscalls, "renameat2", failing_with(errno.ENOSYS))
    plain = os.rename

    def dying(old: Any, new: Any) -> None:
        plain(old, new)
        if Path(old).name == "index":
            for call in ("rename", "replace"):
                monkeypatch.setattr(os, call, failing_with(errno.EIO))

    monkeypatch.setattr(os, "rename", dying)
    with pytest.raises(
        CkptError, match="is only partly written, and cannot be restored now: Input/output error"
    ):
        write_folder(NEW, str(folder))
    with pytest.raises(
        CkptError, match="is only partly written, and cannot be restored now: Input/output error"
    ):
        recover(folder)
    monkeypatch.undo()
    assert not (folder / "index").exists()
    recover(folder)
    assert (texts(folder), names(folder)) == (BEFORE, ["m"])


# Which folders can be exchanged


def test_working_directory_is_not_exchanged(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder / "sub")
    assert not _can_move(folder)
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    assert _can_move(folder)
    (tmp_path / "gone").rmdir()
    assert not _can_move(folder)
    write_folder(NEW, str(folder))
    assert texts(folder) == AFTER
    assert not _can_move(Path("/proc"))  # a mount point


@pytest.mark.skipif(
    os.name != "posix" or os.geteuid() != 0, reason="only root can change the owner of a file"
)
def test_replaced_folder_keeps_its_owner(folder: Path) -> None:
    os.chown(folder, 12_345, 12_346)
    os.chown(folder / "log", 12_345, 12_346)
    write_folder(NEW, str(folder))
    for path in (folder, folder / "log"):
        assert (path.stat().st_uid, path.stat().st_gid) == (12_345, 12_346)
