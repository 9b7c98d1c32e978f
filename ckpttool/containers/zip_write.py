"""Lay out a changed zip archive: kept records are copied, new ones written as torch writes them."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from functools import partial
from typing import Union

from ckpttool.containers import zip_read as za
from ckpttool.containers.zip_read import ALIGNMENT, U32, Archive, Record, is_wide
from ckpttool.core.checkpoint import Lazy, Span, length_of
from ckpttool.core.values import dataclass
from ckpttool.io.pieces import BLOCK, LEAST, Crc, Edited, Piece

_PADDING_FIELD = 0x4246  # "FB", the extra field that torch pads with
_CRC_AT, _SIZES_AT, _LENGTHS_AT, _OFFSET_AT = 16, 20, 28, 42  # in a central directory entry

Data = Union[bytes, Span, Lazy]  # of a record


@dataclass(frozen=True, slots=True, eq=False)
class NewRecord:
    """A record to write, stored without compression. A `crc` of None (or 0: none) is computed while
    it is written.
    """

    name: str
    data: Data
    crc: int | None = None

    @property
    def nbytes(self) -> int:
        return length_of(self.data)


Entry = Union[Record, NewRecord]  # a record that is kept, or a new one


def with_new(records: Sequence[Record], data: Mapping[str, Data]) -> list[Entry]:
    """Return the records; those named in `data` have new bytes."""
    entries: list[Entry] = []
    for record in records:
        new = data.get(record.name)
        entries.append(record if new is None else NewRecord(record.name, new))
    return entries


def layout_archive(
    source: Archive | None, entries: Sequence[Entry], alignment: int = ALIGNMENT
) -> list[Piece]:
    """Return the pieces of an archive of `entries`, in order: `Record`s are kept from `source`,
    `NewRecord`s are new.

    Data and CRC of a kept record are copied; if its header need not change either, neighbors are
    copied as one span. New records are laid out as torch's own writer does it, data at multiples of
    `alignment` bytes. A CRC that `source` left out is computed.
    """
    if source is not None:
        entries = [_with_crc(source, entry) for entry in entries]
    if source is not None and source.is_tight and tuple(entries) == source.records:
        return [Piece(Span(source.path, source.base, source.length))]
    layout = _Layout(alignment)
    for entry in entries:
        if isinstance(entry, NewRecord):
            layout.add(entry)
        else:
            assert source is not None
            layout.keep(source, entry)
    layout.finish()
    return layout.pieces


def _with_crc(source: Archive, entry: Entry) -> Entry:
    """Return a record that was written without a CRC as a new one of the same data."""
    if isinstance(entry, NewRecord) or entry.has_crc or entry.method != za.STORED:
        return entry
    return NewRecord(entry.name, source.span(entry))


def layout_behind(
    source: Archive, entries: Sequence[Entry], alignment: int = ALIGNMENT
) -> list[Piece]:
    """Return the pieces of an archive of `entries` that keeps `source` in place: new records and a
    directory follow.

    The bytes that they replace, with the old directory, are unused; truncating the file restores
    the old archive.
    """
    layout = _Layout(alignment)
    layout.put(_region(source, 0, source.length))
    for entry in entries:
        if isinstance(entry, NewRecord):
            layout.add(entry)
        else:
            layout.directory.append((entry.central, None))
    layout.finish()
    return layout.pieces


def edit_behind(
    source: Archive, entries: Sequence[Entry], alignment: int = ALIGNMENT
) -> Edited | None:
    """Return the edit of the file by which `source` becomes an archive of `entries`
    (`layout_behind`).

    None if some of the new data is not literal bytes.
    """
    if tuple(entries) == source.records:
        return Edited([Piece(_region(source, 0, source.length))], b"", b"")
    before = [record.name.encode() for record in source.records]
    after = [entry.name.encode() for entry in entries]
    for entry in entries:
        if not isinstance(entry, NewRecord):
            continue
        if not isinstance(entry.data, bytes):
            return None
        record = source.by_name[entry.name]
        before.append(za.read_record(source, record, record.size))
        after.append(entry.data)
    pieces = layout_behind(source, entries, alignment)
    return Edited(pieces, b"\0".join(before), b"\0".join(after))


@dataclass(slots=True)
class _Layout:
    """An archive in the making: the pieces so far, and the central directory that will follow
    them.
    """

    alignment: int
    pieces: list[Piece] = field(default_factory=list)
    cursor: int = 0
    directory: list[tuple[bytes, Crc | None]] = field(default_factory=list)

    def put(self, data: Data, crc: Crc | None = None, needs: tuple[Crc, ...] = ()) -> None:
        piece = Piece(data, crc, needs)
        self.cursor += piece.nbytes
        last = self.pieces[-1] if self.pieces else None
        if last is not None and last.crc is crc is None:
            joined = _joined(last.data, data)
            if joined is not None:
                self.pieces[-1] = Piece(joined)
                return
        if piece.nbytes:
            self.pieces.append(piece)

    def add(self, record: NewRecord) -> None:
        start, size, data = self.cursor, record.nbytes, record.data
        name = record.name.encode()
        crc = record.crc or 0
        late = None
        if isinstance(data, bytes):
            crc = crc or zlib.crc32(data)
        elif size and not crc:
            late = Crc()
        # torch writes no descriptor after an empty record
        flags = za.UTF8 | (za.HAS_DESCRIPTOR if size else 0)
        fixed = za.LOCAL.pack(za.LOCAL_SIGNATURE, 0, flags, za.STORED, 0, 0, 0, 0, 0, 0, 0)
        header = _local_header(fixed, name, b"", start, size, self.alignment)
        descriptor = _descriptor(start, size, size, crc) if size else b""
        if isinstance(data, bytes):
            self.put(header + data + descriptor)
        else:
            self.put(header)
            self.put(data, late)
            if late is None:
                self.put(descriptor)
            else:
                with_crc = partial(_late_descriptor, start, size, late)
                self.put(Lazy(len(descriptor), with_crc), needs=(late,))
        fields = (0, 0, flags, za.STORED, 0, 0, crc, 0, 0, len(name), 0, 0, 0, 0, 0, 0)
        central = za.CENTRAL.pack(za.CENTRAL_SIGNATURE, *fields) + name
        self.directory.append((_central_entry(central, start, size, size), late))

    def keep(self, source: Archive, record: Record) -> None:
        start = self.cursor
        central = _central_entry(record.central, start, record.nbytes, record.size)
        self.directory.append((central, None))
        # Data may move by a multiple of `step`: large data keeps its place within a block, so that
        # files can share it.
        is_aligned = not record.data % self.alignment and not BLOCK % self.alignment
        step = BLOCK if is_aligned and record.nbytes >= LEAST else self.alignment
        # Torch writes a large offset into the local header.
        is_small = max(start, record.start) < U32
        fits = start == record.start or (is_small and (start - record.start) % step == 0)
        header = None if fits else _padded_header(source, record, start, step)
        if header is None:
            self.put(_region(source, record.start, record.end))
            return
        self.put(header)
        data_end = record.data + record.nbytes
        descriptor = b""
        if record.end > data_end:
            descriptor = _descriptor(start, record.nbytes, record.size, record.crc)
        if len(descriptor) == record.end - data_end:
            self.put(_region(source, record.data, record.end))
        else:
            self.put(_region(source, record.data, data_end))
            self.put(descriptor)

    def finish(self) -> None:
        """Append the central directory and the three end records, as torch writes them."""
        offset = self.cursor
        needs = tuple(late for _, late in self.directory if late is not None)
        size = sum(len(entry) for entry, _ in self.directory)
        if needs:
            self.put(Lazy(size, partial(_late_directory, self.directory)), needs=needs)
        else:
            self.put(b"".join(entry for entry, _ in self.directory))
        self.put(_end_records(len(self.directory), size, offset))


def _end_records(count: int, size: int, offset: int) -> bytes:
    """Return the end records after a directory of so many entries and bytes at `offset`."""
    counts = (count, count, size, offset)
    end64 = za.END64.pack(za.END64_SIGNATURE, za.END64.size - 12, 0x031E, 45, 0, 0, *counts)
    locator = za.LOCATOR.pack(za.LOCATOR_SIGNATURE, 0, offset + size, 1)
    few = min(count, za.U16)
    counts = (few, few, min(size, U32), min(offset, U32))
    return end64 + locator + za.END.pack(za.END_SIGNATURE, 0, 0, *counts, 0)


def _joined(first: Data, second: Data) -> Span | None:
    """Return the span of two that follow each other in a file; None for others."""
    if not isinstance(first, Span) or not isinstance(second, Span) or first.path != second.path:
        return None
    if first.offset + first.length != second.offset:
        return None
    return Span(first.path, first.offset, first.length + second.length)


def _region(archive: Archive, start: int, end: int) -> Span:
    return Span(archive.path, archive.base + start, end - start)


def _local_header(
    fixed: bytes, name: bytes, others: bytes, start: int, size: int, alignment: int, place: int = 0
) -> bytes:
    """Return a local header at `start`, padded as torch does to put the data after it at `place`
    modulo `alignment`.

    `fixed` are its first 30 bytes, `others` the extra fields to keep.
    """
    wide = []
    if size >= U32:
        wide += [size, 0]
    if start >= U32:
        wide.append(start)
    extra = _zip64_field(wide) + others
    unpadded = start + za.LOCAL.size + len(name) + len(extra) + 4
    padding = (place - unpadded) % alignment
    extra += struct.pack("<HH", _PADDING_FIELD, padding) + b"Z" * padding
    return fixed[:26] + struct.pack("<HH", len(name), len(extra)) + name + extra


def _padded_header(archive: Archive, record: Record, start: int, step: int) -> bytes | None:
    """Return the record's local header padded for `start`: its data stays at the same place in a
    block, or is aligned.

    None if the header has no padding.
    """
    header = za.read_span(_region(archive, record.start, record.data))
    extra_at = za.LOCAL.size + int.from_bytes(header[26:28], "little")
    extra = header[extra_at:]
    tags = (tag for tag, _ in za.extra_fields(extra))
    if _PADDING_FIELD not in tags:
        return None
    others = _without(extra, (_PADDING_FIELD, za.ZIP64_FIELD))
    fixed, name = header[: za.LOCAL.size], header[za.LOCAL.size : extra_at]
    place = record.data % step if step == BLOCK else 0
    return _local_header(fixed, name, others, start, record.size, step, place)


def _zip64_field(values: Sequence[int]) -> bytes:
    if not values:
        return b""
    return struct.pack(f"<HH{len(values)}Q", za.ZIP64_FIELD, 8 * len(values), *values)


def _without(extra: bytes, tags: Sequence[int]) -> bytes:
    """Return the extra fields, except for fields with these tags."""
    kept = b""
    for tag, content in za.extra_fields(extra):
        if tag not in tags:
            kept += struct.pack("<HH", tag, len(content)) + content
    return kept


def _descriptor(start: int, nbytes: int, size: int, crc: int) -> bytes:
    sizes = "<IQQ" if is_wide(start, size) else "<III"
    return za.DESCRIPTOR_SIGNATURE + struct.pack(sizes, crc, nbytes, size)


def _late_descriptor(start: int, size: int, late: Crc) -> Iterable[bytes]:
    yield _descriptor(start, size, size, late.value)


def _late_directory(directory: Sequence[tuple[bytes, Crc | None]]) -> Iterable[bytes]:
    """Yield the entries, with the CRCs that are known now."""
    for entry, late in directory:
        if late is None:
            yield entry
        else:
            yield entry[:_CRC_AT] + struct.pack("<I", late.value) + entry[_SIZES_AT:]


def _central_entry(entry: bytes, start: int, nbytes: int, size: int) -> bytes:
    """Return an entry of the central directory with another start and other sizes::

    ... CRC | sizes | lengths | ... | offset | name | extra fields | comment
    """
    name_length, extra_length = struct.unpack_from("<HH", entry, _LENGTHS_AT)
    extra_at = za.CENTRAL.size + name_length
    extra_end = extra_at + extra_length
    name = entry[za.CENTRAL.size : extra_at]
    wide = [value for value in (size, nbytes, start) if value >= U32]
    extra = b""
    if wide or extra_length:
        extra = _zip64_field(wide) + _without(entry[extra_at:extra_end], (za.ZIP64_FIELD,))
    fields = struct.pack("<IIHH", min(nbytes, U32), min(size, U32), name_length, len(extra))
    offset = struct.pack("<I", min(start, U32))
    head = entry[:_SIZES_AT] + fields + entry[_LENGTHS_AT + 4 : _OFFSET_AT] + offset
    return head + name + extra + entry[extra_end:]
