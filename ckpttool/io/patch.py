"""Patch a file in place: write other bytes before and after the rest, which no call reads or copies.

The inverse is a patch too. The bytes that stay keep their place, or are moved by whole blocks, which ext4 and XFS do by
changing the list of the file's extents.
"""

from __future__ import annotations

import errno
import os

from ckpttool.core.checkpoint import Span
from ckpttool.core.values import dataclass
from ckpttool.io import syscalls
from ckpttool.io.pieces import Pieces
from ckpttool.io.syscalls import write_all

_MOST = 1 << 28  # bytes that a patch writes; if more changes, the file is rewritten completely
_SAMPLE = 4096  # bytes at each end of the rest, by which a file is recognized
_COLLAPSE, _INSERT = 0x08, 0x20  # linux/falloc.h: FALLOC_FL_COLLAPSE_RANGE, FALLOC_FL_INSERT_RANGE


@dataclass(frozen=True, slots=True)
class Patch:
    """In a file of `before` bytes, `length` bytes from `start` on stay; offsets and sizes in bytes.

    They move by `shift`. `head` is written before them and `tail` after them; if they move, there is no `tail`.
    `dense`: the inverse patch of a file that had no holes.
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
        return self.start + self.shift + self.length

    @property
    def after(self) -> int:
        return self.end + len(self.tail)


def of_pieces(pieces: Pieces, path: str, before: int) -> Patch | None:
    """Return the patch that makes the file at `path`, of `before` bytes, the pieces; None if that needs a copy."""
    stays = [(at, piece.data) for at, piece in enumerate(pieces) if not isinstance(piece.data, bytes)]
    if not stays:  # a small file, an index: all bytes are written
        return Patch(before, 0, 0, 0, b"", _literal(pieces))
    if len(stays) != 1 or not isinstance(span := stays[0][1], Span) or os.path.realpath(span.path) != path:
        return None
    head, tail = _literal(pieces[: stays[0][0]]), _literal(pieces[stays[0][0] :])
    shift = len(head) - span.offset
    if (shift and (tail or span.offset + span.length != before)) or len(head) + len(tail) > _MOST:
        return None
    return Patch(before, span.offset, span.length, shift, head, tail)


def _literal(pieces: Pieces) -> bytes:
    return b"".join(piece.data for piece in pieces if isinstance(piece.data, bytes))


def inverse(descriptor: int, patch: Patch) -> Patch:
    """Return the patch that reverts `patch`, from the file as it is before it. Raises OSError."""
    end = patch.start + patch.length
    head, tail = _read(descriptor, 0, patch.start), _read(descriptor, end, patch.before - end)
    dense = patch.shift > 0 and _hole(descriptor)[0] == patch.before
    return Patch(patch.after, patch.start + patch.shift, patch.length, -patch.shift, head, tail, dense)


def apply(descriptor: int, patch: Patch, *, fsync: bool) -> None:
    """Patch the open file, also one that is partly patched. Raises OSError.

    If the file system cannot move blocks, or not by so much, it raises one of `NOT_HERE`: nothing is changed.
    """
    size = os.fstat(descriptor).st_size
    if patch.shift and size == patch.before:
        _move(descriptor, patch)
        if fsync:
            os.fsync(descriptor)
    for offset, data in ((0, patch.head), (patch.end, patch.tail)):
        if data:
            os.lseek(descriptor, offset, os.SEEK_SET)
            write_all(descriptor, data)
    if os.fstat(descriptor).st_size != patch.after:
        os.ftruncate(descriptor, patch.after)
    if fsync:
        os.fsync(descriptor)


def fits(descriptor: int, patch: Patch, sample: bytes) -> bool:
    """Return True if `patch` is for the open file, maybe partly patched: by its size, and the bytes that stay."""
    size = os.fstat(descriptor).st_size
    least, most = sorted((patch.before, patch.after))
    if size not in (least, most) if patch.shift else not least <= size <= most:
        return False
    moved = patch.shift if patch.shift and size == patch.after else 0
    half_moved = patch.dense and not moved and _torn_at(descriptor, -patch.shift) > 0
    return half_moved or sample_of(descriptor, patch.start + moved, patch.length) == sample


def sample_of(descriptor: int, start: int, length: int) -> bytes:
    """Return a hash of both ends of these bytes. Raises OSError."""
    count = min(_SAMPLE, length)
    ends = _read(descriptor, start, count) + _read(descriptor, start + length - count, count)
    return hashed(b"%d " % length + ends)


def content_of(descriptor: int, patch: Patch) -> bytes:
    """Return a hash of the bytes that `patch` would overwrite. Raises OSError."""
    return hash_of(inverse(descriptor, patch))


def hash_of(patch: Patch) -> bytes:
    return hashed(b"%d " % len(patch.head) + patch.head + patch.tail)


def hashed(data: bytes) -> bytes:
    import hashlib  # loads OpenSSL

    return hashlib.blake2b(data, digest_size=16).digest()


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
    """Move the content by complete blocks: up, or down over the first bytes."""
    if patch.shift > 0:
        syscalls.fallocate(descriptor, _INSERT, 0, patch.shift)
    else:
        at = _torn_at(descriptor, -patch.shift) if patch.dense else 0
        syscalls.fallocate(descriptor, _COLLAPSE, at, -patch.shift)


def _torn_at(descriptor: int, length: int) -> int:
    """Return where the new blocks are in a file that had no holes: at its start, or where the hole of their size is.

    File systems move extent by extent, the last one first; a machine that dies meanwhile leaves the hole further on.
    """
    start, end = _hole(descriptor)
    return start if end - start == length else 0  # a part of it is left if it was being written


def _hole(descriptor: int) -> tuple[int, int]:
    """Return start and end of the first hole; both are the end of the file if there is none, or nobody knows."""
    size = os.fstat(descriptor).st_size
    try:
        start = os.lseek(descriptor, 0, os.SEEK_HOLE)
        return start, size if start >= size else os.lseek(descriptor, start, os.SEEK_DATA)
    except (OSError, AttributeError):  # nothing but a hole follows, or the platform has no such call
        return size, size
