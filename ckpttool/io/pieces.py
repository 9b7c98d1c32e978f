"""The content of an output, piece by piece in file order, as a format's layout hands it to the writer.

The layout decides the place of every byte before any tensor data is read.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from itertools import accumulate
from typing import Union

from ckpttool.core.checkpoint import Lazy, Span, length_of
from ckpttool.core.values import dataclass

BLOCK = 4096  # bytes; file systems move and share the bytes of files in such blocks
LEAST = 1 << 20  # bytes of data that are worth keeping at their place within a block
LINKS = ("copy", "hard", "reflink")  # the values of --link


@dataclass(slots=True, eq=False)
class Crc:
    """The running CRC-32 of the pieces that carry it, in writing order; a later `Lazy` piece may read `value`."""

    value: int = 0


@dataclass(frozen=True, slots=True)
class Piece:
    """The next bytes of the file: literal, copied from another file, or computed when they are written.

    `needs` are the checksums, of earlier pieces, that computed bytes contain.
    """

    data: bytes | Span | Lazy
    crc: Crc | None = None
    needs: tuple[Crc, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the piece in the file."""
        return length_of(self.data)


Pieces = Sequence[Piece]


@dataclass(frozen=True, slots=True)
class Link:
    """A data file that is used as it is: copied or, if the user asks for that, linked."""

    path: str


@dataclass(frozen=True, slots=True)
class Ready:
    """A complete file on the disk of its place, made from the files `read`: it only has to be moved."""

    path: str
    read: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Edited:
    """A file that is changed where it lies.

    `before` and `index` say what the old and the new file say about their data; equal ones say the same.
    """

    pieces: Pieces
    before: bytes
    index: bytes


# The files of a folder by name. They are written in this order; the last one makes the folder complete.
Files = Mapping[str, Union[Pieces, Link]]


def nbytes_of(pieces: Iterable[Piece]) -> int:
    """Return the bytes of the pieces in the file."""
    return sum(piece.nbytes for piece in pieces)


def amounts(pieces: Pieces) -> tuple[int, int]:
    """Return the number of bytes that are copied from a source, and of computed bytes."""
    moved = sum(piece.nbytes for piece in pieces if isinstance(piece.data, Span))
    return moved, sum(piece.nbytes for piece in pieces if isinstance(piece.data, Lazy) and not piece.needs)


@dataclass(frozen=True, slots=True)
class Held:
    """What objects hold, as their store's checksums prove: by URL, where each piece begins, and the pieces."""

    objects: dict[str, tuple[Sequence[int], Pieces]] = field(default_factory=dict)

    def note(self, url: str, pieces: Pieces) -> None:
        """Note that the object holds the pieces."""
        self.objects[url] = [0, *accumulate(piece.nbytes for piece in pieces)], pieces

    def proves(self, place: Span | Lazy, data: Span | Lazy) -> bool:
        """Return True if these bytes of an object are known to be `data`: a copy of the span, or computed by it."""
        if not isinstance(place, Span) or place.path not in self.objects:
            return False
        starts, pieces = self.objects[place.path]
        number = bisect_right(starts, place.offset) - 1
        if number >= len(pieces):
            return False
        piece, at = pieces[number], place.offset - starts[number]
        if at + place.length > piece.nbytes:
            return False
        if isinstance(piece.data, Span):
            return Span(piece.data.path, piece.data.offset + at, place.length) == data
        return piece.data is data and piece.nbytes == place.length
