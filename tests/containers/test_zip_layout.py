"""Rewritten zip archives: zipfile and unzip read them, and their layout matches torch's writer."""

from __future__ import annotations

import shutil
import struct
import subprocess
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpttool.containers.zip_read import DEFLATED, U32, Archive, Record, read_archive, read_record
from ckpttool.containers.zip_write import NewRecord, edit_behind, layout_archive, layout_behind
from ckpttool.core.checkpoint import Lazy, Span
from ckpttool.io.pieces import BLOCK, LEAST, Pieces
from files import content, write_pieces


def save(tmp_path: Path, count: int = 6) -> Archive:
    path = tmp_path / "source.pt"
    # the first is empty
    torch.save({f"w{i}": torch.full((i,), float(i)) for i in range(count)}, path)
    return read_archive(str(path))


def check(pieces: Pieces, path: Path) -> Archive:
    """Write the pieces, and check them with zipfile and unzip, and the sizes of the pieces."""
    write_pieces(pieces, path)
    assert path.stat().st_size == sum(piece.nbytes for piece in pieces)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    if shutil.which("unzip"):
        assert subprocess.run(["unzip", "-tqq", path], check=False).returncode == 0
    return read_archive(str(path))


def contents(archive: Archive) -> dict[str, bytes]:
    return {record.name: read_record(archive, record, 1 << 20) for record in archive.records}


def test_an_unchanged_archive_is_one_copy(tmp_path: Path) -> None:
    archive = save(tmp_path)
    assert [p.data for p in layout_archive(archive, archive.records)] == [
        Span(archive.path, 0, archive.length)
    ]


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 1000, 5000])
@pytest.mark.parametrize("at", [0, 4, -1])
def test_a_record_is_replaced(tmp_path: Path, length: int, at: int) -> None:
    archive = save(tmp_path)
    name = archive.records[at].name
    entries: list[Record | NewRecord] = list(archive.records)
    entries[at] = NewRecord(name, b"\x5a" * length)
    pieces = layout_archive(archive, entries)
    changed = check(pieces, tmp_path / "out.pt")
    assert contents(changed) == {**contents(archive), name: b"\x5a" * length}
    assert all(record.data % 64 == 0 for record in changed.records)
    assert len(pieces) <= 6


def test_new_records_are_aligned_as_in_torch(tmp_path: Path) -> None:
    archive = save(tmp_path)
    pieces = layout_archive(
        None, [NewRecord(name, data) for name, data in contents(archive).items()]
    )
    write_pieces(pieces, tmp_path / "out.pt")
    assert (tmp_path / "out.pt").read_bytes() == Path(archive.path).read_bytes()


@pytest.mark.parametrize("more", [33, 97, 5000])
def test_moved_records_are_aligned_as_in_torch(tmp_path: Path, more: int) -> None:
    """Rewriting all records restores the file, and so does moving all records and moving them
    back.
    """
    archive = save(tmp_path)
    first = archive.records[0]
    longer = check(
        layout_archive(
            archive, [NewRecord(first.name, bytes(first.nbytes + more)), *archive.records[1:]]
        ),
        tmp_path / "longer.pt",
    )
    again = layout_archive(None, [NewRecord(name, data) for name, data in contents(longer).items()])
    write_pieces(again, tmp_path / "again.pt")
    assert (tmp_path / "again.pt").read_bytes() == Path(longer.path).read_bytes()
    original = NewRecord(first.name, read_record(archive, first, 1 << 20))
    write_pieces(layout_archive(longer, [original, *longer.records[1:]]), tmp_path / "back.pt")
    assert (tmp_path / "back.pt").read_bytes() == Path(archive.path).read_bytes()


def test_a_rename_of_many_tensors_is_a_few_copies(tmp_path: Path) -> None:
    archive = save(tmp_path, 300)
    first = archive.records[0]
    pieces = layout_archive(
        archive, [NewRecord(first.name, bytes(first.nbytes + 33)), *archive.records[1:]]
    )
    assert len(pieces) <= 5


def test_records_are_dropped_and_reordered(tmp_path: Path) -> None:
    archive = save(tmp_path)
    kept = [archive.records[i] for i in (5, 0, 4, 8)]
    changed = check(layout_archive(archive, kept), tmp_path / "out.pt")
    assert list(contents(changed)) == [record.name for record in kept]
    assert contents(changed).items() <= contents(archive).items()
    assert all(record.data % 64 == 0 for record in changed.records)


def test_records_of_equal_size_are_reversed(tmp_path: Path) -> None:
    """The records have equal sizes, so all are copied unchanged."""
    path = tmp_path / "source.pt"
    torch.save({f"w{i}": torch.full((16,), float(i)) for i in range(4)}, path)
    archive = read_archive(str(path))
    entries = sorted(
        archive.records,
        key=lambda record: record.name if "/data/" in record.name else "",
        reverse=True,
    )
    changed = check(layout_archive(archive, entries), tmp_path / "out.pt")
    assert list(contents(changed).items()) == [
        (record.name, contents(archive)[record.name]) for record in entries
    ]


@pytest.mark.parametrize("alignment", [64, 8192])
def test_large_records_keep_their_alignment(tmp_path: Path, alignment: int) -> None:
    new = [
        NewRecord("a/first", b"1"),
        NewRecord("a/x", b"x" * LEAST),
        NewRecord("a/y", b"y" * LEAST),
    ]
    archive = check(layout_archive(None, new, alignment), tmp_path / "source.pt")
    for first in (b"1" * 5000, b"1" * 9000):
        entries: list[Record | NewRecord] = [NewRecord("a/first", first), *archive.records[1:]]
        changed = check(layout_archive(archive, entries, alignment), tmp_path / "out.pt")
        assert {record.data % alignment for record in changed.records} == {0}
        assert [record.data % BLOCK for record in changed.records[1:]] == [
            r.data % BLOCK for r in archive.records[1:]
        ]


def test_another_alignment_is_used(tmp_path: Path) -> None:
    changed = check(
        layout_archive(None, [NewRecord("a/x", b"1"), NewRecord("a/y", b"2")], 4096),
        tmp_path / "out.pt",
    )
    assert [record.data for record in changed.records] == [4096, 8192]


def test_checksums_are_computed_while_writing(tmp_path: Path) -> None:
    source = tmp_path / "raw"
    source.write_bytes(b"0123456789")
    entries = [
        NewRecord("a/span", Span(str(source), 2, 5)),
        NewRecord("a/lazy", Lazy(4, lambda: [b"ab", memoryview(b"cd")])),
        NewRecord("a/empty", Span(str(source), 3, 0)),
        NewRecord("a/bytes", b"efg"),
        NewRecord("a/zero", b"\x9d\x0a\xd9\x6d"),  # with a checksum of 0
    ]
    assert zlib.crc32(b"\x9d\x0a\xd9\x6d") == 0
    changed = check(layout_archive(None, entries), tmp_path / "out.zip")
    expected = {
        "a/span": b"23456",
        "a/lazy": b"abcd",
        "a/empty": b"",
        "a/bytes": b"efg",
        "a/zero": b"\x9d\x0a\xd9\x6d",
    }
    assert contents(changed) == expected


def test_a_replaced_record_is_appended_to_the_archive(tmp_path: Path) -> None:
    archive = save(tmp_path)
    name, old = archive.records[0].name, contents(archive)
    edited = edit_behind(archive, [NewRecord(name, b"other"), *archive.records[1:]])
    assert edited is not None
    assert contents(check(edited.pieces, tmp_path / "out.pt")) == {**old, name: b"other"}
    assert edited.before.endswith(b"\0" + old[name])
    assert edited.index == edited.before.removesuffix(old[name]) + b"other"


def test_a_compressed_record_without_a_checksum_is_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "plain.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as out:
        for name in ("a", "b"):
            out.writestr(name, name * 100)
    data = path.read_bytes().replace(struct.pack("<I", zlib.crc32(b"b" * 100)), bytes(4))
    path.write_bytes(data)
    archive = read_archive(str(path))
    write_pieces(
        layout_archive(archive, [NewRecord("a", b"new"), archive.by_name["b"]]),
        tmp_path / "out.zip",
    )
    kept = read_archive(str(tmp_path / "out.zip"))
    assert (kept.by_name["b"].method, contents(kept)["b"]) == (DEFLATED, b"b" * 100)


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_records_of_other_writers_are_kept(tmp_path: Path, compression: int) -> None:
    path = tmp_path / "plain.zip"
    with zipfile.ZipFile(path, "w", compression) as out:
        for name in ("a", "b", "c"):
            info = zipfile.ZipInfo(name, (2020, 2, 3, 4, 5, 6))
            info.comment, info.extra = (
                b"of " + name.encode(),
                struct.pack("<HH3s", 0x7777, 3, b"own"),
            )
            out.writestr(info, name.encode() * 100, compression)
        # its header has an extra field, but no padding
        with out.open("wide", "w", force_zip64=True) as wide:
            wide.write(b"d" * 100)
    archive = read_archive(str(path))
    pieces = layout_archive(archive, [NewRecord("a", b"new"), *archive.records[1:]])
    changed = check(pieces, tmp_path / "out.zip")
    assert contents(changed) == {"a": b"new", "b": b"b" * 100, "c": b"c" * 100, "wide": b"d" * 100}
    ((old, before), (new, after)) = (
        (a.by_name["wide"], Path(a.path).read_bytes()) for a in (archive, changed)
    )
    assert after[new.start : new.end] == before[old.start : old.end]
    kept = zipfile.ZipFile(tmp_path / "out.zip").getinfo("b")
    assert (kept.date_time, kept.comment, kept.extra[-7:]) == (
        (2020, 2, 3, 4, 5, 6),
        b"of b",
        b"ww\3\0own",
    )


def test_more_records_than_fit_in_16_bits(tmp_path: Path) -> None:
    path = tmp_path / "many.zip"
    names = [str(number) for number in range(66_000)]
    write_pieces(layout_archive(None, [NewRecord(name, b"") for name in names]), path)
    assert zipfile.ZipFile(path).namelist() == names
    assert [record.name for record in read_archive(str(path)).records] == names


def test_unused_bytes_are_omitted(tmp_path: Path) -> None:
    """An archive that was updated in place still contains records that it no longer lists."""
    path = tmp_path / "updated.zip"
    with zipfile.ZipFile(path, "w") as out:
        for name in ("a", "b"):
            out.writestr(name, name * 10)
            assert out.fp is not None
            out.fp.seek(out.start_dir)
            out.fp.write(b"S3CRET" * 20)
            out.start_dir = out.fp.tell()
    assert b"S3CRET" in path.read_bytes()
    archive = read_archive(str(path))
    changed = check(
        layout_archive(archive, [*archive.records, NewRecord("c", b"c")]), tmp_path / "out.zip"
    )
    assert contents(changed) == {"a": b"a" * 10, "b": b"b" * 10, "c": b"c"}
    assert b"S3CRET" not in (tmp_path / "out.zip").read_bytes()


def sparse(tmp_path: Path, name: str, nbytes: int) -> Path:
    """Write a file with torch that has a sparse storage of `nbytes`."""
    path = tmp_path / name
    with torch.serialization.skip_data():
        torch.save({"big": torch.empty(nbytes, dtype=torch.uint8), "after": torch.ones(3)}, path)
    return path


def equals_file(pieces: Pieces, path: Path) -> bool:
    """Return True if the pieces equal the file; the bytes of spans are holes, and are not read."""
    at = 0
    with open(path, "rb") as file:
        for piece in pieces:
            if isinstance(piece.data, bytes):
                file.seek(at)
                if file.read(len(piece.data)) != piece.data:
                    return False
            at += piece.nbytes
    return at == path.stat().st_size


def all_new(archive: Archive) -> list[NewRecord]:
    return [NewRecord(record.name, archive.span(record), record.crc) for record in archive.records]


@pytest.mark.parametrize("size", [U32 - 1, U32, U32 + 70, None])
def test_storages_of_four_gibibytes_match_torch(tmp_path: Path, size: int | None) -> None:
    """Headers, descriptors and directory of zip64 records match torch; one record starts at the
    limit.
    """
    if size is None:
        size = (
            U32
            - 16
            - read_archive(str(sparse(tmp_path, "big.pt", 1 << 31))).by_name["big/data/0"].data
        )
    path = sparse(tmp_path, "big.pt", size)
    archive = read_archive(str(path))
    assert archive.by_name["big/data/1"].start >= U32
    assert equals_file(layout_archive(None, all_new(archive)), path)


def test_a_zip64_descriptor_is_read_if_the_next_record_is_removed(tmp_path: Path) -> None:
    path = sparse(tmp_path, "big.pt", U32 + 70)
    archive = read_archive(str(path))
    pieces = layout_behind(
        archive, [record for record in archive.records if record.name != "big/data/1"]
    )
    with open(path, "ab") as out:
        out.writelines(chunk for piece in pieces[1:] for chunk in content(piece.data))
    changed = read_archive(str(path))
    assert not changed.is_tight
    assert changed.by_name["big/data/0"] == archive.by_name["big/data/0"]


@pytest.mark.parametrize("size", [U32 - 100_000, U32 - 1])
@pytest.mark.parametrize("more", [200_000, 3200 * 64])
def test_records_moved_across_four_gibibytes_match_torch(
    tmp_path: Path, size: int, more: int
) -> None:
    path = sparse(tmp_path, "big.pt", size)
    archive = read_archive(str(path))
    first = archive.records[0]
    longer: list[Record | NewRecord] = [
        NewRecord(first.name, bytes(first.nbytes + more)),
        *archive.records[1:],
    ]
    pieces = layout_archive(archive, longer)
    moved = tmp_path / "moved.pt"
    ends = 1 << 16  # of each span; the rest is the large storage, and stays a hole
    with open(moved, "wb") as out, open(path, "rb") as file:
        for piece in pieces:
            if isinstance(piece.data, bytes):
                out.write(piece.data)
                continue
            if isinstance(piece.data, Lazy):  # a checksum that is computed by now
                out.writelines(content(piece.data))
                continue
            file.seek(piece.data.offset)
            out.write(file.read(min(ends, piece.nbytes)))
            if piece.nbytes > ends:
                out.seek(piece.nbytes - 2 * ends, 1)
                file.seek(piece.data.offset + piece.nbytes - ends)
                out.write(file.read(ends))
    changed = read_archive(str(moved))
    assert zipfile.ZipFile(moved).namelist() == [record.name for record in archive.records]
    after = changed.by_name["big/data/1"]
    assert after.start >= U32
    assert after.data % 64 == 0
    assert equals_file(layout_archive(None, all_new(changed)), moved)
    reader: Any = torch._C.PyTorchFileReader(str(moved))
    assert reader.get_record_offset("data/1") == after.data
    assert read_record(changed, changed.by_name["big/version"], 100) == b"3\n"
    original = NewRecord("big/data.pkl", read_record(archive, archive.records[0], 1000))
    assert equals_file(layout_archive(changed, [original, *changed.records[1:]]), path)
