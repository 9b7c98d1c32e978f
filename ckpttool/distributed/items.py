"""Work items: what one rank writes at a time, and how the ranks share them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Union

from ckpttool.core.checkpoint import Span
from ckpttool.core.errors import CkptError
from ckpttool.core.values import dataclass
from ckpttool.distributed.job import Job
from ckpttool.io.files import size
from ckpttool.io.paths import is_url
from ckpttool.io.pieces import BLOCK, Crc, Link, Piece, Pieces, nbytes_of

MOST = 1 << 28  # bytes of an item: what a rank that dies leaves half done is written again
COUNT = 64  # items of an output that is not large
Contents = Mapping[str, Union[Pieces, Link]]
Record = dict[str, Any]  # what a rank says about an item: its number ("item"), its checksums ("crcs"), and more


@dataclass(frozen=True, slots=True)
class Item:
    """Pieces of the file `name` that one rank writes, or a span that a store copies.

    `first` is the number of its first byte, or of its first part of an upload, whose parts have `sizes`. A `late` item
    contains checksums of other items, and is written last.
    """

    name: str
    first: int
    data: Pieces | Span
    late: bool = False
    sizes: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the item."""
        return self.data.length if isinstance(self.data, Span) else nbytes_of(self.data)

    @property
    def crcs(self) -> list[Crc]:
        """The checksums that are known once the item is written."""
        return [] if isinstance(self.data, Span) else [piece.crc for piece in self.data if piece.crc is not None]


def cut(pieces: Pieces, most: int) -> Iterator[Piece]:
    """Yield the pieces, long copies cut at blocks of the new file."""
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


def is_text(content: Pieces) -> bool:
    """Return True if all bytes of the file are literal: an index, an empty file. Only the first rank writes it."""
    return all(isinstance(piece.data, bytes) for piece in content)


def as_pieces(content: Pieces | Link) -> Pieces:
    """Return the file's pieces; a file that is used as it is, is copied."""
    return [Piece(Span(content.path, 0, size(content.path)))] if isinstance(content, Link) else content


def digest(files: Contents, *more: object) -> str:
    """Return the SHA-256 of everything that decides what is written: all layouts, the sources, and `more` (JSON)."""
    found = hashlib.sha256(json.dumps([more, _versions(files)]).encode())
    for name, content in files.items():
        found.update(json.dumps(["file", name]).encode())
        for piece in [] if isinstance(content, Link) else content:
            data = piece.data
            if isinstance(data, bytes):
                text = ["bytes", hashlib.sha256(data).hexdigest()]
            elif isinstance(data, Span):
                text = ["span", data.path, str(data.offset), str(data.length)]
            else:
                text = ["computed", str(data.length)]
            found.update(json.dumps(text).encode())
        if isinstance(content, Link):
            found.update(json.dumps(["link", content.path]).encode())
    return found.hexdigest()


def _versions(files: Contents) -> dict[str, list[object]]:
    """Return, for each URL among the sources, what its store says about the content."""
    pieces = [piece for content in files.values() for piece in as_pieces(content)]
    urls = sorted({piece.data.path for piece in pieces if isinstance(piece.data, Span) and is_url(piece.data.path)})
    if not urls:
        return {}
    from ckpttool.io.remote.read import there

    return {url: [found.size, *found.version] for url, found in zip(urls, map(there, urls))}


_ENDING = ".ckpttool.job"


def staging_name(name: str, plan: str, more: str = "") -> str:
    """Return the name of what the ranks share while they make the output `name`: a folder, or an object."""
    return f".{_short(name)}.{plan[:16]}{more}{_ENDING}"


def is_staging(found: str, name: str) -> bool:
    """Return True if it is the staging name of the output `name`, for any plan."""
    pattern = rf"\.{re.escape(_short(name))}\.[0-9a-f]{{16}}(-[0-9a-f]+)?{re.escape(_ENDING)}"
    return re.fullmatch(pattern, found) is not None


def _short(name: str) -> str:
    return name.encode(errors="surrogateescape")[:100].decode(errors="ignore")


def write_all(
    job: Job, items: Sequence[Item], write: Callable[[int], Record], known: Mapping[int, Record], *, verify: bool
) -> dict[int, Record]:
    """Let the ranks write the items; return the records of all, on the first rank only: the others end here.

    `known` items are there already; to `verify` them they are given to `write` too. Raises what `write` raises,
    `FailedElsewhere`, and `CkptError` if an item is missing.
    """
    early = {number: item.nbytes for number, item in enumerate(items) if not item.late}
    done = job.share("item", {n: size for n, size in early.items() if verify or n not in known}, write)
    job.tell(f"done/{job.rank}", done)
    told = [record for records in job.heard_of_all("done") for record in records] if job.is_first else []
    job.only_first()
    records = {**known, **{record["item"]: record for record in told}}
    missing = early.keys() - records.keys()
    if missing:
        raise CkptError(f"{len(missing)} parts were written by no rank", hint="this is a bug: report it")
    for number, record in records.items():
        for crc, value in zip(items[number].crcs, record["crcs"]):
            crc.value = value
    for number, item in enumerate(items):
        if item.late:
            records[number] = write(number)
    return records
