"""The files that ranks write together, and the staging folder of their job."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore

from ckpttool import CkptError
from ckpttool.core.checkpoint import Lazy, Span
from ckpttool.distributed import files as by_ranks
from ckpttool.distributed.files import is_staging
from ckpttool.distributed.job import FailedElsewhere, Job, RankDone
from ckpttool.io import progress, sources
from ckpttool.io.pieces import Crc, Files, Link, Piece, Pieces, Ready
from ckpttool.io.write import WriteOptions

LEAST = 1 << 14  # bytes of a unit
SOURCE = os.urandom(5 * LEAST + 123)


@pytest.fixture(autouse=True)
def source(tmp_path: Path) -> Iterator[Path]:
    """Write a source of slightly more than five units."""
    path = tmp_path / "source.bin"
    path.write_bytes(SOURCE)
    yield path
    sources.forget_all()


class Torn(Exception):
    """Stand-in for an error on a rank."""


def files(source: Path, calls: list[str] | None = None, broken: str = "") -> dict[str, Pieces]:
    """Return two files of copied, computed and literal bytes, one of them with a checksum, and a
    text file.

    Computed pieces append their names to `calls`; the one named `broken` raises.
    """
    crc = Crc()

    def computed(name: str, content: Callable[[], bytes], count: int) -> Lazy:
        def produce() -> list[memoryview]:
            if name == broken:
                raise Torn
            (calls if calls is not None else []).append(name)
            return [memoryview(content())]

        return Lazy(count, produce)

    first = [
        Piece(b"head"),
        Piece(computed("values", lambda: VALUES, 3 * LEAST), crc=crc),
        Piece(Span(str(source), 7, 3 * LEAST)),
        Piece(computed("sum", lambda: crc.value.to_bytes(4, "big"), 4), needs=(crc,)),
    ]
    second = [
        Piece(Span(str(source), 3 * LEAST, 2 * LEAST + 5)),
        Piece(computed("more", lambda: b"m" * LEAST, LEAST)),
    ]
    return {"first.bin": first, "deep/second.bin": second, "index.json": [Piece(b"{}")]}


VALUES = b"v" * (3 * LEAST)
WHOLE = {
    "first.bin": b"head"
    + VALUES
    + SOURCE[7 : 7 + 3 * LEAST]
    + zlib.crc32(VALUES).to_bytes(4, "big"),
    "deep/second.bin": SOURCE[3 * LEAST : 5 * LEAST + 5] + b"m" * LEAST,
}


def run(
    home: Path, *ranks: Files, plan: str | None = "plan", verify: bool = False, **options: Any
) -> dict[str, bytes]:
    """Write the files with one thread per rank and return the bytes by name. Raise the error of
    rank 0.
    """
    sources.forget_all()  # as in a new process
    store, written, errors = HashStore(), dict[str, bytes](), dict[int, BaseException]()

    def run_rank(rank: int) -> None:
        job = Job(rank, len(ranks), store, ("remap",))
        try:
            how = WriteOptions(**options)
            with by_ranks.shared(
                job, ranks[rank], str(home / "out"), plan, how, verify=verify
            ) as ready:
                written.update(
                    (name, Path(one.path).read_bytes())
                    for name, one in ready.items()
                    if isinstance(one, Ready)
                )
        except RankDone:
            pass
        except BaseException as error:
            errors[rank] = error
            job.fail()

    threads = [threading.Thread(target=run_rank, args=(rank,)) for rank in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if 0 in errors:
        raise errors[0]
    return written


class Broken(dict[str, Any]):
    """The files of a rank that fails before it has a plan."""

    def items(self) -> Any:
        """Raise."""
        raise Torn


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("verify", [False, True])
def test_ranks_write_the_files_and_remove_the_staging_folder(
    source: Path, tmp_path: Path, ranks: int, verify: bool
) -> None:
    calls = list[str]()
    assert run(tmp_path, *(files(source, calls) for _ in range(ranks)), verify=verify) == WHOLE
    assert sorted(calls) == ["more", "sum", "values"]
    assert [*tmp_path.glob(".*")] == []


def test_failed_rank_ends_the_others(source: Path, tmp_path: Path) -> None:
    with pytest.raises((Torn, FailedElsewhere)):
        run(tmp_path, files(source, broken="more"), files(source, broken="more"))
    with pytest.raises(FailedElsewhere):
        run(tmp_path, files(source), Broken())


@pytest.mark.parametrize("ranks", [1, 2])
def test_progress_counts_every_byte_once(source: Path, tmp_path: Path, ranks: int) -> None:
    """The work of other ranks counts on each rank."""
    done = list[int]()
    with (
        progress.shown(lambda title, total: nullcontext(done.append)),
        progress.doing("out", None, "written"),
    ):
        run(tmp_path, *(files(source) for _ in range(ranks)))
    assert sum(done) == ranks * sum(map(len, WHOLE.values()))


def test_verify_fails_if_the_disk_holds_other_bytes(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync

    def failing(descriptor: int) -> None:
        with suppress(OSError):  # the descriptor of a folder
            os.pwrite(descriptor, b"!", LEAST + 100)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(CkptError) as raised:
        run(tmp_path, files(source), verify=True)
    assert raised.value.message == "what was written is not what the disk holds"
    assert [problem.key.partition(",")[0] for problem in raised.value.problems] == ["first.bin"]


def left(home: Path) -> Path:
    """Return the staging folder that a killed job left."""
    folder = home / ".out.0123456789abcdef.ckpttool.job"
    (folder / "new").mkdir(parents=True)
    (folder / "new" / "first.bin").write_bytes(b"half")
    return folder


def test_next_job_replaces_the_staging_folder_of_a_killed_one(source: Path, tmp_path: Path) -> None:
    left(tmp_path)
    assert run(tmp_path, files(source)) == WHOLE
    assert [*tmp_path.glob(".out.*")] == []


def test_failed_job_leaves_no_staging_folder(source: Path, tmp_path: Path) -> None:
    with pytest.raises(Torn):
        run(tmp_path, files(source, broken="more"))
    assert [*tmp_path.glob(".out.*")] == []


def test_two_jobs_do_not_write_the_same_files_at_once(source: Path, tmp_path: Path) -> None:
    folder = left(tmp_path)
    descriptor = os.open(folder, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        with pytest.raises(CkptError, match="is being written by another job"):
            run(tmp_path, files(source))
        assert [*tmp_path.glob(".out.*")] == [folder]
    finally:
        os.close(descriptor)


def test_linked_file_is_copied(source: Path, tmp_path: Path) -> None:
    assert run(tmp_path, {**files(source), "linked.bin": Link(str(source))}) == {
        **WHOLE,
        "linked.bin": SOURCE,
    }


def test_staging_name_identifies_its_output() -> None:
    assert is_staging(".out.0123456789abcdef.ckpttool.job", "out")
    for found in (".out.notes.ckpttool.job", ".out.pt.0123456789abcdef.ckpttool.job"):
        assert not is_staging(found, "out")


def test_without_locks_other_staging_folders_are_kept(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another job may still be writing them."""
    folder = left(tmp_path)

    def refused(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refused)
    assert run(tmp_path, files(source)) == WHOLE
    assert [*tmp_path.glob(".out.*")] == [folder]


@pytest.mark.skipif(
    os.name != "posix" or os.geteuid() != 0, reason="only root can change the owner of a file"
)
def test_staging_folder_of_another_user_is_kept(source: Path, tmp_path: Path) -> None:
    folder = left(tmp_path)
    os.chown(folder, 12_345, -1)
    run(tmp_path, files(source))
    assert [*tmp_path.glob(".out.*")] == [folder]


@pytest.mark.parametrize("fsync", [True, False])
def test_files_are_flushed_only_with_fsync(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fsync: bool
) -> None:
    flushed, plain = list[str](), os.fsync

    def recorded(descriptor: int) -> None:
        flushed.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        plain(descriptor)

    monkeypatch.setattr(os, "fsync", recorded)
    assert run(tmp_path, files(source), fsync=fsync) == WHOLE
    assert ({"first.bin", "second.bin"} <= {*flushed}) is fsync
