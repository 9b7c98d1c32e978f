"""A file changed where it lies: other bytes before and behind those that stay, which no call reads or copies.

The way back is a patch too. What stays keeps its place, or is moved by whole blocks, which ext4 and XFS do by changing
the list of the file's extents.
"""

from __future__ import annotations

import errno
import os

from ckpttool.core.checkpoint import Span
from ckpttool.core.values import dataclass
from ckpttool.io import reflink
from ckpttool.io.pieces import Pieces

_MOST = 1 << 28  # bytes that a patch writes; a file of which more changes is written anew
_SAMPLE = 4096  # bytes at each end of those that stay, by which a file is known
_COLLAPSE, _INSERT = 0x08, 0x20  # linux/falloc.h: FALLOC_FL_COLLAPSE_RANGE, FALLOC_FL_INSERT_RANGE


@dataclass(frozen=True, slots=True)
class Patch:
    """Of a file of `before` bytes, `length` bytes from `start` on stay; offsets and sizes in bytes.

    They are moved by `shift`, `head` is what then stands before them, and `tail` what stands behind them: nothing where
    they are moved. `dense`: a way back, of a file that had no holes.
    """

    before: int
    start: int
    length: int
    shift: int
    head: bytes
    tail: bytes
    dense: int = False

    @property
    def end(self) -> int:
        """Where the bytes that stay end in the new file."""
        return self.start + self.shift + self.length

    @property
    def after(self) -> int:
        """Bytes of the new file."""
        return self.end + len(self.tail)

    @property
    def nbytes(self) -> int:
        """Bytes that are written."""
        return len(self.head) + len(self.tail)

    @property
    def overwritten(self) -> int:
        """Bytes of the old file that do not stay."""
        return self.before - self.length


def of_pieces(pieces: Pieces, path: str, before: int) -> Patch | None:
    """The patch by which the file at `path`, of `before` bytes, becomes the pieces; None where that takes a copy."""
    kept = [(at, piece.data) for at, piece in enumerate(pieces) if not isinstance(piece.data, bytes)]
    if not kept:  # a small file, an index: all of it is other bytes
        return Patch(before, 0, 0, 0, b"", _literal(pieces))
    if len(kept) != 1 or not isinstance(span := kept[0][1], Span) or os.path.realpath(span.path) != path:
        return None
    at = kept[0][0]
    head, tail = _literal(pieces[:at]), _literal(pieces[at:])
    found = Patch(before, span.offset, span.length, len(head) - span.offset, head, tail)
    moved = found.shift and (tail or span.offset + span.length != before)
    return None if moved or found.nbytes > _MOST else found


def _literal(pieces: Pieces) -> bytes:
    return b"".join(piece.data for piece in pieces if isinstance(piece.data, bytes))


def inverse(descriptor: int, patch: Patch) -> Patch:
    """The way back, read from the file as it is before `patch`. Raises OSError."""
    kept = patch.start + patch.length
    head, tail = _read(descriptor, 0, patch.start), _read(descriptor, kept, patch.before - kept)
    dense = patch.shift > 0 and _hole(descriptor)[0] == patch.before
    return Patch(patch.after, patch.start + patch.shift, patch.length, -patch.shift, head, tail, dense)


def apply(descriptor: int, patch: Patch, *, fsync: bool) -> None:
    """Changes the open file, also one in which some of it was done before. Raises OSError.

    What a file system cannot move, or not by so much, it refuses with one of `kernel.NOT_HERE`: nothing is changed.
    """
    size = os.fstat(descriptor).st_size
    if patch.shift and size == patch.before:
        _move(descriptor, patch)
        if fsync:
            os.fsync(descriptor)
    write_at(descriptor, 0, patch.head)
    write_at(descriptor, patch.end, patch.tail)
    if os.fstat(descriptor).st_size != patch.after:
        os.ftruncate(descriptor, patch.after)
    if fsync:
        os.fsync(descriptor)


def fits(descriptor: int, patch: Patch, sample: bytes) -> bool:
    """Whether the open file is the one that `patch` is for, or that file on the way: by its size, and what stays."""
    size = os.fstat(descriptor).st_size
    least, most = sorted((patch.before, patch.after))
    if size not in (least, most) if patch.shift else not least <= size <= most:
        return False
    moved = patch.shift if patch.shift and size == patch.after else 0
    half_moved = patch.dense and not moved and _torn_at(descriptor, -patch.shift) > 0
    return half_moved or sample_of(descriptor, patch.start + moved, patch.length) == sample


def sample_of(descriptor: int, start: int, length: int) -> bytes:
    """A hash of both ends of these bytes. Raises OSError."""
    count = min(_SAMPLE, length)
    ends = _read(descriptor, start, count) + _read(descriptor, start + length - count, count)
    return hashed(b"%d " % length + ends)


def content_of(descriptor: int, patch: Patch) -> bytes:
    """A hash of what stands in the file, as it is before `patch`, where `patch` writes. Raises OSError."""
    return hash_of(inverse(descriptor, patch))


def hash_of(patch: Patch) -> bytes:
    """A hash of what `patch` writes."""
    return hashed(b"%d " % len(patch.head) + patch.head + patch.tail)


def hashed(data: bytes) -> bytes:
    """16 bytes of BLAKE2b."""
    import hashlib  # loads OpenSSL

    return hashlib.blake2b(data, digest_size=16).digest()


def write_at(descriptor: int, offset: int, data: bytes) -> None:
    """Writes all of `data`. Raises OSError."""
    view = memoryview(data)
    if view:
        os.lseek(descriptor, offset, os.SEEK_SET)
    while view:
        view = view[os.write(descriptor, view) :]


def _read(descriptor: int, offset: int, count: int) -> bytes:
    parts = []
    while count > 0:
        data = os.pread(descriptor, count, offset)
        if not data:
            raise OSError(errno.EIO, "the file became shorter")
        parts.append(data)
        offset, count = offset + len(data), count - len(data)
    return b"".join(parts)


def _move(descriptor: int, patch: Patch) -> None:
    """Moves the whole content, by whole blocks: up, or down over what lies there."""
    if patch.shift > 0:
        reflink.fallocate(descriptor, _INSERT, 0, patch.shift)
    else:
        at = _torn_at(descriptor, -patch.shift) if patch.dense else 0
        reflink.fallocate(descriptor, _COLLAPSE, at, -patch.shift)


def _torn_at(descriptor: int, length: int) -> int:
    """Where the new blocks lie in a file that had no holes: at its start, or behind the hole that they are.

    File systems move extent by extent, the last one first; a machine that dies meanwhile leaves them further on.
    """
    start, end = _hole(descriptor)
    return start if end - start == length else 0  # a part of it is left of one that is being written


def _hole(descriptor: int) -> tuple[int, int]:
    """Where the first hole begins and ends; both are the end of the file where there is none, or nobody knows."""
    size = os.fstat(descriptor).st_size
    try:
        start = os.lseek(descriptor, 0, os.SEEK_HOLE)
        return start, size if start >= size else os.lseek(descriptor, start, os.SEEK_DATA)
    except (OSError, AttributeError):  # nothing but a hole follows, or the platform has no such call
        return size, size
