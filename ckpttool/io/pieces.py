"""Pieces: what a format's writer hands to `write_file`, in file order; for a folder, the pieces of each of its files.

The writer decides every byte's place; no byte of tensor data has been read yet.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from itertools import accumulate

from ckpttool.core.checkpoint import Lazy, Span, length_of
from ckpttool.core.values import dataclass


@dataclass(slots=True, eq=False)
class Crc:
    """The running CRC-32 of the pieces that carry it, in writing order; a later `Lazy` piece may read `value`."""

    value: int = 0


@dataclass(frozen=True, slots=True)
class Piece:
    """The next bytes of the file: literal, copied from another file, or computed when they are written.

    `needs` are the checksums that computed bytes say: of pieces before this one.
    """

    data: bytes | Span | Lazy
    crc: Crc | None = None
    needs: tuple[Crc, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the piece in the file."""
        return length_of(self.data)


Pieces = Sequence[Piece]
BLOCK = 4096  # bytes; file systems move and share the bytes of files by such blocks
LEAST = 1 << 20  # bytes of data for which it is worth keeping their place within a block
LINKS = ("copy", "hard", "reflink")  # the ways to take over a file as it is


@dataclass(frozen=True, slots=True)
class Link:
    """A data file that is taken over as it is: copied or, if the user says so, linked."""

    path: str


@dataclass(frozen=True, slots=True)
class Ready:
    """A file that is made already, on the disk of its place, of what was `read`: it only has to be moved there."""

    path: str
    read: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Edited:
    """A file that is changed where it lies. Of two files with the same data, those with the same `index` say the same
    of it; `before` is that of the file as it is."""

    pieces: Pieces
    before: bytes
    index: bytes


# The files of a folder by their names in it. They are written in this order; the last one makes the folder complete.
Files = Mapping[str, Pieces | Link]


def nbytes_of(pieces: Iterable[Piece]) -> int:
    """Bytes of the pieces in the file."""
    return sum(piece.nbytes for piece in pieces)


def amounts(pieces: Pieces) -> tuple[int, int]:
    """Bytes of the pieces that lie in a source, and of those that are computed; the others are the format's own."""
    moved = sum(piece.nbytes for piece in pieces if isinstance(piece.data, Span))
    return moved, sum(piece.nbytes for piece in pieces if isinstance(piece.data, Lazy) and not piece.needs)


@dataclass(frozen=True, slots=True)
class Held:
    """What objects hold to the byte, by their store's checksums: by URL where each piece begins, and the pieces."""

    objects: dict[str, tuple[Sequence[int], Pieces]] = field(default_factory=dict)

    def note(self, url: str, pieces: Pieces) -> None:
        """Notes what the object holds."""
        self.objects[url] = [0, *accumulate(piece.nbytes for piece in pieces)], pieces

    def proves(self, place: Span | Lazy, data: Span | Lazy) -> bool:
        """Whether these bytes of an object are known to be `data`: a copy of the span, or what was computed."""
        if not isinstance(place, Span) or place.path not in self.objects:
            return False
        starts, pieces = self.objects[place.path]
        number = bisect_right(starts, place.offset) - 1
        if number >= len(pieces):
            return False
        made, at = pieces[number], place.offset - starts[number]
        if at + place.length > made.nbytes:
            return False
        if isinstance(made.data, Span):
            return Span(made.data.path, made.data.offset + at, place.length) == data
        return made.data is data and made.nbytes == place.length
