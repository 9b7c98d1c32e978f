"""What is dealt out: runs of pieces of each file, of about the same number of bytes whatever the number of ranks is."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from ckpttool.checkpoint import Span
from ckpttool.io.files import size
from ckpttool.io.paths import is_url
from ckpttool.io.pieces import BLOCK, Crc, Link, Piece, Pieces, nbytes_of
from ckpttool.values import dataclass

_ENDING = ".ckpttool.job"
_LEAST, _MOST = 1 << 20, 1 << 28  # bytes of a unit: what a rank that dies leaves half done is written again
_COUNT = 64  # units of an output that is not large


@dataclass(frozen=True, slots=True)
class Unit:
    """Pieces that one rank writes, from byte `offset` of the file `name` on.

    Where it is `late` they say checksums of other units, and are written last.
    """

    name: str
    offset: int
    pieces: Pieces
    late: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the unit."""
        return nbytes_of(self.pieces)

    @property
    def crcs(self) -> list[Crc]:
        """The checksums that are known once the unit is written."""
        return [piece.crc for piece in self.pieces if piece.crc is not None]


def staging(name: str, plan: str, more: str = "") -> str:
    """What the ranks have between them while they make the output `name`: a folder, or the object that says how far."""
    return f".{_short(name)}.{plan[:16]}{more}{_ENDING}"


def is_staging(found: str, name: str) -> bool:
    """Whether it is that of an output `name`, of whatever plan; that of ``name.index.json`` is another's."""
    pattern = rf"\.{re.escape(_short(name))}\.[0-9a-f]{{16}}(-[0-9a-f]+)?{re.escape(_ENDING)}"
    return re.fullmatch(pattern, found) is not None


def _short(name: str) -> str:
    """So much of the name as file systems have room for beside a digest."""
    return name.encode(errors="surrogateescape")[:100].decode(errors="ignore")


def cut(files: Mapping[str, Pieces | Link]) -> list[Unit]:
    """The units of the files, in their order. What is literal from end to end is no rank's but the first's."""
    dealt = {name: content for name, content in files.items() if not isinstance(content, Link) and not is_text(content)}
    total = sum(piece.nbytes for content in dealt.values() for piece in content)
    most = min(_MOST, max(_LEAST, total // _COUNT // BLOCK * BLOCK))
    return [unit for name, content in dealt.items() for unit in _cut(name, content, most)]


def is_text(content: Pieces) -> bool:
    """Whether a file's bytes are all there: an index, an empty file."""
    return all(isinstance(piece.data, bytes) for piece in content)


def _cut(name: str, pieces: Pieces, most: int) -> Iterator[Unit]:
    """Units of at most about `most` bytes; computed bytes stay together, and with what says their checksum."""
    own: list[Piece] = []
    begin = at = 0
    for piece in parts(pieces, most):
        have = {id(known.crc) for known in own}
        late = any(id(crc) not in have for crc in piece.needs)
        if own and (late or (at - begin + piece.nbytes > most and not piece.needs)):
            yield Unit(name, begin, own)
            own, begin = [], at
        own.append(piece)
        at += piece.nbytes
        if late:
            yield Unit(name, begin, own, late=True)
            own, begin = [], at
    if own:
        yield Unit(name, begin, own)


def parts(pieces: Pieces, most: int) -> Iterator[Piece]:
    """The pieces, long copies cut where blocks of the new file begin."""
    at = 0
    for piece in pieces:
        span = piece.data
        if isinstance(span, Span) and piece.crc is None and span.length > most:
            ends = [*range(most - at % BLOCK, span.length, most), span.length]
            for start, end in zip([0, *ends], ends):
                yield replace(piece, data=Span(span.path, span.offset + start, end - start))
        else:
            yield piece
        at += piece.nbytes


def as_pieces(content: Pieces | Link) -> Pieces:
    """The file's pieces; what is taken over as it is, is copied."""
    return [Piece(Span(content.path, 0, size(content.path)))] if isinstance(content, Link) else content


def versions(files: Mapping[str, Pieces | Link]) -> dict[str, list[object]]:
    """What its store says of each URL that the files are made of: bytes, and what changes with the content."""
    spans = {piece.data.path for own in files.values() for piece in as_pieces(own) if isinstance(piece.data, Span)}
    urls = sorted(filter(is_url, spans))
    if not urls:
        return {}
    from ckpttool.io.remote.read import there

    return {url: [found.size, *found.version] for url, found in zip(urls, map(there, urls))}


def digest(files: Mapping[str, Pieces | Link], *more: object) -> str:
    """SHA-256 of all that decides what is written: the layout of every file, and `more` (of what JSON has)."""
    found = hashlib.sha256(json.dumps(more).encode())
    for name, content in files.items():
        found.update(json.dumps(["file", name]).encode())
        for part in [json.dumps(["link", content.path])] if isinstance(content, Link) else map(_spelled, content):
            found.update(part.encode())
    return found.hexdigest()


def _spelled(piece: Piece) -> str:
    data = piece.data
    if isinstance(data, bytes):
        return json.dumps(["bytes", hashlib.sha256(data).hexdigest()])
    if isinstance(data, Span):
        return json.dumps(["span", data.path, data.offset, data.length])
    return json.dumps(["computed", data.length])
