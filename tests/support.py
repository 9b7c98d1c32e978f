"""What several tests need: pieces written to a file the plain way."""

from __future__ import annotations

import zlib
from pathlib import Path

from ckpttool.checkpoint import Span
from ckpttool.pieces import Pieces


def write_pieces(pieces: Pieces, path: str | Path) -> str:
    """Writes the pieces one after the other and returns the path as a string."""
    with open(path, "wb") as out:
        for piece in pieces:
            data = piece.data
            if isinstance(data, bytes):
                chunks = [data]
            elif isinstance(data, Span):
                with open(data.path, "rb") as source:
                    source.seek(data.offset)
                    chunks = [source.read(data.length)]
            else:
                chunks = [bytes(chunk) for chunk in data.produce()]
            written = sum(out.write(chunk) for chunk in chunks)
            assert written == piece.nbytes
            if piece.crc is not None:
                for chunk in chunks:
                    piece.crc.value = zlib.crc32(chunk, piece.crc.value)
    return str(path)
