"""Compare the CRC-32 of each record of an archive that a copy reads."""

from __future__ import annotations

import os
import zlib
from array import array
from bisect import bisect_right, insort
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import field
from functools import cache
from typing import cast

from ckpttool.core.checkpoint import Span
from ckpttool.core.errors import CkptError, Problem
from ckpttool.core.values import dataclass

_MOST = 10_000_000  # records that are noted, with 20 bytes each

_comparing: ContextVar[bool] = ContextVar("comparing", default=False)


@cache
def fastest_crc32() -> Callable[..., int]:
    """Return ISA-L's `zlib.crc32`, several times as fast as zlib's; zlib's on processors that it
    has no wheels for.
    """
    try:
        from isal import isal_zlib
    except ImportError:
        return zlib.crc32
    return cast("Callable[..., int]", isal_zlib.crc32)


@dataclass(slots=True, eq=False)
class _ArchiveSums:
    """The records of an archive in the file `path`, in order: the bytes at which they start and
    end, and their CRCs.

    `name_at` returns the name of the record that begins at a byte. `running`: by record, how far it
    was read from its start on, and the CRC of that. `parts` are records of which other parts were
    read, `intact` and `damaged` were read completely.
    """

    path: str
    name_at: Callable[[int], str]
    starts: array[int]
    ends: array[int]
    crcs: array[int]
    running: dict[int, tuple[int, int]] = field(default_factory=dict)
    parts: set[int] = field(default_factory=set)
    intact: set[int] = field(default_factory=set)
    damaged: set[int] = field(default_factory=set)

    def within(self, start: int, end: int) -> Iterator[int]:
        """Yield the records that have some of these bytes of the file."""
        for number in range(max(0, bisect_right(self.starts, start) - 1), len(self.starts)):
            if self.starts[number] >= end:
                return
            if self.ends[number] > start:
                yield number

    def compare(self, number: int, at: int, data: memoryview) -> None:
        """Compare the bytes of the record that begin at byte `at` of the file."""
        reached, crc = self.running.get(number, (self.starts[number], 0))
        if at == self.starts[number]:
            reached, crc = at, 0
        if at != reached:
            self.parts.add(number)
            return
        self.judge(number, at + len(data), fastest_crc32()(data, crc))

    def judge(self, number: int, reached: int, crc: int) -> None:
        """Note the CRC of the record up to the byte `reached`."""
        self.running[number] = reached, crc
        if reached == self.ends[number]:
            del self.running[number]
            (self.intact if crc == self.crcs[number] else self.damaged).add(number)

    def unread(self) -> list[int]:
        """Return the records of which only parts were read."""
        return sorted((self.parts | self.running.keys()) - self.intact - self.damaged)


@dataclass(slots=True, eq=False)
class _FileSums:
    """The archives in one version of a file, by their first bytes, which `bases` has in order.

    They follow each other, or are inside of the archive that begins at byte 0.
    """

    version: object
    archives: dict[int, _ArchiveSums] = field(default_factory=dict)
    bases: list[int] = field(default_factory=list)

    def near(self, start: int, end: int) -> Iterator[_ArchiveSums]:
        """Yield the archives that may have some of these bytes of the file."""
        number = max(0, bisect_right(self.bases, start) - 1)
        if number and 0 in self.archives:
            yield self.archives[0]
        while number < len(self.bases) and self.bases[number] < end:
            yield self.archives[self.bases[number]]
            number += 1


_files: dict[str, _FileSums] = {}
_records = 0  # of all archives


def note_archive(
    path: str,
    base: int,
    version: object,
    records: Iterable[tuple[int, int, int]],
    name_at: Callable[[int], str],
) -> None:
    """Note first byte, length and CRC of the records of the archive at byte `base` of the file.

    A local file has a `version` (`version_of`); records of other versions are forgotten.
    """
    global _records
    if version is not None or not base:
        forget_others(path, version)
    file = _files.setdefault(path, _FileSums(version))
    before = file.archives.get(base)
    if before is not None and version is not None:
        return
    starts, ends, crcs = array("Q"), array("Q"), array("I")
    for start, length, crc in sorted(records):
        if length:
            starts.append(start)
            ends.append(start + length)
            crcs.append(crc)
    if before is None:
        insort(file.bases, base)
    else:
        _records -= len(before.starts)
    file.archives[base] = _ArchiveSums(path, name_at, starts, ends, crcs)
    _records += len(starts)
    while _records > _MOST and len(_files) > 1:
        _forget(next(other for other in _files if other != path))


def version_of(stat: os.stat_result) -> object:
    """Return what tells one content of a local file from another."""
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def forget_others(path: str, version: object) -> None:
    """Forget the archives of the path in other versions of it: another file may have taken its
    place.
    """
    file = _files.get(path)
    if file is not None and (version is None or file.version != version):
        _forget(path)


def _forget(path: str) -> None:
    global _records
    _records -= sum(len(archive.starts) for archive in _files.pop(path).archives.values())


def note_bytes(path: str, at: int, data: memoryview) -> None:
    """Compare what was read from byte `at` of the file on, if a copy reads it."""
    file = _files.get(path)
    if file is None or not _comparing.get():
        return
    for archive in file.near(at, at + len(data)):
        for number in archive.within(at, at + len(data)):
            if number not in archive.intact:
                start = max(at, archive.starts[number])
                end = min(at + len(data), archive.ends[number])
                archive.compare(number, start, data[start - at : end - at])


@contextmanager
def comparing(read: Callable[[Span], Iterable[memoryview]]) -> Iterator[None]:
    """Compare each record that is read inside; at the end, `read` the others of which parts were.

    Raise `CkptError` at the end, with every record that is damaged.
    """
    if _comparing.get():
        yield
        return
    unread: list[tuple[_ArchiveSums, int]] = []
    damaged: list[tuple[_ArchiveSums, int]] = []
    token = _comparing.set(True)
    try:
        yield
    finally:
        _comparing.reset(token)
        for file in _files.values():
            for archive in file.archives.values():
                unread += [(archive, number) for number in archive.unread()]
                damaged += [(archive, number) for number in sorted(archive.damaged)]
                archive.running.clear()
                archive.parts.clear()
                archive.damaged.clear()
    for archive, number in unread:
        start, end, crc = archive.starts[number], archive.ends[number], 0
        for data in read(Span(archive.path, start, end - start)):
            crc = fastest_crc32()(data, crc)
        archive.judge(number, end, crc)
        if number in archive.damaged:
            damaged.append((archive, number))
        archive.damaged.clear()
    if not damaged:
        return
    paths = dict.fromkeys(archive.path for archive, _ in damaged)
    problems = []
    for archive, number in damaged:
        text = "damaged: its CRC-32 does not match"
        if len(paths) > 1:
            text += f" ({archive.path})"
        problems.append(Problem(text, archive.name_at(archive.starts[number]), "damaged"))
    raise CkptError(
        f"{', '.join(paths)}: damaged, because the CRC-32 of what was read differs from the CRC-32"
        " in the file",
        hint="download or save it again (`unzip -t` checks it); torch.load does not compare CRCs",
        problems=problems,
    )
