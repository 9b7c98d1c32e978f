"""The content of an output, piece by piece in file order, and the bytes of spans and pieces."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, Union

from ckpttool.core.checkpoint import Lazy, Part, Span, length_of
from ckpttool.core.errors import CkptError
from ckpttool.core.values import dataclass
from ckpttool.io import checksums, handles, progress, sources, syscalls
from ckpttool.io.checksums import fastest_crc32
from ckpttool.io.handles import Handle
from ckpttool.io.paths import is_url

BLOCK = 4096  # bytes; file systems move and share the bytes of files in such blocks
LEAST = 1 << 20  # bytes of data that are worth keeping at their place within a block


@dataclass(slots=True, eq=False)
class Crc:
    """The running CRC-32 of the pieces that carry it, in writing order; a later `Lazy` piece may
    read `value`.
    """

    value: int = 0


@dataclass(frozen=True, slots=True)
class Piece:
    """The next bytes of the file: literal, copied from another file, or computed when they are
    written.

    `needs` are the checksums, of earlier pieces, that computed bytes contain.
    """

    data: bytes | Span | Lazy
    crc: Crc | None = None
    needs: tuple[Crc, ...] = ()

    @property
    def nbytes(self) -> int:
        return length_of(self.data)


Pieces = Sequence[Piece]


@dataclass(frozen=True, slots=True)
class Link:
    """A data file that is used as it is: a copy, whose blocks are shared with it if the file system
    can.
    """

    path: str


@dataclass(frozen=True, slots=True)
class Ready:
    """A complete file on the disk of its place, made from the files `read`: it only has to be
    moved.
    """

    path: str
    read: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Edited:
    """A file that is changed where it lies.

    `before` and `index` say what the old and the new file say about their data; equal ones say the
    same.
    """

    pieces: Pieces
    before: bytes
    index: bytes


# The files of a folder by name. They are written in this order; the last one makes the folder
# complete.
Files = Mapping[str, Union[Pieces, Link]]


def nbytes_of(pieces: Iterable[Piece]) -> int:
    return sum(piece.nbytes for piece in pieces)


def literal(pieces: Pieces) -> bytes:
    """Return the bytes of the pieces that are neither in a file nor computed."""
    return b"".join(piece.data for piece in pieces if isinstance(piece.data, bytes))


def amounts(pieces: Pieces) -> tuple[int, int]:
    """Return the number of bytes that are copied from a source, and of computed bytes."""
    moved = computed = 0
    for piece in pieces:
        if isinstance(piece.data, Span):
            moved += piece.nbytes
        elif isinstance(piece.data, Lazy) and not piece.needs:
            computed += piece.nbytes
    return moved, computed


if TYPE_CHECKING:
    from ckpttool.io.remote import Stream

# bytes a read, which a processor's cache holds until they are written, hashed or compared
CHUNK = 1 << 18
# of madvise, Linux 5.14: reads all pages now: an error is raised here, and no signal comes later
_POPULATE_READ = 22
_GAP = 1 << 16  # bytes between two spans of a remote file that are fetched with one request


class Digest(Protocol):
    """A running hash, such as hashlib's."""

    def update(self, data: bytes | memoryview, /) -> None: ...

    def digest(self) -> bytes: ...


class SpanReader:
    """Read spans in chunks through one reused buffer of `size` bytes; keep the last file open."""

    def __init__(self, size: int = CHUNK) -> None:
        self._path = ""
        self._handle: Handle | None = None
        self._remote: Stream | None = None
        self.buffer = bytearray(max(1, min(size, CHUNK)))

    def chunks(self, span: Span, until: int = 0) -> Iterator[memoryview]:
        """Yield the span's bytes; every chunk but the last fills the buffer, and is valid until the
        next one.

        Later spans of the same file follow up to byte `until`: a remote file is fetched ahead up to
        there. Raises `CkptError` if the file cannot be read, or ends before the span does.
        """
        self._open(span.path)
        view = memoryview(self.buffer)
        for start in range(0, span.length, len(view)):
            chunk = view[: min(len(view), span.length - start)]
            self._fill(chunk, span, span.offset + start, until)
            yield chunk

    def read_into(self, whole: memoryview, span: Span) -> None:
        """Read the span into memory of its length. Raises `CkptError` as `chunks` does."""
        self._open(span.path)
        self._fill(whole, span, span.offset, 0)

    def _fill(self, chunk: memoryview, span: Span, offset: int, until: int) -> None:
        filled = 0
        while filled < len(chunk):
            try:
                if self._handle is not None:
                    count = os.preadv(self._handle.descriptor, [chunk[filled:]], offset + filled)
                    progress.count_read(count)
                else:
                    assert self._remote is not None
                    end = max(until, span.offset + span.length)
                    data = self._remote.read_at(offset + filled, len(chunk) - filled, end)
                    count = len(data)
                    chunk[filled : filled + count] = data
            except OSError as error:
                raise CkptError(
                    f"{span.path}: {error.strerror}", hint="check the disk it is on"
                ) from error
            if not count:
                raise CkptError(
                    f"{span.path} ends at byte {offset + filled:,}, it was longer when it was"
                    " opened",
                    hint="it was changed while it was read: copy it again",
                )
            filled += count
        checksums.note_bytes(span.path, offset, chunk)

    def _open(self, path: str) -> None:
        if path == self._path:
            return
        self.close()
        if is_url(path):
            from ckpttool.io.remote import Stream

            self._path, self._remote = path, Stream(path)
            return
        try:
            self._handle = handles.acquire(path)
        except OSError as error:
            raise CkptError(
                f"{path}: {error.strerror}",
                hint="the source must stay where it is until all of it is read",
            ) from error
        self._path = path
        sources.note_streamed(path)
        sources.check_open(path, self._handle.descriptor)
        checksums.forget_others(path, checksums.version_of(os.fstat(self._handle.descriptor)))

    def close(self) -> None:
        if self._handle is not None:
            handles.release(self._handle)
        self._path, self._handle, self._remote = "", None, None


@contextmanager
def comparing_checksums() -> Iterator[None]:
    """Compare the CRC-32 of each record of an archive that is read inside, completely or in part.

    Raise `CkptError` at the end, with every record that is damaged.
    """
    reader = SpanReader()
    try:
        with checksums.comparing(reader.chunks):
            yield
    finally:
        reader.close()


def read_span(span: Span) -> bytearray:
    """Return all bytes of the span. Raises `CkptError` if they cannot be read."""
    return read_spans([span])


def read_spans(spans: Sequence[Span]) -> bytearray:
    """Return all bytes of the spans, joined. Raises `CkptError` if they cannot be read."""
    whole, reader, at = bytearray(sum(span.length for span in spans)), SpanReader(0), 0
    try:
        for span in spans:
            reader.read_into(memoryview(whole)[at : at + span.length], span)
            at += span.length
    finally:
        reader.close()
    return whole


def map_span(span: Span) -> memoryview:
    """Return the bytes of a span of a local file, in the memory of its pages; what is written there
    stays private.

    Raise `CkptError` if they cannot be read.
    """
    page = span.offset - span.offset % mmap.ALLOCATIONGRANULARITY
    reader = SpanReader(0)
    try:
        reader._open(span.path)
        assert reader._handle is not None
        pages = mmap.mmap(
            reader._handle.descriptor,
            span.offset + span.length - page,
            access=mmap.ACCESS_COPY,
            offset=page,
        )
        try:
            pages.madvise(_POPULATE_READ)
        except (AttributeError, OSError) as error:
            # EINVAL: an older or another system
            if getattr(error, "errno", errno.EINVAL) != errno.EINVAL:
                raise
    except (OSError, ValueError) as error:
        raise CkptError(f"{span.path}: {error}", hint="check the disk it is on") from error
    finally:
        reader.close()
    memory = memoryview(pages)[span.offset - page :]
    checksums.note_bytes(span.path, span.offset, memory)
    return memory


def read_all(data: Span | Lazy) -> bytearray:
    """Return all bytes, read or computed. Raises `CkptError` if they cannot be read."""
    if isinstance(data, Span):
        return read_span(data)
    whole, at = bytearray(data.length), 0
    for chunk in stream([Piece(data)]):
        whole[at : at + len(chunk)] = chunk
        at += len(chunk)
    return whole


def new_digest() -> Digest:
    """Return a running BLAKE2b, for bytes that are written and then read back."""
    import hashlib  # loads OpenSSL

    return hashlib.blake2b()


def digest_on_disk(path: str, offset: int = 0, length: int | None = None) -> bytes:
    """Return BLAKE2b of the local file or a part of it, read from the disk again if possible.
    Raises OSError.
    """
    digest = new_digest()
    with open(path, "rb", buffering=0) as file:
        progress.count_opened(path)
        syscalls.evict(file.fileno(), offset, length or 0)
        file.seek(offset)
        left = os.fstat(file.fileno()).st_size - offset if length is None else length
        while left and (chunk := file.read(min(left, CHUNK))):
            left -= len(chunk)
            digest.update(chunk)
            progress.count_read(len(chunk))
    return digest.digest()


def same_bytes(left: Span, right: Span) -> bool:
    if left == right:
        return True
    if left.length != right.length:
        return False
    a, b = SpanReader(left.length), SpanReader(right.length)
    try:
        # Comparing two views is a hundred times slower.
        return all(a.buffer.startswith(chunk) for _, chunk in zip(a.chunks(left), b.chunks(right)))
    finally:
        a.close()
        b.close()


def same_data(left: Span | Lazy, right: Span | Lazy) -> bool:
    """Return True if both are the same bytes, read or computed; streamed."""
    if isinstance(left, Span) and isinstance(right, Span):
        return same_bytes(left, right)
    left_chunks = filter(None, map(bytes, stream([Piece(left)])))
    right_chunks = filter(None, map(bytes, stream([Piece(right)])))
    a, b = next(left_chunks, b""), next(right_chunks, b"")
    while a and b:
        count = min(len(a), len(b))
        if a[:count] != b[:count]:
            return False
        a = a[count:] or next(left_chunks, b"")
        b = b[count:] or next(right_chunks, b"")
    return not a and not b


def stream(pieces: Pieces) -> Iterator[bytes | memoryview]:
    """Yield the bytes of the pieces in order; each chunk is valid until the next one. Raises
    `CkptError`.
    """
    reader, crc = SpanReader(), fastest_crc32()
    ends = _remote_ends(pieces)
    try:
        for number, piece in enumerate(pieces):
            for data in _data(piece.data, reader, ends.get(number, 0)):
                if piece.crc is not None:
                    piece.crc.value = crc(data, piece.crc.value)
                yield data
                del data  # else a computed value is held while the next one is made
    finally:
        reader.close()


def _remote_ends(pieces: Pieces) -> dict[int, int]:
    """Return, by the number of each piece of a remote file, the end of its run of adjacent
    pieces.
    """
    ends: dict[int, int] = {}
    paths = {piece.data.path for piece in pieces if isinstance(piece.data, Span)}
    if not any(map(is_url, paths)):
        return ends
    following, end = Span("", 0, 0), 0
    for number in reversed(range(len(pieces))):
        span = pieces[number].data
        if not isinstance(span, Span):
            continue
        gap = following.offset - (span.offset + span.length)
        if span.path != following.path or not 0 <= gap <= _GAP:
            end = span.offset + span.length  # a run ends here
        following = span
        ends[number] = end
    return ends


def _data(part: Part, reader: SpanReader, until: int = 0) -> Iterator[bytes | memoryview]:
    if isinstance(part, Span):
        yield from reader.chunks(part, until)
    elif isinstance(part, Lazy):
        written = 0
        for inner in part.produce():
            for data in _data(inner, reader):
                written += len(data)
                yield data
        if written != part.length:
            raise CkptError(
                f"computed {written:,} bytes, not {part.length:,}", hint="this is a bug: report it"
            )
    else:
        yield part
