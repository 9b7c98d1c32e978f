"""The checksums of archives that follow each other in a file, or are inside of another one."""

from __future__ import annotations

import cProfile
import zlib
from collections.abc import Callable, Iterable, Iterator

import pytest

from ckpttool import CkptError, Problem
from ckpttool.core.checkpoint import Span
from ckpttool.io import checksums
from ckpttool.io.checksums import note_archive, note_bytes

RECORD = b"a record of an archive"


def note(path: str, count: int, damaged: Iterable[int] = (), size: int = 100) -> bytes:
    """Note archives of one record each, one after the other; return the file's bytes."""
    data = bytearray(size * count)
    for number in range(count):
        start = size * number
        data[start + 10 : start + 10 + len(RECORD)] = RECORD
        crc = zlib.crc32(RECORD) ^ (number in damaged)
        records = [(start + 10, len(RECORD), crc)]
        note_archive(path, start, "version", records, lambda at: f"record at {at}")
    return bytes(data)


def read(path: str, data: bytes, step: int) -> None:
    for at in range(0, len(data), step):
        note_bytes(path, at, memoryview(data)[at : at + step])


def reader(data: bytes) -> Callable[[Span], list[memoryview]]:
    return lambda span: [memoryview(data)[span.offset : span.offset + span.length]]


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    for path in list(checksums._files):
        checksums.forget_others(path, None)


@pytest.mark.parametrize("step", [7, 64, 250, 10_000])
def test_each_damaged_archive_is_named(step: int) -> None:
    data = note("many", 40, damaged=(3, 17))
    with pytest.raises(CkptError) as error, checksums.comparing(reader(data)):
        read("many", data, step)
    assert [problem.key for problem in error.value.problems] == ["record at 310", "record at 1710"]


@pytest.mark.parametrize("is_damaged", [False, True])
def test_an_archive_inside_of_another_one_is_compared_too(is_damaged: bool) -> None:
    """As in a program: both have their own CRCs of the same bytes."""
    data = note("elsewhere", 3)
    outer = zlib.crc32(data[100:300]) ^ is_damaged
    inner = zlib.crc32(RECORD)
    note_archive("nested", 0, "version", [(100, 200, outer)], lambda at: f"outer at {at}")
    note_archive("nested", 100, "version", [(110, len(RECORD), inner)], lambda at: f"inner at {at}")
    problems: list[Problem] = []
    try:
        with checksums.comparing(reader(data)):
            read("nested", data, 50)
    except CkptError as error:
        problems += error.problems
    assert [problem.key for problem in problems] == ["outer at 100"] * is_damaged


def test_work_grows_linearly_with_archives() -> None:
    def calls(count: int) -> int:
        profile = cProfile.Profile()
        with profile:
            data = note(f"file of {count}", count)
            with checksums.comparing(reader(data)):
                read(f"file of {count}", data, 100)
        return sum(row.callcount for row in profile.getstats())

    assert calls(2400) < 12 * calls(300)
