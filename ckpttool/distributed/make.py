"""The ranks write the files of one output together."""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import field, replace
from pathlib import Path
from typing import Any

from ckpttool.core.checkpoint import Span
from ckpttool.core.errors import CkptError, Problem
from ckpttool.core.values import dataclass
from ckpttool.distributed.job import Job
from ckpttool.io import progress, sources
from ckpttool.io.files import size
from ckpttool.io.fill import check_space, failing, fill
from ckpttool.io.paths import is_url
from ckpttool.io.pieces import BLOCK, Crc, Files, Link, Piece, Pieces, Ready, nbytes_of
from ckpttool.io.ranges import digest_on_disk
from ckpttool.io.syscalls import sync_folder
from ckpttool.io.temporary import is_mine, remove
from ckpttool.io.write import NEW

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


def staging_name(name: str, plan: str, more: str = "") -> str:
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


_RECORDS = "written."  # and the rank's number


@dataclass(frozen=True, slots=True)
class Asked:
    """How the output is made. `plan` is what else decides its bytes, as JSON has it; `again`: a later run may go on.

    `verify` reads back what was written.
    """

    plan: object = None
    link: str = "copy"
    fsync: bool = True
    verify: bool = False
    again: bool = True


Record = dict[str, Any]  # of a unit: its file, offset, size, digest or None, checksums, what it was read from


@contextmanager
def made(job: Job, files: Files, out: str, home: Path, asked: Asked) -> Iterator[Mapping[str, Pieces | Link | Ready]]:
    """The files, with those that hold tensors made by all ranks; `home` is the folder, on OUT's disk, to make them in.

    The block, in which they are moved into their places, runs on the first rank only: the others have then done their
    part. Raises `CkptError` where the ranks do not mean the same, where a source changes and where the disk fails; what
    is on the disk then stays for the next run, and is gone where all went well.
    """
    if asked.link == "copy":
        files = {name: as_pieces(content) for name, content in files.items()}
    units = cut(files)
    plan = digest(files, job.command, asked.plan, sources.states(), versions(files))
    job.agree(plan)
    with failing(out), _begun(job, units, plan, out, home, asked) as (staging, known):
        task = _Task(job, units, staging, plan, asked, known)
        job.tell(f"made/{job.rank}", task.run())
        everything = [record for records in job.heard_of_all("made") for record in records] if job.is_first else []
        job.only_first()
        task.finish([*known.values(), *everything])
        yield {**files, **task.ready()}
        remove(staging)


@contextmanager
def _begun(
    job: Job, units: Sequence[Unit], plan: str, out: str, home: Path, asked: Asked
) -> Iterator[tuple[Path, dict[int, Record]]]:
    """The staging folder, and what is in it already: the first rank makes and locks it. Raises `CkptError`."""
    if not job.is_first:
        staging, known = job.hear("begun")
        yield Path(staging), {int(number): record for number, record in known.items()}
        return
    name = os.path.basename(os.path.realpath(out))
    staging = home / staging_name(name, plan, "" if asked.again else f"-{secrets.token_hex(4)}")
    _remove_others(home, name, staging)
    (staging / NEW).mkdir(mode=0o700, parents=True, exist_ok=True)
    with _locked(staging) as is_ours:
        if is_ours is False:
            raise CkptError(f"{out} is being written by another job", hint="wait until it has ended")
        known = _known(staging, units, plan)
        _note_anew(staging, known)
        check_space(out, home, sum(unit.nbytes for number, unit in enumerate(units) if number not in known))
        _allocate(staging / NEW, units)
        job.tell("begun", (str(staging), known))
        yield staging, known


@contextmanager
def _locked(folder: Path) -> Iterator[bool | None]:
    """Whether this process has the folder locked, until the block ends; None on a file system without locks."""
    descriptor = os.open(folder, os.O_RDONLY)
    is_ours: bool | None = True
    try:
        try:
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            is_ours = False
        except (ImportError, OSError):
            is_ours = None
        yield is_ours
    finally:
        os.close(descriptor)


def _remove_others(home: Path, name: str, own: Path) -> None:
    """Removes what jobs that wrote something else to the same place left behind."""
    for path in home.iterdir():
        if is_staging(path.name, name) and path != own and is_mine(path.lstat()):
            with suppress(OSError), _locked(path) as is_left:
                if is_left:
                    remove(path)


def _known(staging: Path, units: Sequence[Unit], plan: str) -> dict[int, Record]:
    """The records, by number, of the units that an earlier run of the same plan has brought to the disk."""
    sizes = _sizes(units)
    whole = {name for name, count in sizes.items() if _size(staging / NEW / name) == count}
    found: dict[int, Record] = {}
    for path in sorted(staging.glob(f"{_RECORDS}*")):
        for line in path.read_text().splitlines():
            with suppress(ValueError, KeyError, IndexError, TypeError):  # the last line of a rank that died
                record = json.loads(line)
                unit = units[record["unit"]]
                if record["plan"] == plan and record["file"] == unit.name and unit.name in whole:
                    found[record["unit"]] = record
    return found


def _note_anew(staging: Path, known: Mapping[int, Record]) -> None:
    """Leaves no other records than these: those of a file that is gone would be about the one that takes its place."""
    lines = "".join(json.dumps(record) + "\n" for record in known.values())
    for path in staging.glob(f"{_RECORDS}*"):
        path.unlink()
    sync_folder(staging)
    (staging / f"{_RECORDS}before").write_text(lines)


def _sizes(units: Sequence[Unit]) -> dict[str, int]:
    return {unit.name: unit.offset + unit.nbytes for unit in units}


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return -1


def _allocate(folder: Path, units: Sequence[Unit]) -> None:
    """Makes every file as long as it will be, so that each rank writes into its own ranges. Raises OSError."""
    for name, count in _sizes(units).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if _size(path) != count:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
            try:
                os.ftruncate(descriptor, count)
            finally:
                os.close(descriptor)


@dataclass(slots=True)
class _Task:
    """What one rank does: it takes the next unit that nobody has taken, writes it, and notes that it is on the disk."""

    job: Job
    units: Sequence[Unit]
    staging: Path
    plan: str
    asked: Asked
    known: dict[int, Record]
    read: dict[str, set[str]] = field(default_factory=dict)

    def run(self) -> list[Record]:
        """The records of the units that this rank wrote. Raises OSError, `CkptError`, `FailedElsewhere`."""
        early = [number for number, unit in enumerate(self.units) if not unit.late]
        todo = sorted(
            (n for n in early if n not in self.known or self.asked.verify), key=lambda n: -self.units[n].nbytes
        )
        records: list[Record] = []
        told = 0
        with open(self.staging / f"{_RECORDS}{self.job.rank}", "a", encoding="utf-8") as list_of_mine:
            list_of_mine.write("\n")  # behind what a rank that died may have half written
            while (at := self.job.next("unit")) < len(todo):
                self.job.check()
                number = todo[at]
                wanted = self.known[number]["blake2b"] if number in self.known else None
                if wanted is not None and self._holds(number, wanted):
                    continue
                progress.advance(sum(self.units[n].nbytes for n in todo[told:at]))  # taken by others, or done
                told = at + 1
                records.append(self._write(number))
                list_of_mine.write(json.dumps(records[-1]) + "\n")
                list_of_mine.flush()
        return records

    def _write(self, number: int) -> Record:
        unit = self.units[number]
        found = hashlib.blake2b() if self.asked.verify else None
        descriptor = os.open(self.staging / NEW / unit.name, os.O_RDWR | getattr(os, "O_CLOEXEC", 0))
        try:
            fill(descriptor, unit.pieces, found, unit.offset, flush=self.asked.fsync)
            read = sources.streamed()
            if self.asked.fsync:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        record: Record = {"unit": number, "plan": self.plan, "file": unit.name, "offset": unit.offset}
        record |= {"size": unit.nbytes, "blake2b": found.hexdigest() if found is not None else None}
        record |= {"crcs": [crc.value for crc in unit.crcs], "read": read}
        if not self._holds(number, record["blake2b"]):
            raise CkptError(
                "what was written is not what the disk holds",
                hint="check the disk",
                problems=[Problem("other bytes on the disk than were written", f"{unit.name}, byte {unit.offset:,}")],
            )
        return record

    def _holds(self, number: int, wanted: str | None) -> bool:
        """Whether the disk holds the unit with that digest; taken for granted without one."""
        unit = self.units[number]
        path = str(self.staging / NEW / unit.name)
        return wanted is None or digest_on_disk(path, unit.offset, unit.nbytes).hex() == wanted

    def finish(self, records: Sequence[Record]) -> None:
        """Writes the late units, once all others are there. Raises `CkptError` where one is missing."""
        by_number = {record["unit"]: record for record in records}
        late = {number for number, unit in enumerate(self.units) if unit.late}
        missing = set(range(len(self.units))) - late - set(by_number)
        if missing:
            raise CkptError(f"{len(missing)} parts were written by no rank", hint="this is a bug: report it")
        for number, record in by_number.items():
            for crc, value in zip(self.units[number].crcs, record["crcs"]):
                crc.value = value
            self.read.setdefault(record["file"], set()).update(record["read"])
        for number in sorted(late):
            self._write(number)

    def ready(self) -> dict[str, Ready]:
        """The files that are whole now."""
        new = self.staging / NEW
        read = {name: tuple(sorted(paths)) for name, paths in self.read.items()}
        return {name: Ready(str(new / name), read.get(name, ())) for name in _sizes(self.units)}
