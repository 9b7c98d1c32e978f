"""Read the zip archives of torch.save, torch.jit.save and torch.export.save: the place of each
record.
"""

from __future__ import annotations

import os
import re
import struct
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

from ckpttool.core.checkpoint import Span
from ckpttool.core.errors import CkptError, same_problem
from ckpttool.core.values import dataclass, many_objects
from ckpttool.io.checksums import note_archive, version_of
from ckpttool.io.files import Source, defer_check, opened, run_deferred_checks
from ckpttool.io.paths import is_url

# of every record's data; torch.utils.serialization.config.save.storage_alignment changes it
ALIGNMENT = 64
U32 = 0xFFFFFFFF

_LOCAL, _FIELD = 30, 4  # bytes of a local header, and of the tag and length of an extra field
# Records that are read for their values only: of torch.save, TorchScript, and torch.export since
# 2.9.
_STORAGE = re.compile(
    rb"[^/]+/(?:data|constants|tensors)/\d+|(?:[^/]+/)?data/(?:weights|constants)/\w+_\d+"
)


def is_storage(raw_name: bytes) -> bool:
    return _STORAGE.fullmatch(raw_name) is not None


def is_wide(start: int, size: int) -> bool:
    """Return whether torch's writer (miniz) uses zip64 fields and the longer data descriptor."""
    return start >= U32 or size >= U32


def data_of(raw_name: bytes, start: int, size: int, end: int) -> int | None:
    """Return where torch puts the data of the stored record at `start`, `size` bytes long.

    None if the record would then not end at `end`.
    """
    data = start + _LOCAL + len(raw_name) + _FIELD  # its padding is an extra field
    if is_wide(start, size):
        data += _FIELD + 16 * (size >= U32) + 8 * (start >= U32)
    data += -data % ALIGNMENT
    return data if data + size + descriptor_size(start, size) == end else None


def descriptor_size(start: int, size: int) -> int:
    """Return the bytes of the data descriptor of the record at `start`."""
    return 24 if is_wide(start, size) else 16


STORED, DEFLATED = 0, 8

LOCAL = struct.Struct("<4s5H3I2H")
_LENGTHS = struct.Struct("<HH")  # of the name and the extra fields: the end of a local header
CENTRAL = struct.Struct("<4s6H3I5H2I")
END = struct.Struct("<4s4H2IH")
END64 = struct.Struct("<4sQ2H2I4Q")
LOCATOR = struct.Struct("<4sIQI")
LOCAL_SIGNATURE, CENTRAL_SIGNATURE, DESCRIPTOR_SIGNATURE = b"PK\3\4", b"PK\1\2", b"PK\7\x08"
END_SIGNATURE, END64_SIGNATURE, LOCATOR_SIGNATURE = b"PK\5\6", b"PK\6\6", b"PK\6\7"

U16 = 0xFFFF
_ENCRYPTED = 0x0001 | 0x0040 | 0x2000
_FOLDER = 0x10  # among the external attributes
HAS_DESCRIPTOR, UTF8 = 0x0008, 0x0800
_LONGEST_DESCRIPTOR = 24
# bytes of a record that is fetched with its header; of the fields behind a name
_SMALL, _MOST_PADDING = 1 << 20, 128
_AT_A_TIME = 4096  # local headers: of a remote file they are fetched side by side
ZIP64_FIELD = 1


class Record(NamedTuple):
    """One record of an archive; offsets and sizes are bytes, offsets from the archive's first byte.

    `start` is the offset of its local header, `data` of its data, `nbytes` the stored size, `size`
    the size after decompression, and `end` the end of its region: after the data descriptor, if it
    has one. `central` is its entry in the central directory. (A NamedTuple, because archives hold
    100,000 of them.)
    """

    name: str
    start: int
    data: int
    nbytes: int
    size: int
    crc: int
    method: int
    flags: int
    end: int
    central: bytes

    @property
    def has_crc(self) -> bool:
        """False for a record whose CRC was not computed (`torch.serialization.set_crc32_options`):
        it is 0 then.
        """
        return self.crc != 0 or not self.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class Archive:
    """The index of the archive that begins at byte `base` of the file `path` and is `length` bytes
    long.

    `records` are in the directory's order; `is_tight` if the file has them in this order with
    nothing between them: an archive that was changed in place holds unused records, and the new
    ones at its end.
    """

    path: str
    base: int
    length: int
    records: tuple[Record, ...]
    by_name: dict[str, Record]
    is_tight: bool = True

    def span(self, record: Record) -> Span:
        return Span(self.path, self.base + record.data, record.nbytes)


def read_archive(path: str, base: int = 0, length: int | None = None) -> Archive:
    """Return the index of the zip archive in bytes `base` to `base + length` (default: to the end)
    of the file.

    Raises `CkptError` if it is not a zip archive, is truncated, or its directory and records
    contradict each other.
    """
    version = _version_of(path)
    read = _read if version is not None else _read.__wrapped__
    archive = read(path, base, length, version)
    places = _checked_places(archive, base)
    note_archive(path, base, version, places, partial(_name_at, path, base, length))
    return archive


def _checked_places(archive: Archive, base: int) -> Iterator[tuple[int, int, int]]:
    """Yield where each stored record's data is in the file, its bytes, and its checksum."""
    for record in archive.records:
        if record.has_crc and record.method == STORED:
            yield base + record.data, record.nbytes, record.crc


def _version_of(path: str) -> object:
    """Return what changes if the file changes; None if it has no such thing."""
    if is_url(path):
        return None
    try:
        return version_of(os.stat(path))
    except (OSError, ValueError):  # opening it says what is wrong
        return None


def _name_at(path: str, base: int, length: int | None, start: int) -> str:
    """Return the name of the archive's record whose data begin at byte `start` of the file."""
    for record in read_archive(path, base, length).records:
        if base + record.data == start and record.nbytes:
            return record.name
    raise LookupError(start)


@lru_cache(maxsize=1)  # `detect` reads the directory just before the reader does
@many_objects()
def _read(path: str, base: int, length: int | None, version: object) -> Archive:
    if base:  # an archive inside of one: its place must be true
        run_deferred_checks(path)
    with opened(path) as file:
        available = file.size - base
        length = available if length is None else length
        if not 0 <= length <= available:
            raise _corrupt(path, "the archive is cut off")
        return _read_archive(_Window(path, file, base, length))


def read_record(archive: Archive, record: Record, limit: int) -> bytes:
    """Return the record's data, decompressed, its CRC-32 checked if it has one.

    Raises `CkptError` if it holds more than `limit` bytes, is compressed by a method other than
    deflate, or is damaged.
    """
    nbytes = max(record.size, record.nbytes)
    if nbytes > limit:
        raise _corrupt(
            archive.path,
            f"record {record.name} is {nbytes} bytes, at most {limit} are expected there",
        )
    data = _read_span(archive.span(record))
    if record.method == DEFLATED:
        try:  # one byte more than announced shows a size that is wrong
            data = zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, record.size + 1)
        except zlib.error as error:
            raise _corrupt(archive.path, f"record {record.name} is damaged: {error}") from error
    elif record.method != STORED:
        raise _corrupt(
            archive.path,
            f"record {record.name} is compressed by method {record.method}, not deflate",
        )
    if len(data) != record.size:
        raise _corrupt(
            archive.path,
            f"record {record.name} has {len(data)} bytes, its directory says {record.size}",
        )
    if record.has_crc and zlib.crc32(data) != record.crc:
        raise _corrupt(archive.path, f"record {record.name} is damaged: its CRC-32 does not match")
    return data


class _Window(NamedTuple):
    """The bytes of an open file that hold the archive."""

    path: str
    file: Source
    base: int
    length: int

    def read(self, offset: int, count: int) -> bytes:
        if offset + count > self.length:
            raise _corrupt(self.path, "the zip directory points outside the file")
        return _read_at(self.path, self.file, count, self.base + offset)


def _read_archive(window: _Window) -> Archive:
    count, size, offset = _find_end(window)
    entries = _parse_directory(window.path, window.read(offset, size), count)
    assumed = _by_layout(window, entries, offset)
    without_header: list[_DirectoryEntry] = []  # their local headers are not read now
    with_header: list[_DirectoryEntry] = []
    for entry in entries:
        (without_header if entry.start in assumed else with_header).append(entry)
    located = assumed | _located(window, with_header)
    if without_header:
        defer_check(window.path, partial(_check, window, without_header, assumed))
    in_order = [located[entry.start] for entry in entries]
    records, is_tight = _close_regions(window, in_order, offset)
    _check_names(window.path, entries, records)
    by_name = {record.name: record for record in records}
    return Archive(window.path, window.base, window.length, tuple(records), by_name, is_tight)


def _check_names(path: str, entries: Iterable[_DirectoryEntry], records: Sequence[Record]) -> None:
    """Raise `CkptError` if two names differ only in case, or not at all."""
    counts = Counter(entry.raw_name.lower() for entry in entries)
    names = {record.name for record in records}
    if len(counts) == len(names) == len(records):
        return
    twice: dict[str, None] = {}
    for entry, record in zip(entries, records):
        if counts[entry.raw_name.lower()] > 1:
            twice[record.name] = None
    message = "without regard to case, as for torch, the archive holds two records of one name"
    raise _corrupt(path, message, twice)


def _located(window: _Window, entries: Sequence[_DirectoryEntry]) -> dict[int, Record]:
    """Return the records by their places, read from local headers; small records are fetched with
    their headers.
    """
    records: dict[int, Record] = {}
    for first in range(0, len(entries), _AT_A_TIME):
        batch = entries[first : first + _AT_A_TIME]
        window.file.prefetch(_heads(window, batch))
        for entry in batch:
            records[entry.start] = _locate(window, entry)
    return records


def _heads(window: _Window, batch: Iterable[_DirectoryEntry]) -> Iterator[tuple[int, int]]:
    """Yield where each record starts in the file, and how many bytes are fetched there."""
    for entry in batch:
        yield window.base + entry.start, _to_fetch(entry)


def _to_fetch(entry: _DirectoryEntry) -> int:
    """Return how many bytes are fetched at the start of the record: its header, and small data."""
    header = LOCAL.size + len(entry.raw_name)
    if not 0 < entry.nbytes <= _SMALL or is_storage(entry.raw_name):
        return header
    return header + _MOST_PADDING + entry.nbytes


def _by_layout(
    window: _Window, entries: Sequence[_DirectoryEntry], directory: int
) -> dict[int, Record]:
    """Return the storages of a remote file that are where torch's writer puts them, by their
    places.

    Their local headers, a request each, are read with the data.
    """
    records: dict[int, Record] = {}
    if not is_url(window.path):
        return records
    placed = sorted(entries, key=lambda entry: entry.start)
    ends = [*(entry.start for entry in placed[1:]), directory]
    for entry, end in zip(placed, ends):
        is_usual = entry.method == STORED and entry.flags & HAS_DESCRIPTOR
        if not is_usual or not is_storage(entry.raw_name):
            continue
        data = data_of(entry.raw_name, entry.start, entry.size, end)
        if data is not None:
            records[entry.start] = _record(window, entry, data)
    return records


def _check(
    window: _Window, entries: Sequence[_DirectoryEntry], assumed: Mapping[int, Record]
) -> None:
    """Raise `CkptError` if local headers say other places than the assumed ones."""
    located = _located(window, entries)
    wrong = [record.name for start, record in located.items() if record != assumed[start]]
    if wrong:
        raise _corrupt(
            window.path, "the zip directory and the records contradict each other", wrong
        )


def _find_end(window: _Window) -> tuple[int, int, int]:
    """Return the number of records, and the size and offset of the central directory."""
    tail_length = min(window.length, END.size + U16)
    tail_offset = window.length - tail_length
    tail = window.read(tail_offset, tail_length)
    at = tail.rfind(END_SIGNATURE, 0, max(0, tail_length - END.size + len(END_SIGNATURE)))
    if at < 0:
        raise _corrupt(
            window.path,
            "no end of a zip archive found: the file is truncated, or not a zip archive",
        )
    _, disk, directory_disk, here, count, size, offset, comment = END.unpack_from(tail, at)
    # torch takes the last signature, other readers one whose comment fits
    if at + END.size + comment != tail_length:
        message = (
            "the end of the zip archive is not at the end of the file: it is truncated, or"
            " bytes follow"
        )
        raise _corrupt(window.path, message)
    limit = tail_offset + at
    locator = window.read(limit - LOCATOR.size, LOCATOR.size) if limit >= LOCATOR.size else b""
    if locator.startswith(LOCATOR_SIGNATURE):
        limit = LOCATOR.unpack(locator)[2]
        fields = window.read(limit, END64.size)
        signature, _, _, _, disk, directory_disk, here, count, size, offset = END64.unpack(fields)
        if signature != END64_SIGNATURE:
            raise _corrupt(
                window.path, "the zip64 end of the archive is not where its locator says"
            )
    if disk or directory_disk or here != count:
        raise _corrupt(window.path, "the archive is one part of several (multi-disk)")
    if offset + size > limit:
        raise _corrupt(window.path, "the zip directory points outside the file")
    return count, size, offset


class _DirectoryEntry(NamedTuple):
    """One entry of the central directory, its zip64 sizes and offset resolved."""

    raw_name: bytes
    flags: int
    method: int
    crc: int
    nbytes: int
    size: int
    start: int
    central: bytes


def _parse_directory(path: str, directory: bytes, count: int) -> list[_DirectoryEntry]:
    entries = []
    at = 0
    unpack = CENTRAL.unpack_from
    if count * CENTRAL.size > len(directory):
        raise _corrupt(
            path, f"the zip directory is too small for the {count} records that it announces"
        )
    for _ in range(count):
        if at + CENTRAL.size > len(directory):
            raise _corrupt(path, "the zip directory is cut off")
        signature, _, _, flags, method, _, _, *fields = unpack(directory, at)
        crc, nbytes, size, name, extra, comment, disk, _, attributes, start = fields
        after = at + CENTRAL.size + name + extra + comment
        if signature != CENTRAL_SIGNATURE or after > len(directory):
            raise _corrupt(path, "the zip directory is damaged")
        raw_name = directory[at + CENTRAL.size : at + CENTRAL.size + name]
        if flags & _ENCRYPTED:
            raise _corrupt(path, "the archive is encrypted", [raw_name.decode("utf-8", "replace")])
        if U32 in (nbytes, size, start):
            extra_at = at + CENTRAL.size + name
            size, nbytes, start = _zip64_values(
                path, directory[extra_at : extra_at + extra], (size, nbytes, start)
            )
        if disk not in (0, U16):
            raise _corrupt(path, "the archive is one part of several (multi-disk)")
        if attributes & _FOLDER and nbytes:  # torch then leaves the memory for its data as it is
            raise _corrupt(
                path, "a record with data is marked as a folder", [_decode(path, raw_name, flags)]
            )
        if method == STORED and size != nbytes:
            raise _corrupt(
                path, "a stored record has two different sizes", [_decode(path, raw_name, flags)]
            )
        entries.append(
            _DirectoryEntry(raw_name, flags, method, crc, nbytes, size, start, directory[at:after])
        )
        at = after
    if at != len(directory):
        raise _corrupt(
            path, f"the zip directory holds more than the {count} records that it announces"
        )
    return entries


def _zip64_values(path: str, extra: bytes, values: tuple[int, int, int]) -> list[int]:
    """Return `values` with each 0xFFFFFFFF replaced by its 64-bit value from the zip64 extra
    field.
    """
    for tag, content in extra_fields(extra):
        if tag != ZIP64_FIELD or len(content) < 8 * values.count(U32):
            continue
        wide = struct.iter_unpack("<Q", content[: len(content) // 8 * 8])
        sizes = []
        for value in values:
            sizes.append(next(wide)[0] if value == U32 else value)
        return sizes
    raise _corrupt(path, "a record's zip64 sizes are missing")


def extra_fields(extra: bytes) -> Iterable[tuple[int, bytes]]:
    """Yield tag and content of each extra field of a record, without a last one that is cut off."""
    at = 0
    while at + 4 <= len(extra):
        tag, length = struct.unpack_from("<HH", extra, at)
        yield tag, extra[at + 4 : at + 4 + length]
        at += 4 + length


def _locate(window: _Window, entry: _DirectoryEntry) -> Record:
    """Return the record of a directory entry; its local header says where the data begins."""
    after_name = LOCAL.size + len(entry.raw_name)
    header = window.read(entry.start, after_name)
    name_length, extra_length = _LENGTHS.unpack_from(header, LOCAL.size - _LENGTHS.size)
    has_name = name_length == len(entry.raw_name) and header[LOCAL.size :] == entry.raw_name
    if not has_name or not header.startswith(LOCAL_SIGNATURE):
        name = _decode(window.path, entry.raw_name, entry.flags)
        raise _corrupt(
            window.path, "the zip directory points to a place without such a record", [name]
        )
    return _record(window, entry, entry.start + after_name + extra_length)


def _record(window: _Window, entry: _DirectoryEntry, data: int) -> Record:
    raw_name, flags, method, crc, nbytes, size, start, central = entry
    return Record(
        _decode(window.path, raw_name, flags),
        start,
        data,
        nbytes,
        size,
        crc,
        method,
        flags,
        data + nbytes,
        central,
    )


def _decode(path: str, raw_name: bytes, flags: int) -> str:
    try:
        return raw_name.decode("utf-8" if flags & UTF8 else "cp437")
    except UnicodeDecodeError:
        raise _corrupt(path, f"a record's name is not UTF-8: {raw_name[:80]!r}") from None


def _close_regions(
    window: _Window, records: list[Record], directory: int
) -> tuple[list[Record], bool]:
    """Return the records with `end` after their data descriptors, and whether the file has them in
    order without gaps.

    Raises `CkptError` if two overlap.
    """
    placed = sorted(records, key=lambda record: record.start)
    is_tight = placed == records and (not placed or placed[0].start == 0)
    limits = [*(record.start for record in placed[1:]), directory]
    closed: dict[int, Record] = {}
    for record, limit in zip(placed, limits):
        gap = limit - record.end
        if gap < 0:
            raise _corrupt(window.path, "a record overlaps what follows it", [record.name])
        if gap > _LONGEST_DESCRIPTOR:  # bytes that belong to no record, as after an update in place
            is_tight = False
            gap = _read_descriptor_size(window, record)
        if gap:
            record = Record(*record[:8], record.end + gap, record.central)
        closed[record.start] = record
    return [closed[record.start] for record in records], is_tight


def _read_descriptor_size(window: _Window, record: Record) -> int:
    if not record.flags & HAS_DESCRIPTOR:
        return 0
    size = descriptor_size(record.start, record.size)
    is_signed = window.read(record.end, 4) == DESCRIPTOR_SIGNATURE
    return size if is_signed else size - 4


def read_span(span: Span) -> bytes:
    """Return the bytes of the span. Raises `CkptError` if the file cannot be read, or has become
    shorter.
    """
    run_deferred_checks(span.path)
    return _read_span(span)


def _read_span(span: Span) -> bytes:
    with opened(span.path) as file:
        return _read_at(span.path, file, span.length, span.offset)


def _read_at(path: str, file: Source, count: int, offset: int) -> bytes:
    data = file.read_at(offset, count)
    while len(data) < count:  # one read returns at most 2 GiB
        more = file.read_at(offset + len(data), count - len(data))
        if not more:
            raise _corrupt(path, "the file became shorter while it was read")
        data += more
    return data


def _corrupt(path: str, message: str, records: Iterable[str] = ()) -> CkptError:
    return CkptError(
        f"{path}: {message}",
        hint="the file is incomplete or damaged: download or save it again (`unzip -t` checks it)",
        problems=same_problem(message, records),
    )
