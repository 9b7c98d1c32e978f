"""The ranks write the files of one output, on a file system that all of them see."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from ckpttool.core.checkpoint import Span
from ckpttool.core.errors import CkptError, Problem
from ckpttool.core.values import dataclass
from ckpttool.distributed.items import (
    COUNT,
    MOST,
    Item,
    Record,
    as_pieces,
    cut,
    digest,
    is_staging,
    is_text,
    staging_name,
    write_all,
)
from ckpttool.distributed.job import Job
from ckpttool.io import progress, sources
from ckpttool.io.fill import check_space, failing, fill
from ckpttool.io.pieces import BLOCK, Files, Link, Piece, Pieces, Ready, nbytes_of
from ckpttool.io.ranges import digest_on_disk
from ckpttool.io.syscalls import lock, sync_folder
from ckpttool.io.temporary import is_mine, remove
from ckpttool.io.write import NEW, Contents, WriteOptions

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
    if options.link == "copy":
        files = {name: as_pieces(content) for name, content in files.items()}
    items = items_of(files)
    agreed = digest(files, job.command, plan, sources.states())
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
        yield {**files, **ready}
        remove(staging)


def items_of(files: Files) -> list[Item]:
    """Cut the files into items; files without tensors are left to the first rank."""
    contents = {name: content for name, content in files.items() if not isinstance(content, Link)}
    contents = {name: content for name, content in contents.items() if not is_text(content)}
    total = sum(nbytes_of(content) for content in contents.values())
    most = min(MOST, max(_LEAST, total // COUNT // BLOCK * BLOCK))
    return [item for name, content in contents.items() for item in _items(name, content, most)]


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
        """Return True if the disk holds the item with that digest."""
        path = str(self.staging / NEW / item.name)
        return digest is not None and digest_on_disk(path, item.first, item.nbytes).hex() == digest
