"""Lay out a changed zip archive: kept records are copied, new ones written as torch writes them."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import field
from functools import partial

from ckpttool.core.checkpoint import Lazy, Span, length_of
from ckpttool.core.values import dataclass
from ckpttool.formats import zip_read as za
from ckpttool.formats.zip_read import ALIGNMENT, U32, Archive, Record, is_wide
from ckpttool.io.pieces import BLOCK, LEAST, Crc, Edited, Piece

_PADDING_FIELD = 0x4246  # "FB", the extra field that torch pads with
_CRC_AT, _SIZES_AT, _LENGTHS_AT, _OFFSET_AT = 16, 20, 28, 42  # in a central directory entry


@dataclass(frozen=True, slots=True, eq=False)
class NewRecord:
    """A record to write, stored without compression. A `crc` of None (or 0: none) is computed while it is written."""

    name: str
    data: bytes | Span | Lazy
    crc: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the record's content."""
        return length_of(self.data)


def layout_archive(
    source: Archive | None, entries: Sequence[Record | NewRecord], alignment: int = ALIGNMENT
) -> list[Piece]:
    """The pieces of an archive of `entries`, in their order: `Record`s are kept from `source`, `NewRecord`s are new.

    A kept record's data and CRC are copied as they are; where its header need not change either, neighbours are copied
    as one span. New records are laid out as torch's own writer does it, data at multiples of `alignment` bytes. A CRC
    that `source` left out is computed.
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


def layout_behind(source: Archive, entries: Sequence[Record | NewRecord], alignment: int = ALIGNMENT) -> list[Piece]:
    """The pieces of an archive of `entries` that leaves `source` where it lies: new records and a directory follow it.

    What it replaces, the directory too, belongs to no record any more; cutting the file off gives it back.
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


def edit_behind(source: Archive, entries: Sequence[Record | NewRecord], alignment: int = ALIGNMENT) -> Edited | None:
    """The edit of the file by which `source` becomes an archive of `entries`, which lies behind it (`layout_behind`).

    None where not all that is new is literal bytes.
    """
    if tuple(entries) == source.records:
        return Edited([Piece(_region(source, 0, source.length))], b"", b"")
    new = {entry.name: entry.data for entry in entries if isinstance(entry, NewRecord)}
    written = [data for data in new.values() if isinstance(data, bytes)]
    if len(written) < len(new):
        return None
    old = [source.by_name[name] for name in new]
    before = _index(source.records, [za.read_record(source, record, record.size) for record in old])
    return Edited(layout_behind(source, entries, alignment), before, _index(entries, written))


def _index(entries: Sequence[Record | NewRecord], texts: Sequence[bytes]) -> bytes:
    return b"\0".join([*(entry.name.encode() for entry in entries), *texts])


def _with_crc(source: Archive, entry: Record | NewRecord) -> Record | NewRecord:
    if isinstance(entry, Record) and not entry.has_crc and entry.method == za.STORED:
        return NewRecord(entry.name, source.span(entry))
    return entry


@dataclass(slots=True)
class _Layout:
    """The archive that is being laid out: the pieces so far, and the central directory that will follow them."""

    alignment: int
    pieces: list[Piece] = field(default_factory=list)
    cursor: int = 0
    directory: list[tuple[bytes, Crc | None]] = field(default_factory=list)

    def put(self, data: bytes | Span | Lazy, crc: Crc | None = None, needs: tuple[Crc, ...] = ()) -> None:
        """Appends a piece; a span that continues the last one is merged with it."""
        piece = Piece(data, crc, needs)
        self.cursor += piece.nbytes
        last = self.pieces[-1].data if self.pieces and self.pieces[-1].crc is crc is None else None
        if isinstance(data, Span) and isinstance(last, Span) and _follows(last, data):
            self.pieces[-1] = Piece(Span(last.path, last.offset, last.length + data.length))
        elif piece.nbytes:
            self.pieces.append(piece)

    def add(self, record: NewRecord) -> None:
        start, size, name = self.cursor, record.nbytes, record.name.encode()
        flags = za.UTF8 | (za.HAS_DESCRIPTOR if size else 0)  # torch writes no descriptor behind an empty record
        crc = record.crc or (zlib.crc32(record.data) if isinstance(record.data, bytes) else 0)
        fixed = za.LOCAL.pack(za.LOCAL_SIGNATURE, 0, flags, za.STORED, 0, 0, 0, 0, 0, 0, 0)
        header = _local_header(fixed, name, b"", start, size, self.alignment)
        late = Crc() if size and not crc and not isinstance(record.data, bytes) else None
        descriptor = _descriptor(start, size, size, crc) if size else b""
        if isinstance(record.data, bytes):
            self.put(header + record.data + descriptor)
        else:
            self.put(header)
            self.put(record.data, late)
            if late is None:
                self.put(descriptor)
            else:
                self.put(_late_descriptor(len(descriptor), start, size, late), needs=(late,))
        made = (za.CENTRAL_SIGNATURE, 0, 0, flags, za.STORED, 0, 0, crc, 0, 0, len(name), 0, 0, 0, 0, 0, 0)
        self.directory.append((_central_entry(za.CENTRAL.pack(*made) + name, start, size, size), late))

    def keep(self, source: Archive, record: Record) -> None:
        start = self.cursor
        step = self._step(record)
        header = None if self._fits(record, step) else _padded_header(source, record, start, step)
        if header is None:
            self.put(_region(source, record.start, record.end))
        else:
            data_end = record.data + record.nbytes
            descriptor = b""
            if record.end > data_end:
                descriptor = _descriptor(start, record.nbytes, record.size, record.crc)
            self.put(header)
            if len(descriptor) == record.end - data_end:
                self.put(_region(source, record.data, record.end))
            else:
                self.put(_region(source, record.data, data_end))
                self.put(descriptor)
        self.directory.append((_central_entry(record.central, start, record.nbytes, record.size), None))

    def _step(self, record: Record) -> int:
        """Bytes by a multiple of which the record's data may move: large data keeps its place within a block, so that
        two files can share it."""
        aligned = not record.data % self.alignment and not BLOCK % self.alignment
        return BLOCK if aligned and record.nbytes >= LEAST else self.alignment

    def _fits(self, record: Record, step: int) -> bool:
        """True where the record's own local header is right at the cursor too: its data stays aligned."""
        if self.cursor == record.start:
            return True
        if max(self.cursor, record.start) >= U32:  # torch writes such an offset into the local header
            return False
        return (self.cursor - record.start) % step == 0

    def finish(self) -> None:
        """Appends the central directory and the three end records, as torch writes them."""
        offset, count = self.cursor, len(self.directory)
        size = sum(len(entry) for entry, _ in self.directory)
        needs = tuple(late for _, late in self.directory if late is not None)
        if needs:
            self.put(Lazy(size, partial(_late_directory, self.directory)), needs=needs)
        else:
            self.put(b"".join(entry for entry, _ in self.directory))
        end64 = za.END64.pack(za.END64_SIGNATURE, za.END64.size - 12, 0x031E, 45, 0, 0, count, count, size, offset)
        locator = za.LOCATOR.pack(za.LOCATOR_SIGNATURE, 0, self.cursor, 1)
        few = min(count, za.U16)
        end = za.END.pack(za.END_SIGNATURE, 0, 0, few, few, min(size, U32), min(offset, U32), 0)
        self.put(end64 + locator + end)


def _follows(first: Span, second: Span) -> bool:
    return first.path == second.path and first.offset + first.length == second.offset


def _region(archive: Archive, start: int, end: int) -> Span:
    return Span(archive.path, archive.base + start, end - start)


def _local_header(
    fixed: bytes, name: bytes, others: bytes, start: int, size: int, alignment: int, place: int = 0
) -> bytes:
    """A local header at `start`, padded as torch pads it so that the data behind it is aligned, or at `place` modulo
    that. `fixed` are its first 30 bytes, `others` the extra fields to keep.
    """
    wide = [size, 0] * (size >= U32) + [start] * (start >= U32)
    extra = _zip64_field(wide) + others
    padding = (place - (start + za.LOCAL.size + len(name) + len(extra) + 4)) % alignment
    extra += struct.pack("<HH", _PADDING_FIELD, padding) + b"Z" * padding
    return fixed[:26] + struct.pack("<HH", len(name), len(extra)) + name + extra


def _padded_header(archive: Archive, record: Record, start: int, step: int) -> bytes | None:
    """The record's local header padded anew for `start`, where its data comes to lie as it did modulo a step of blocks,
    or aligned; None where it has no padding to change."""
    header = za.read_span(_region(archive, record.start, record.data))
    extra_at = za.LOCAL.size + int.from_bytes(header[26:28], "little")
    fields = list(za.extra_fields(header[extra_at:]))
    if all(tag != _PADDING_FIELD for tag, _ in fields):
        return None
    others = _without(header[extra_at:], (_PADDING_FIELD, za.ZIP64_FIELD))
    fixed, name = header[: za.LOCAL.size], header[za.LOCAL.size : extra_at]
    place = record.data % step if step == BLOCK else 0
    return _local_header(fixed, name, others, start, record.size, step, place)


def _zip64_field(values: Sequence[int]) -> bytes:
    return struct.pack(f"<HH{len(values)}Q", za.ZIP64_FIELD, 8 * len(values), *values) if values else b""


def _without(extra: bytes, tags: Sequence[int]) -> bytes:
    kept = ((tag, content) for tag, content in za.extra_fields(extra) if tag not in tags)
    return b"".join(struct.pack("<HH", tag, len(content)) + content for tag, content in kept)


def _descriptor(start: int, nbytes: int, size: int, crc: int) -> bytes:
    return za.DESCRIPTOR_SIGNATURE + struct.pack("<IQQ" if is_wide(start, size) else "<III", crc, nbytes, size)


def _late_descriptor(length: int, start: int, size: int, late: Crc) -> Lazy:
    return Lazy(length, lambda: [_descriptor(start, size, size, late.value)])


def _late_directory(directory: Sequence[tuple[bytes, Crc | None]]) -> Iterable[bytes]:
    for entry, late in directory:
        yield entry if late is None else entry[:_CRC_AT] + struct.pack("<I", late.value) + entry[_SIZES_AT:]


def _central_entry(entry: bytes, start: int, nbytes: int, size: int) -> bytes:
    """`entry` of the central directory, changed to say that the record begins at `start` and how long it is."""
    wide = [value for value in (size, nbytes, start) if value >= U32]
    sizes = struct.pack("<II", min(nbytes, U32), min(size, U32))
    offset = struct.pack("<I", min(start, U32))
    name_length, extra_length = struct.unpack_from("<HH", entry, _LENGTHS_AT)
    if not wide and not extra_length:
        return entry[:_SIZES_AT] + sizes + entry[_LENGTHS_AT:_OFFSET_AT] + offset + entry[za.CENTRAL.size :]
    extra_at = za.CENTRAL.size + name_length
    extra = _zip64_field(wide) + _without(entry[extra_at : extra_at + extra_length], (za.ZIP64_FIELD,))
    lengths = struct.pack("<HH", name_length, len(extra))
    middle = entry[_LENGTHS_AT + 4 : _OFFSET_AT] + offset + entry[za.CENTRAL.size : extra_at]
    return entry[:_SIZES_AT] + sizes + lengths + middle + extra + entry[extra_at + extra_length :]
