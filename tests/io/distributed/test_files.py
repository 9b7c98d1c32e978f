"""The staging folder of a job: what is on the disk is made once, and nothing is taken for it that is not."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore

from ckpttool.core.checkpoint import Lazy, Span
from ckpttool.core.errors import CkptError
from ckpttool.distributed import files as by_ranks
from ckpttool.distributed.files import is_staging, staging_name, write_all
from ckpttool.distributed.job import FailedElsewhere, Job, RankDone
from ckpttool.io import progress, sources
from ckpttool.io.pieces import Crc, Files, Link, Piece, Pieces, Ready
from ckpttool.io.write import WriteOptions

LEAST = 1 << 14  # bytes of a unit
SOURCE = os.urandom(5 * LEAST + 123)


@pytest.fixture(autouse=True)
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Five units and a bit."""
    monkeypatch.setattr(by_ranks, "_LEAST", LEAST)
    path = tmp_path / "source.bin"
    path.write_bytes(SOURCE)
    yield path
    sources.forget_all()


class Torn(Exception):
    """A rank cannot go on."""


def files(source: Path, calls: list[str] | None = None, broken: str = "") -> dict[str, Pieces]:
    """Two files of copied, computed and literal bytes, with a checksum of others, and one of text.

    What is computed notes so in `calls`; what is `broken` cannot be.
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
    second = [Piece(Span(str(source), 3 * LEAST, 2 * LEAST + 5)), Piece(computed("more", lambda: b"m" * LEAST, LEAST))]
    return {"first.bin": first, "deep/second.bin": second, "index.json": [Piece(b"{}")]}


VALUES = b"v" * (3 * LEAST)
WHOLE = {
    "first.bin": b"head" + VALUES + SOURCE[7 : 7 + 3 * LEAST] + zlib.crc32(VALUES).to_bytes(4, "big"),
    "deep/second.bin": SOURCE[3 * LEAST : 5 * LEAST + 5] + b"m" * LEAST,
}


def run(home: Path, *ranks: Files, plan: str | None = "plan", verify: bool = False, **options: Any) -> dict[str, bytes]:
    """What the ranks, a thread each, make of their files: the bytes by name. Raises what the first rank raises."""
    sources.forget_all()  # each run is a command of its own
    store, found, errors = HashStore(), dict[str, bytes](), dict[int, BaseException]()

    def one(rank: int) -> None:
        job = Job(rank, len(ranks), store, ("remap",))
        try:
            how = WriteOptions(**options)
            with by_ranks.written(job, ranks[rank], str(home / "out"), home, plan, how, verify=verify) as ready:
                found.update(
                    (name, Path(one.path).read_bytes()) for name, one in ready.items() if isinstance(one, Ready)
                )
        except RankDone:
            pass
        except BaseException as error:
            errors[rank] = error
            job.fail()

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if 0 in errors:
        raise errors[0]
    return found


class Broken(dict[str, Any]):
    """The files of a rank that does not even come to a plan."""

    def items(self) -> Any:
        """None."""
        raise Torn


def begun(source: Path, home: Path, **asked: Any) -> Path:
    """The staging folder of a run that could not make ``more``: `values` is there, which the record says."""
    with pytest.raises(Torn):
        run(home, files(source, broken="more"), **asked)
    (folder,) = home.glob(".out.*")
    return folder


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("verify", [False, True])
def test_all_ranks_make_the_files_and_what_they_were_made_in_goes(
    source: Path, tmp_path: Path, ranks: int, verify: bool
) -> None:
    calls = list[str]()
    assert run(tmp_path, *(files(source, calls) for _ in range(ranks)), verify=verify) == WHOLE
    assert sorted(calls) == ["more", "sum", "values"]
    assert [*tmp_path.glob(".*")] == []


def test_what_one_rank_cannot_make_ends_the_others(source: Path, tmp_path: Path) -> None:
    with pytest.raises((Torn, FailedElsewhere)):
        run(tmp_path, files(source, broken="more"), files(source, broken="more"))
    with pytest.raises(FailedElsewhere):
        run(tmp_path, files(source), Broken())


@pytest.mark.parametrize("before", [False, True])
def test_every_byte_that_is_written_is_counted_once(source: Path, tmp_path: Path, before: bool) -> None:
    """Those that a run before has written are told too, as done."""
    if before:
        begun(source, tmp_path, verify=True)
    done = list[int]()
    with progress.shown(lambda title, total: nullcontext(done.append)), progress.doing("out", None, "written"):
        run(tmp_path, files(source), verify=True)
    assert sum(done) == sum(map(len, WHOLE.values()))


@pytest.mark.parametrize("verify", [False, True])
def test_the_next_run_goes_on(source: Path, tmp_path: Path, verify: bool) -> None:
    begun(source, tmp_path, verify=verify)
    calls = list[str]()
    assert run(tmp_path, files(source, calls), verify=verify) == WHOLE
    assert sorted(calls) == ["more", "sum"]
    assert [*tmp_path.glob(".*")] == []


def test_what_was_not_verified_is_made_again_where_it_is_to_be(source: Path, tmp_path: Path) -> None:
    begun(source, tmp_path)
    calls = list[str]()
    assert run(tmp_path, files(source, calls), verify=True) == WHOLE
    assert "values" in calls


def records(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes every record."""
    for path in folder.glob("written.*"):
        told = [json.loads(line) for line in path.read_text().splitlines() if line]
        for one in told:
            change(one)
        path.write_text("".join(f"{json.dumps(one)}\n" for one in told))


def damaged(folder: Path) -> None:
    """Other bytes on the disk than the records say."""
    with open(folder / "new" / "first.bin", "r+b") as file:
        file.seek(LEAST + 100)
        file.write(b"!")


SPOILT: dict[str, Callable[[Path], object]] = {
    "of another plan": lambda folder: records(folder, lambda one: one.update(plan="another")),
    "of another file": lambda folder: records(folder, lambda one: one.update(file="deep/second.bin")),
    "of no unit": lambda folder: records(folder, lambda one: one.update(item=99)),
    "without a unit": lambda folder: records(folder, lambda one: one.pop("item")),
    "half a line": lambda folder: [p.write_text(p.read_text()[:-9].rpartition("{")[2]) for p in folder.glob("w*.*")],
    "no file": lambda folder: (folder / "new" / "first.bin").unlink(),
    "a shorter file": lambda folder: os.truncate(folder / "new" / "first.bin", LEAST),
    "other bytes": damaged,
}


@pytest.mark.parametrize("spoil", SPOILT.values(), ids=SPOILT)
def test_a_record_that_says_nothing_of_the_disk_is_not_believed(
    source: Path, tmp_path: Path, spoil: Callable[[Path], object]
) -> None:
    folder = begun(source, tmp_path, verify=True)
    spoil(folder)
    calls = list[str]()
    assert run(tmp_path, files(source, calls), verify=True) == WHOLE
    assert "values" in calls


def test_a_disk_that_holds_something_else_is_an_error(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync

    def failing(descriptor: int) -> None:
        with suppress(OSError):  # of a folder
            os.pwrite(descriptor, b"!", LEAST + 100)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(CkptError) as raised:
        run(tmp_path, files(source), verify=True)
    assert raised.value.message == "what was written is not what the disk holds"
    assert [problem.key.partition(",")[0] for problem in raised.value.problems] == ["first.bin"]


def test_two_jobs_do_not_make_the_same_files_at_once(source: Path, tmp_path: Path) -> None:
    folder = begun(source, tmp_path)
    descriptor = os.open(folder, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        with pytest.raises(CkptError, match="is being written by another job"):
            run(tmp_path, files(source))
        assert run(tmp_path, files(source), plan="another") == WHOLE
        assert [*tmp_path.glob(".out.*")] == [folder]  # which is in use
        assert run(tmp_path, files(source), plan=None) == WHOLE
    finally:
        os.close(descriptor)
    run(tmp_path, files(source), plan="another")
    assert [*tmp_path.glob(".out.*")] == []  # it was left


def test_a_link_is_copied(source: Path, tmp_path: Path) -> None:
    assert run(tmp_path, {**files(source), "taken.bin": Link(str(source))}) == {**WHOLE, "taken.bin": SOURCE}


def test_only_what_was_left_of_the_same_output_goes() -> None:
    names = ["out", "out.pt", "out.pt2", "out.safetensors.index.json", "a[1]", "x" * 200, "重" * 80]
    plan = "0123456789abcdef" * 4
    for name in names:
        for found in (staging_name(name, plan), staging_name(name, plan, "-0a1b2c3d")):
            assert [other for other in names if is_staging(found, other)] == [name]
            assert len(found.encode()) < 255
    assert not is_staging(".out.notes.ckpttool.job", "out")


def test_no_unit_is_much_larger_than_others(source: Path) -> None:
    found = by_ranks.items_of(files(source))
    assert [(unit.name, unit.late) for unit in found if unit.late] == [("first.bin", True)]
    for name, whole in WHOLE.items():
        own = [unit for unit in found if unit.name == name]
        assert [unit.first for unit in own] == [sum(unit.nbytes for unit in own[:at]) for at in range(len(own))]
        assert sum(unit.nbytes for unit in own) == len(whole)
    assert [unit.nbytes // LEAST for unit in found if unit.nbytes > LEAST] == [3]  # which is computed in one go


def test_without_locks_the_job_goes_on_and_what_others_left_stays(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody can tell whether they still write it."""
    folder = begun(source, tmp_path)

    def refused(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refused)
    assert run(tmp_path, files(source), plan="another") == WHOLE
    assert [*tmp_path.glob(".out.*")] == [folder]
    calls = list[str]()
    assert run(tmp_path, files(source, calls)) == WHOLE
    assert "values" not in calls


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="only root can make files of others")
def test_what_another_user_left_stays(source: Path, tmp_path: Path) -> None:
    folder = begun(source, tmp_path)
    os.chown(folder, 12_345, -1)
    run(tmp_path, files(source), plan="another")
    assert [*tmp_path.glob(".out.*")] == [folder]


@pytest.mark.parametrize("fsync", [True, False])
def test_what_is_written_is_flushed_where_it_is_to_be(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fsync: bool
) -> None:
    flushed, plain = list[str](), os.fsync

    def noted(descriptor: int) -> None:
        flushed.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        plain(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    assert run(tmp_path, files(source), fsync=fsync) == WHOLE
    assert ({"first.bin", "second.bin"} <= {*flushed}) is fsync


def test_a_file_of_which_no_rank_wrote_a_part_is_not_whole(source: Path) -> None:
    items = by_ranks.items_of(files(source))
    with pytest.raises(CkptError, match=f"{len(items) - 2} parts were written by no rank"):
        write_all(Job(0, 1, HashStore()), items, lambda number: {"item": 0, "crcs": []}, {}, verify=False)
