"""Patch a file in place: write other bytes before and after the rest, which keeps its place and is
not read.

The inverse is a patch too.
"""

from __future__ import annotations

import errno
import os

from ckpttool.core.checkpoint import Span
from ckpttool.core.values import dataclass
from ckpttool.io.pieces import Pieces, literal
from ckpttool.io.syscalls import write_all

_MOST = 1 << 28  # bytes that a patch writes; more is not edited in place
_SAMPLE = 4096  # bytes at each end of the rest, by which a file is recognized


@dataclass(frozen=True, slots=True)
class Patch:
    """In a file of `before` bytes, `length` bytes from `start` on stay; offsets and sizes in bytes.

    `head`, of `start` bytes, is written before them and `tail` after them.
    """

    before: int
    start: int
    length: int
    head: bytes
    tail: bytes

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def after(self) -> int:
        return self.end + len(self.tail)


def of_pieces(pieces: Pieces, path: str, before: int) -> Patch | None:
    """Return the patch that makes the file at `path`, of `before` bytes, the pieces; None if that
    needs a copy.
    """
    stays = [at for at, piece in enumerate(pieces) if not isinstance(piece.data, bytes)]
    if not stays:  # a small file, an index: all bytes are written
        return Patch(before, 0, 0, b"", literal(pieces))
    at = stays[0]
    span = pieces[at].data
    if len(stays) > 1 or not isinstance(span, Span) or os.path.realpath(span.path) != path:
        return None
    head, tail = literal(pieces[:at]), literal(pieces[at:])
    if len(head) != span.offset or len(head) + len(tail) > _MOST:
        return None
    return Patch(before, span.offset, span.length, head, tail)


def inverse(descriptor: int, patch: Patch) -> Patch:
    """Return the patch that reverts `patch`, from the file as it is before it. Raises OSError."""
    end = patch.start + patch.length
    head, tail = _read(descriptor, 0, patch.start), _read(descriptor, end, patch.before - end)
    return Patch(patch.after, patch.start, patch.length, head, tail)


def apply(descriptor: int, patch: Patch, *, fsync: bool) -> None:
    """Patch the open file, also one that is partly patched. Raises OSError."""
    for offset, data in ((0, patch.head), (patch.end, patch.tail)):
        if data:
            os.lseek(descriptor, offset, os.SEEK_SET)
            write_all(descriptor, data)
    if os.fstat(descriptor).st_size != patch.after:
        os.ftruncate(descriptor, patch.after)
    if fsync:
        os.fsync(descriptor)


def fits(descriptor: int, patch: Patch, sample: bytes) -> bool:
    """Return True if `patch` is for the open file, maybe partly patched: by its size, and the bytes
    that stay.
    """
    size = os.fstat(descriptor).st_size
    least, most = sorted((patch.before, patch.after))
    return least <= size <= most and sample_of(descriptor, patch.start, patch.length) == sample


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
