"""The ranks share work items, and write the files of one output on a file system that all of them see."""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from ckpttool.core.checkpoint import Span
from ckpttool.core.errors import CkptError, Problem
from ckpttool.core.values import dataclass
from ckpttool.distributed.job import Job
from ckpttool.io import progress, sources
from ckpttool.io.checksums import boundary
from ckpttool.io.files import size
from ckpttool.io.paths import is_url
from ckpttool.io.pieces import BLOCK, Crc, Files, Link, Piece, Pieces, Ready, digest_on_disk, nbytes_of
from ckpttool.io.syscalls import lock, sync_folder
from ckpttool.io.temporary import is_mine, remove
from ckpttool.io.write import NEW, Contents, WriteOptions, check_space, failing, fill

MOST = 1 << 28  # bytes of an item: what a rank that dies leaves half done is written again
COUNT = 64  # items of an output that is not large
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
        return self.data.length if isinstance(self.data, Span) else nbytes_of(self.data)

    @property
    def crcs(self) -> list[Crc]:
        """The checksums that are known once the item is written."""
        return [] if isinstance(self.data, Span) else [piece.crc for piece in self.data if piece.crc is not None]


def cut(pieces: Pieces, most: int) -> Iterator[Piece]:
    """Yield the pieces, long copies cut at blocks of the new file, or after a record whose CRC is compared."""
    at = 0
    for piece in pieces:
        span = piece.data
        if isinstance(span, Span) and piece.crc is None and span.length > most:
            start = 0
            while start < span.length:
                end = start + most - (at + start) % BLOCK
                end = min(boundary(span.path, span.offset + end) - span.offset, span.length)
                yield replace(piece, data=Span(span.path, span.offset + start, end - start))
                start = end
        else:
            yield piece
        at += piece.nbytes


def is_text(content: Pieces) -> bool:
    """Return True if all bytes of the file are literal: an index, an empty file. Only the first rank writes it."""
    return all(isinstance(piece.data, bytes) for piece in content)


def as_pieces(content: Pieces | Link) -> Pieces:
    """Return the file's pieces; a file that is used as it is, is copied."""
    return [Piece(Span(content.path, 0, size(content.path)))] if isinstance(content, Link) else content


def digest(files: Mapping[str, Pieces], *more: object) -> str:
    """Return the SHA-256 of everything that decides what is written: all layouts, the sources, and `more` (JSON)."""
    spans = [piece.data for pieces in files.values() for piece in pieces if isinstance(piece.data, Span)]
    urls = sorted({span.path for span in spans if is_url(span.path)})
    versions = {}
    if urls:
        from ckpttool.io.remote import there

        versions = {url: [found.size, *found.version] for url, found in zip(urls, map(there, urls))}
    found = hashlib.sha256(json.dumps([more, versions]).encode())
    for name, pieces in files.items():
        found.update(json.dumps(["file", name]).encode())
        for piece in pieces:
            data = piece.data
            if isinstance(data, bytes):
                text = ["bytes", hashlib.sha256(data).hexdigest()]
            elif isinstance(data, Span):
                text = ["span", data.path, str(data.offset), str(data.length)]
            else:
                text = ["computed", str(data.length)]
            found.update(json.dumps(text).encode())
    return found.hexdigest()


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


_LEAST = 1 << 20  # bytes of an item
_RECORDS = "written."  # and the rank's number


@contextmanager
def written(
    job: Job, files: Files, out: str, home: Path, plan: object, options: WriteOptions, *, verify: bool
) -> Iterator[Contents]:
    """Yield the files, those with tensors written by all ranks; `home` is the folder, on OUT's disk, to make them in.

    `plan` is what else decides the bytes, as JSON: without one, or without fsync, a later run cannot continue. To
    `verify` the items they are read back. The block, in which the files are moved into their places, runs on the first
    rank only. Raises `CkptError` if the ranks mean different outputs, if a source changes and if the disk fails; the
    items then stay for the next run.
    """
    contents = {name: as_pieces(content) for name, content in files.items()}
    items = items_of(contents)
    agreed = digest(contents, job.command, plan, sources.states())
    job.agree(agreed)
    again = options.fsync and plan is not None
    with failing(out), _begun(job, items, agreed, out, home, again) as (staging, known):
        with open(staging / f"{_RECORDS}{job.rank}", "a", encoding="utf-8") as notes:
            notes.write("\n")  # after a line that a rank that died may have half written
            writer = _Writer(items, staging, agreed, options.fsync, verify, known, notes)
            records = write_all(job, items, writer.write, known, verify=verify)
        read: dict[str, set[str]] = {item.name: set() for item in items}
        for number, record in records.items():
            read[items[number].name].update(record["read"])
        ready = {name: Ready(str(staging / NEW / name), tuple(sorted(paths))) for name, paths in read.items()}
        yield {**contents, **ready}
        remove(staging)


def items_of(files: Mapping[str, Pieces]) -> list[Item]:
    contents = {name: pieces for name, pieces in files.items() if not is_text(pieces)}
    total = sum(map(nbytes_of, contents.values()))
    most = min(MOST, max(_LEAST, total // COUNT // BLOCK * BLOCK))
    return [item for name, pieces in contents.items() for item in _items(name, pieces, most)]


def _items(name: str, pieces: Pieces, most: int) -> Iterator[Item]:
    """Cut a file into items of about `most` bytes; computed bytes stay together, and with their checksum."""
    own: list[Piece] = []
    crcs: set[int] = set()  # of these pieces
    begin = at = 0
    for piece in cut(pieces, most):
        late = any(id(crc) not in crcs for crc in piece.needs)
        if own and (late or (at - begin + piece.nbytes > most and not piece.needs)):
            yield Item(name, begin, own)
            own, crcs, begin = [], set(), at
        own.append(piece)
        crcs.add(id(piece.crc))
        at += piece.nbytes
        if late:
            yield Item(name, begin, own, late=True)
            own, crcs, begin = [], set(), at
    if own:
        yield Item(name, begin, own)


@contextmanager
def _begun(
    job: Job, items: Sequence[Item], plan: str, out: str, home: Path, again: bool
) -> Iterator[tuple[Path, dict[int, Record]]]:
    """Yield the staging folder, which the first rank makes and locks, and the records of the items in it."""
    if not job.is_first:
        staging, records = job.hear("begun")
        yield Path(staging), {int(number): record for number, record in records.items()}
        return
    name = os.path.basename(os.path.realpath(out))
    staging = home / staging_name(name, plan, "" if again else f"-{secrets.token_hex(4)}")
    for path in home.iterdir():  # of jobs that wrote something else to the same place
        if is_staging(path.name, name) and path != staging and is_mine(path.lstat()):
            with suppress(OSError), _locked(path) as is_left:
                if is_left:
                    remove(path)
    (staging / NEW).mkdir(mode=0o700, parents=True, exist_ok=True)
    with _locked(staging) as is_ours:
        if is_ours is False:
            raise CkptError(f"{out} is being written by another job", hint="wait until it has ended")
        sizes = {item.name: item.first + item.nbytes for item in items}
        known = _known(staging, items, plan, sizes)
        check_space(out, home, sum(item.nbytes for number, item in enumerate(items) if number not in known))
        for name, size in sizes.items():  # every file gets its length, so that each rank writes into its own ranges
            path = staging / NEW / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if _size(path) != size:
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
                try:
                    os.ftruncate(descriptor, size)
                finally:
                    os.close(descriptor)
        job.tell("begun", (str(staging), known))
        yield staging, known


@contextmanager
def _locked(folder: Path) -> Iterator[bool | None]:
    """Lock the folder until the block ends; False if another process has it, None on a file system without locks."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        yield lock(descriptor)
    finally:
        os.close(descriptor)


def _known(staging: Path, items: Sequence[Item], plan: str, sizes: Mapping[str, int]) -> dict[int, Record]:
    """Return the records of the items that an earlier run of the same plan has written; remove all others.

    Another record may be about a deleted file, and would be taken for its replacement.
    """
    complete = {name for name, size in sizes.items() if _size(staging / NEW / name) == size}
    known: dict[int, Record] = {}
    for path in sorted(staging.glob(f"{_RECORDS}*")):
        for line in path.read_text().splitlines():
            with suppress(ValueError, KeyError, IndexError, TypeError):  # the last line of a rank that died
                record = json.loads(line)
                item = items[record["item"]]
                if record["plan"] == plan and record["file"] == item.name and item.name in complete:
                    known[record["item"]] = record
        path.unlink()
    sync_folder(staging)
    (staging / f"{_RECORDS}before").write_text("".join(json.dumps(record) + "\n" for record in known.values()))
    return known


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return -1


@dataclass(slots=True)
class _Writer:
    """Write items of this rank, and note which are on the disk."""

    items: Sequence[Item]
    staging: Path
    plan: str
    fsync: bool
    verify: bool
    known: Mapping[int, Record]
    notes: TextIO

    def write(self, number: int) -> Record:
        """Return the record of the item, which is written unless it is there. Raises OSError and `CkptError`."""
        known, item = self.known.get(number), self.items[number]
        if known is not None and self._holds(item, known["blake2b"]):
            progress.advance(item.nbytes)
            return known
        record = self._write(number)
        self.notes.write(json.dumps(record) + "\n")
        self.notes.flush()
        return record

    def _write(self, number: int) -> Record:
        item = self.items[number]
        assert not isinstance(item.data, Span)
        found = hashlib.blake2b() if self.verify else None
        descriptor = os.open(self.staging / NEW / item.name, os.O_RDWR | getattr(os, "O_CLOEXEC", 0))
        try:
            fill(descriptor, item.data, found, item.first, flush=self.fsync)
            read = sources.streamed()
            if self.fsync:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        record: Record = {"item": number, "plan": self.plan, "file": item.name, "read": read}
        record |= {"offset": item.first, "size": item.nbytes}
        record |= {"blake2b": None if found is None else found.hexdigest(), "crcs": [crc.value for crc in item.crcs]}
        if found is not None and not self._holds(item, record["blake2b"]):
            raise CkptError(
                "what was written is not what the disk holds",
                hint="check the disk",
                problems=[Problem("other bytes on the disk than were written", f"{item.name}, byte {item.first:,}")],
            )
        return record

    def _holds(self, item: Item, digest: str | None) -> bool:
        path = str(self.staging / NEW / item.name)
        return digest is not None and digest_on_disk(path, item.first, item.nbytes).hex() == digest
