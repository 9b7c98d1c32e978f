"""Zip archives, with zipfile and torch's writer as oracles; malicious archives are built byte by
byte.
"""

from __future__ import annotations

import io
import os
import struct
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import fsspec
import pytest
import torch

from ckpttool import CkptError
from ckpttool.containers.zip_read import (
    U32,
    Archive,
    data_of,
    is_storage,
    read_archive,
    read_record,
)
from ckpttool.io.files import run_deferred_checks


@dataclass
class Entry:
    """One record of a hand-made archive; `says` are wrong fields of the central directory."""

    name: bytes
    data: bytes = b"data"
    flags: int = 0
    method: int = 0
    offset: int | None = None
    size: int | None = None
    nbytes: int | None = None
    local_name: bytes | None = None
    disk: int = 0
    behind: bytes = b""
    local_length: int | None = None
    extra: bytes = b""
    crc: int | None = None
    attributes: int = 0


def archive_bytes(
    *entries: Entry,
    count: int | None = None,
    size: int | None = None,
    disks: tuple[int, int] = (0, 0),
    more: int = 0,
) -> bytes:
    """Return the archive; its end record may have wrong counts and a wrong position of the
    directory.
    """
    body, directory = b"", b""
    for entry in entries:
        crc = zlib.crc32(entry.data) if entry.crc is None else entry.crc
        start = len(body) if entry.offset is None else entry.offset
        local = entry.local_name or entry.name
        sizes = (len(entry.data), len(entry.data))
        body += struct.pack(
            "<4s5H3I2H",
            b"PK\3\4",
            20,
            entry.flags,
            0,
            0,
            0,
            crc,
            *sizes,
            entry.local_length or len(local),
            0,
        )
        body += local + entry.data + entry.behind
        nbytes = len(entry.data) if entry.nbytes is None else entry.nbytes
        size_ = len(entry.data) if entry.size is None else entry.size
        lengths = (nbytes, size_, len(entry.name), len(entry.extra), 0)
        fields = (
            20,
            20,
            entry.flags,
            entry.method,
            0,
            0,
            crc,
            *lengths,
            entry.disk,
            0,
            entry.attributes,
        )
        directory += (
            struct.pack("<4s6H3I5H2I", b"PK\1\2", *fields, start) + entry.name + entry.extra
        )
    number = len(entries) if count is None else count
    length = len(directory) if size is None else size
    end = (b"PK\5\6", *disks, number, number + more, length, len(body), 0)
    return body + directory + struct.pack("<4s4H2IH", *end)


def read(tmp_path: Path, data: bytes) -> Archive:
    path = tmp_path / "archive.zip"
    path.write_bytes(data)
    return read_archive(str(path))


def read_in_a_store(tmp_path: Path, data: bytes) -> Archive:
    """In a store, headers of storages are read with their data, and checked before the data is
    used.
    """
    url = f"memory://{tmp_path.name}/archive.zip"
    fsspec.filesystem("memory").pipe(url, data)
    archive = read_archive(url)
    run_deferred_checks(url)
    return archive


def torch_archive() -> bytes:
    buffer = io.BytesIO()
    torch.save({"a": torch.arange(5), "b": torch.ones(3)}, buffer)
    return buffer.getvalue()


def test_offsets_in_a_torch_archive_match_zipfile(tmp_path: Path) -> None:
    data = torch_archive()
    archive = read(tmp_path, data)
    oracle = zipfile.ZipFile(io.BytesIO(data))
    assert [r.name for r in archive.records] == oracle.namelist()
    for record in archive.records:
        assert record.data % 64 == 0
        assert read_record(archive, record, 1 << 20) == oracle.read(record.name)
        assert data[record.data : record.data + record.nbytes] == oracle.read(record.name)
    ends = [record.end for record in archive.records]
    assert ends[:-1] == [record.start for record in archive.records[1:]]


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_archives_of_zipfile_are_read(tmp_path: Path, compression: int) -> None:
    path = tmp_path / "plain.zip"
    contents = {"a/ü.txt": b"x" * 1000, "empty": b"", "b": bytes(range(256))}
    with zipfile.ZipFile(path, "w", compression) as out:
        for name, content in contents.items():
            out.writestr(name, content)
        out.comment = b"with a comment PK\5\6 in it"
    archive = read_archive(str(path))
    assert {
        name: read_record(archive, record, 1000) for name, record in archive.by_name.items()
    } == contents


def test_descriptors_of_streamed_records_are_read(tmp_path: Path) -> None:
    class Unseekable(io.BytesIO):
        def seekable(self) -> bool:
            return False

        def seek(self, *_: int) -> int:
            raise OSError

        def tell(self) -> int:
            raise OSError

    buffer = Unseekable()
    with zipfile.ZipFile(buffer, "w") as out:
        out.writestr("a", b"first")
        out.writestr("b", b"second")
    archive = read(tmp_path, buffer.getvalue())
    assert archive.by_name["a"].end == archive.by_name["b"].start
    assert read_record(archive, archive.by_name["b"], 10) == b"second"


@pytest.mark.parametrize("junk", [0, 25, 100])
@pytest.mark.parametrize(
    ("flags", "behind"), [(8, b"PK\7\x08" + bytes(12)), (8, bytes(12)), (0, b"")]
)
def test_unused_bytes_are_not_part_of_the_record_before(
    tmp_path: Path, flags: int, behind: bytes, junk: int
) -> None:
    """An update in place leaves such bytes. A descriptor may have a signature or not."""
    data = archive_bytes(Entry(b"a", flags=flags, behind=behind + bytes(junk)), Entry(b"b"))
    archive = read(tmp_path, data)
    record = archive.by_name["a"]
    assert record.end - record.data - record.nbytes == len(behind)
    assert archive.is_tight == (not junk)
    assert archive.by_name["b"].start == record.end + junk


def test_an_empty_archive_is_read(tmp_path: Path) -> None:
    archive = read(tmp_path, archive_bytes())
    assert (archive.records, archive.length, archive.is_tight) == ((), 22, True)


def test_the_directory_may_have_another_order(tmp_path: Path) -> None:
    first, second = Entry(b"a", offset=35, local_name=b"b"), Entry(b"b", offset=0, local_name=b"a")
    archive = read(tmp_path, archive_bytes(first, second))
    assert [(record.name, record.start) for record in archive.records] == [("a", 35), ("b", 0)]
    assert not archive.is_tight


def test_an_archive_inside_a_file_is_read(tmp_path: Path) -> None:
    inner = torch_archive()
    path = tmp_path / "outer"
    path.write_bytes(b"before" + inner + b"after")
    archive = read_archive(str(path), base=6, length=len(inner))
    record = archive.by_name["archive/byteorder"]
    assert read_record(archive, record, 10) == b"little"
    span = archive.span(record)
    assert path.read_bytes()[span.offset : span.offset + span.length] == b"little"


OUTSIDE, ELSEWHERE = "points outside the file", "points to a place without such a record"
NO_END, DISKS = "no end of a zip archive found", "one part of several"
# The file, and a part of the error
WRONG = {
    "truncated": (torch_archive()[:-1], NO_END),
    "cut in half": (torch_archive()[:400], NO_END),
    "empty": (b"", NO_END),
    **{
        f"end record in {size} bytes, at {at}": (
            bytes(at) + b"PK\5\6" + bytes(size - at - 4),
            NO_END,
        )
        for size in range(4, 22)
        for at in range(size - 3)
    },
    "not a zip": (b"nothing of the kind" * 10, NO_END),
    "directory outside": (archive_bytes(Entry(b"a"), size=10_000), OUTSIDE),
    "directory longer by a byte": (archive_bytes(Entry(b"a"), size=48), OUTSIDE),
    "directory shorter by a byte": (
        archive_bytes(Entry(b"a"), size=46),
        "the zip directory is damaged",
    ),
    "more records than announced": (
        archive_bytes(Entry(b"a"), Entry(b"b"), count=1),
        "more than the 1 records",
    ),
    "fewer records than announced": (
        archive_bytes(Entry(b"a"), count=2),
        "too small for the 2 records",
    ),
    "fewer records, with long names": (
        archive_bytes(Entry(b"a" * 60), count=2),
        "the zip directory is cut off",
    ),
    "far fewer records than announced": (
        archive_bytes(Entry(b"a"), count=65_534),
        "too small for the 65534 records",
    ),
    "a duplicate name": (archive_bytes(Entry(b"a"), Entry(b"b"), Entry(b"a")), "of one name @ a"),
    "a duplicate name after another one": (
        archive_bytes(Entry(b"b"), Entry(b"a"), Entry(b"a")),
        "of one name @ a",
    ),
    "names that differ in case": (
        archive_bytes(Entry(b"a/B"), Entry(b"a/b")),
        "without regard to case, as for torch",
    ),
    "another end record in the comment": (
        torch_archive()[:-2] + b"\x16\0" + b"PK\5\6" + bytes(16) + b"\5\0",
        "is not at the end of the file",
    ),
    "bytes after the end": (torch_archive() + b"behind", "is not at the end of the file"),
    "marked as a folder": (archive_bytes(Entry(b"a", attributes=0x10)), "marked as a folder @ a"),
    **{
        f"encrypted, {flag}": (
            archive_bytes(Entry(b"a", flags=flag)),
            "the archive is encrypted @ a",
        )
        for flag in (1, 0x40, 0x2000)
    },
    "on another disk": (archive_bytes(Entry(b"a"), disks=(1, 0)), DISKS),
    "directory on another disk": (archive_bytes(Entry(b"a"), disks=(0, 1)), DISKS),
    "records on another disk": (archive_bytes(Entry(b"a"), more=1), DISKS),
    "more records here than in all": (archive_bytes(Entry(b"a"), more=-1), DISKS),
    "record on another disk": (archive_bytes(Entry(b"a", disk=3)), DISKS),
    "offset outside": (archive_bytes(Entry(b"a", offset=1 << 20)), OUTSIDE),
    "offset without a record": (archive_bytes(Entry(b"a", offset=2)), f"{ELSEWHERE} @ a"),
    "overlapping": (
        archive_bytes(Entry(b"a", nbytes=40, size=40), Entry(b"b")),
        "overlaps what follows it @ a",
    ),
    "overlapping by a byte": (
        archive_bytes(Entry(b"a", nbytes=5, size=5), Entry(b"b")),
        "what follows it @ a",
    ),
    "two records at one offset": (
        archive_bytes(Entry(b"a"), Entry(b"b", offset=0, local_name=b"a")),
        f"{ELSEWHERE} @ b",
    ),
    "longer than the file": (
        archive_bytes(Entry(b"a", nbytes=1 << 30, size=1 << 30)),
        "what follows it @ a",
    ),
    "other name in the header": (archive_bytes(Entry(b"a", local_name=b"b")), f"{ELSEWHERE} @ a"),
    "longer name in the header": (archive_bytes(Entry(b"a", local_name=b"ab")), f"{ELSEWHERE} @ a"),
    **{
        f"name of {length} bytes in the header": (
            archive_bytes(Entry(b"ab", local_length=length)),
            f"{ELSEWHERE} @ ab",
        )
        for length in (1, 3)
    },
    "a storage of two sizes": (
        archive_bytes(Entry(b"a/data/0", flags=8, size=5)),
        "two different sizes @ a/data/0",
    ),
    "stored with two sizes": (archive_bytes(Entry(b"a", size=5)), "two different sizes @ a"),
    "name not UTF-8": (archive_bytes(Entry(b"\xff\xfe", flags=0x800)), "name is not UTF-8"),
    "zip64 sizes missing": (
        archive_bytes(Entry(b"a", size=U32, nbytes=U32)),
        "zip64 sizes are missing",
    ),
    "one zip64 size of two": (
        archive_bytes(Entry(b"a", size=U32, nbytes=U32, extra=struct.pack("<HHQ", 1, 8, 4))),
        "zip64 sizes are missing",
    ),
    "zip64 sizes in another field": (
        archive_bytes(Entry(b"a", size=U32, nbytes=U32, extra=struct.pack("<HHQQ", 2, 16, 4, 4))),
        "zip64 sizes are missing",
    ),
}


@pytest.mark.parametrize("reader", [read, read_in_a_store])
@pytest.mark.parametrize("name", WRONG)
def test_wrong_archives_are_refused(
    tmp_path: Path, name: str, reader: Callable[[Path, bytes], Archive]
) -> None:
    data, words = WRONG[name]
    with pytest.raises(CkptError) as caught:
        reader(tmp_path, data)
    assert words in " ".join([caught.value.message, *map(str, caught.value.problems)])
    assert len(caught.value.problems) <= (2 if "case" in name else 1)


@pytest.mark.parametrize("limit", [1, 100, 1 << 40])
@pytest.mark.parametrize("comment", [b"", b"with a comment"])
def test_zip64_archives_of_zipfile_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int, comment: bytes
) -> None:
    """Patch the zip64 limit of zipfile, so that sizes, offsets, both or neither have 64 bits."""
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", limit)
    contents = {f"dir/{n}": b"%d" % (n % 10) * n for n in (0, 1, 2, 99, 101, 300, 3)}
    with zipfile.ZipFile(tmp_path / "wide.zip", "w", zipfile.ZIP_DEFLATED) as out:
        for name, data in contents.items():
            out.writestr(
                name,
                data,
                zipfile.ZIP_STORED if len(data) % 2 or len(data) < 10 else zipfile.ZIP_DEFLATED,
            )
        out.comment = comment
    archive = read_archive(str(tmp_path / "wide.zip"))
    assert {
        record.name: read_record(archive, record, 1000) for record in archive.records
    } == contents
    for record, info in zip(archive.records, zipfile.ZipFile(tmp_path / "wide.zip").infolist()):
        known = (info.filename, info.header_offset, info.compress_size, info.file_size, info.CRC)
        assert known == (record.name, record.start, record.nbytes, record.size, record.crc)
    data = (tmp_path / "wide.zip").read_bytes()
    at = data.rfind(b"PK\6\6")
    if at >= 0:
        (tmp_path / "wide.zip").write_bytes(data[:at] + b"XX" + data[at + 2 :])
        with pytest.raises(CkptError, match="not where its locator says"):
            read_archive(str(tmp_path / "wide.zip"))


def test_zip64_sizes_after_another_field_are_read(tmp_path: Path) -> None:
    extra = struct.pack("<HHQHHQQ", 2, 8, 7, 1, 16, 4, 4)
    archive = read(tmp_path, archive_bytes(Entry(b"a", size=U32, nbytes=U32, extra=extra)))
    assert read_record(archive, archive.by_name["a"], 100) == b"data"


def test_short_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel returns at most two gibibytes; an empty read means that the file became
    shorter.
    """
    data = torch_archive()
    archive = read(tmp_path, data)
    with zipfile.ZipFile(io.BytesIO(data)) as oracle, monkeypatch.context() as patched:
        pread = os.pread
        patched.setattr(os, "pread", lambda file, count, offset: pread(file, min(count, 3), offset))
        for record in archive.records:
            assert read_record(archive, record, 1 << 20) == oracle.read(record.name)
    os.truncate(archive.path, archive.records[0].data + 3)
    with pytest.raises(CkptError, match="became shorter while it was read"):
        read_record(archive, archive.records[0], 1 << 20)


def test_an_unknown_compression_method_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_BZIP2) as out:
        out.writestr("a", b"x" * 100)
    archive = read_archive(str(tmp_path / "a.zip"))
    with pytest.raises(CkptError, match="compressed by method 12"):
        read_record(archive, archive.by_name["a"], 1000)


def test_a_record_larger_than_expected_is_refused(tmp_path: Path) -> None:
    archive = read(tmp_path, archive_bytes(Entry(b"a", b"12345")))
    with pytest.raises(CkptError, match="at most 4"):
        read_record(archive, archive.by_name["a"], 4)


def test_a_zip_bomb_stops_at_its_declared_size(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as out:
        out.writestr("a", bytes(1 << 24))
    data = bytearray(buffer.getvalue())
    entry = data.rindex(b"PK\1\2")
    struct.pack_into("<I", data, entry + 24, 100)
    archive = read(tmp_path, bytes(data))
    with pytest.raises(CkptError, match="101 bytes"):
        read_record(archive, archive.by_name["a"], 1 << 20)


@pytest.mark.parametrize(
    ("data", "size", "words"),
    [
        (zlib.compress(b"data")[2:], 5, "has 4 bytes, its directory says 5"),
        (zlib.compress(b"data")[2:], 3, "has 4 bytes, its directory says 3"),
        (b"\xff\xff", 4, "record a is damaged: Error"),
    ],
)
def test_a_compressed_record_must_match_its_directory(
    tmp_path: Path, data: bytes, size: int, words: str
) -> None:
    entry = Entry(b"a", data, method=8, nbytes=len(data), size=size, crc=zlib.crc32(b"data"))
    archive = read(tmp_path, archive_bytes(entry))
    with pytest.raises(CkptError, match=words):
        read_record(archive, archive.by_name["a"], 100)


def test_a_damaged_record_is_found(tmp_path: Path) -> None:
    data = bytearray(archive_bytes(Entry(b"a", b"12345")))
    data[31] ^= 1
    archive = read(tmp_path, bytes(data))
    with pytest.raises(CkptError, match="CRC-32"):
        read_record(archive, archive.by_name["a"], 10)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CkptError):
        read_archive(str(tmp_path / "none"))


@pytest.mark.parametrize(
    "sizes", [[1, 0, 33, 64, 5000], [U32 - 1, 7], [U32, 7], [1 << 31, 1 << 31, U32 + 70, 7]]
)
def test_computed_offsets_match_torch(tmp_path: Path, sizes: list[int]) -> None:
    """Also beyond four gibibytes: large storages are sparse."""
    with torch.serialization.skip_data():
        torch.save(
            {str(n): torch.empty(size, dtype=torch.uint8) for n, size in enumerate(sizes)},
            tmp_path / "a.pt",
        )
    archive = read_archive(str(tmp_path / "a.pt"))
    storages = [
        record for record in archive.records if is_storage(record.name.encode()) and record.nbytes
    ]
    assert len(storages) == sum(size > 0 for size in sizes)
    for record in storages:
        place = (record.name.encode(), record.start, record.nbytes)
        assert data_of(*place, record.end) == record.data
        assert data_of(*place, record.end + 1) is None
        assert data_of(*place, record.end - 1) is None


def test_an_offset_of_four_gibibytes_is_computed(tmp_path: Path) -> None:
    """From this offset on, the header stores it in 64 bits."""
    sizes = [1 << 31, 7]
    for _ in range(2):
        with torch.serialization.skip_data():
            torch.save([torch.empty(size, dtype=torch.uint8) for size in sizes], tmp_path / "a.pt")
        first, record = (
            r for r in read_archive(str(tmp_path / "a.pt")).records if is_storage(r.name.encode())
        )
        sizes = [U32 - 16 - first.data, 7]
    assert record.start == U32
    assert data_of(record.name.encode(), record.start, record.nbytes, record.end) == record.data


@pytest.mark.parametrize("length", range(1, 66))
def test_offsets_are_computed_for_names_of_any_length(tmp_path: Path, length: int) -> None:
    """The name of each record includes the archive's name, so its length covers every alignment of
    the data.
    """
    path = tmp_path / f"{'n' * length}.pt"
    torch.save({"w": torch.ones(3)}, path)
    (record,) = (one for one in read_archive(str(path)).records if is_storage(one.name.encode()))
    assert data_of(record.name.encode(), record.start, record.nbytes, record.end) == record.data
