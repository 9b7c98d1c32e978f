"""Pieces: what a format's writer hands to `execute`, in file order.

The writer decides every byte's place; no byte of tensor data has been read yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckpttool.checkpoint import Lazy, Span


@dataclass(slots=True, eq=False)
class Crc:
    """The running CRC-32 of the pieces that carry it, in writing order; a later `Lazy` piece may read `value`."""

    value: int = 0


@dataclass(frozen=True, slots=True)
class Piece:
    """The next bytes of the file: literal, copied from another file, or computed when they are written."""

    data: bytes | Span | Lazy
    crc: Crc | None = None

    @property
    def nbytes(self) -> int:
        return len(self.data) if isinstance(self.data, bytes) else self.data.length


Pieces = Sequence[Piece]
