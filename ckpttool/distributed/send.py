"""The ranks send the parts of objects to one S3 store; the first rank completes the objects, the last one last.

Each object is a multipart upload that the first rank begins, and nothing of it is seen before it is complete. A small
object beside OUT, ``.OUT.DIGEST.ckpttool.job``, names the uploads, so that the same command on the same sources goes
on: which parts are there the store says.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from ckpttool.core.checkpoint import Span
from ckpttool.core.errors import CkptError
from ckpttool.core.values import dataclass
from ckpttool.distributed.job import Job
from ckpttool.distributed.make import as_pieces, digest, is_staging, is_text, parts, staging_name, versions
from ckpttool.io import compose, paths, progress, sources
from ckpttool.io.compose import Upload
from ckpttool.io.files import sources_stay
from ckpttool.io.interrupts import uninterrupted
from ckpttool.io.pieces import BLOCK, Crc, Files, Held, Link, Piece, Pieces, amounts, nbytes_of
from ckpttool.io.remote.errors import answered
from ckpttool.io.remote.read import filesystem

_MOST, _COUNT = 1 << 28, 64  # bytes that a rank sends at a time, where they are many; shares of an output of few


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank sends, or has copied: parts of the object `name` from number `first` on, of which `total` are sent.

    Where it is `late` it says checksums of other shares.
    """

    name: str
    first: int
    run: Pieces | Span
    total: int
    late: bool = False

    @property
    def sizes(self) -> list[int]:
        """Bytes of each part."""
        return [self.run.length] if isinstance(self.run, Span) else compose.lengths(nbytes_of(self.run), self.total)

    @property
    def crcs(self) -> list[Crc]:
        """The checksums that are known once it is sent."""
        return [] if isinstance(self.run, Span) else [piece.crc for piece in self.run if piece.crc is not None]

    def parts(self) -> Iterator[bytes | Span]:
        """The parts in order. Raises `CkptError` where a source cannot be read."""
        return iter([self.run]) if isinstance(self.run, Span) else compose.sent(self.run, self.total)


def can(out: str) -> bool:
    """Whether several processes can send parts of one object to the URL's store."""
    return hasattr(filesystem(out)[0], "call_s3")


@contextmanager
def sent(
    job: Job, files: Files, urls: Mapping[str, str], out: str, plan: object, *, verify: bool = False
) -> Iterator[dict[str, Pieces | Link | Upload]]:
    """The files of the folder `out`, those that hold tensors as uploads to their URLs with all parts there.

    The block, in which they are completed, runs on the first rank only. Without a `plan` no later run may go on. To
    `verify` them each rank reckons the MD5 of its parts, also of those that are there. Raises `CkptError` where the
    ranks do not mean the same, where a source changes and where the store refuses: the uploads are then gone. What a
    signal ends is there for the next run.
    """
    held = {name: as_pieces(content) for name, content in files.items()}
    shares = [
        share for name, pieces in held.items() if not is_text(pieces) for share in _shares(name, pieces, urls[name])
    ]
    agreed = digest(held, job.command, plan, sources.states(), versions(held))
    job.agree(agreed)
    if not job.is_first:
        uploads, known = job.hear("begun")
        begun = {name: Upload(urls[name], place, verify) for name, place in uploads.items()}
        job.tell(f"sent/{job.rank}", _Task(job, shares, begun, known).run())
        job.only_first()
    record = None if plan is None else _Record.of(out, list(files)[-1], agreed)
    with _begun(job, urls, {share.name for share in shares}, record, verify) as begun:
        known = _known(shares, begun)
        job.tell("begun", ({name: dict(upload.place) for name, upload in begun.items()}, known))
        task = _Task(job, shares, begun, known)
        job.tell("sent/0", task.run())
        told = [one for some in job.heard_of_all("sent") for one in some]
        job.only_first()
        task.finish(told)
        yield {**{name: content for name, content in files.items() if name not in begun}, **begun}


def note(held: Held, files: Files, made: Mapping[str, Pieces | Link | Upload]) -> None:
    """Notes which of the files, whose uploads are completed, the store's checksums prove."""
    for name, upload in made.items():
        pieces = as_pieces(files[name])
        if isinstance(upload, Upload) and upload.is_proved(nbytes_of(pieces)):
            held.note(upload.url, pieces)


def _shares(name: str, pieces: Pieces, out: str) -> Iterator[Share]:
    """The object in shares of at least as many bytes as a part has to have, but for the last."""
    made = compose.plan(pieces, out)
    runs: Sequence[Pieces | Span] = [pieces] if made is None else made.runs
    total = 2 * sum(nbytes_of(run) for run in runs if not isinstance(run, Span))  # each share may end in a short part
    first = 1
    for run in runs:
        for own in compose.copied(run) if isinstance(run, Span) else _groups(run, total):
            share = Share(name, first, own, total, _is_late(own))
            yield share
            first += len(share.sizes)


def _groups(pieces: Pieces, total: int) -> list[Pieces]:
    most = max(compose.LEAST, min(_MOST, total // _COUNT // BLOCK * BLOCK), -(-total // compose.MOST_PARTS))
    groups: list[list[Piece]] = [[]]
    for piece in parts(pieces, most):
        if groups[-1] and nbytes_of(groups[-1]) >= most:
            groups.append([])
        groups[-1].append(piece)
    if len(groups) > 1 and nbytes_of(groups[-1]) < compose.LEAST:
        groups[-2:] = [groups[-2] + groups[-1]]
    return list(groups)


def _is_late(run: Pieces | Span) -> bool:
    if isinstance(run, Span):
        return False
    own = {id(piece.crc) for piece in run}
    return any(id(crc) not in own for piece in run for crc in piece.needs)


@dataclass(frozen=True, slots=True)
class _Record:
    """The small object at `url` that names the uploads of one plan for an OUT that ends with the file `last`."""

    url: str
    last: str

    @classmethod
    def of(cls, folder: str, last: str, plan: str) -> _Record:
        return cls(paths.join(folder, staging_name(last, plan)), last)

    def read(self, url: str) -> dict[str, dict[str, str]]:
        """The places of the uploads; none where there is no such record, or it is none."""
        fs, path = filesystem(url)
        with suppress(ValueError, FileNotFoundError, AttributeError):
            return {str(name): dict(place) for name, place in json.loads(fs.cat_file(path)).items()}
        return {}

    def write(self, begun: Mapping[str, Upload]) -> None:
        fs, path = filesystem(self.url)
        fs.pipe_file(path, json.dumps({name: dict(upload.place) for name, upload in begun.items()}).encode())

    def others(self) -> list[str]:
        """The records of other plans for the same OUT, which are never gone on with."""
        fs, folder = filesystem(paths.parent(self.url))
        fs.invalidate_cache(folder)
        try:
            names = [str(found).rpartition("/")[2] for found in fs.ls(folder, detail=False)]
        except FileNotFoundError:
            return []
        ours = [name for name in names if is_staging(name, self.last)]
        return [url for name in ours if (url := paths.join(paths.parent(self.url), name)) != self.url]

    def remove(self, url: str) -> None:
        fs, path = filesystem(url)
        with suppress(Exception):
            fs.rm_file(path)


@contextmanager
def _begun(
    job: Job, urls: Mapping[str, str], names: set[str], record: _Record | None, verify: bool
) -> Iterator[dict[str, Upload]]:
    """The uploads, those of a run that was killed among them; gone where the block raises, but for a signal."""
    begun: dict[str, Upload] = {}
    try:
        with answered(next(iter(urls.values()))):
            places = {} if record is None else _gone_on(record, urls)
            for name in sorted(names):
                there = Upload(urls[name], places[name], verify) if name in places else None
                begun[name] = there or compose.begin(urls[name], verify=verify)
            if record is not None:
                record.write(begun)
        yield begun
    except KeyboardInterrupt:
        if record is None:
            _abort(begun, None)
        raise
    except BaseException:
        job.fail()  # first: what another rank is just sending is refused from now on
        _abort(begun, record)
        raise
    if record is not None:
        record.remove(record.url)


def _gone_on(record: _Record, urls: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """The uploads of this plan that are there still; all others that were begun for the same OUT end here."""
    there: dict[str, dict[str, str]] = {}
    for url in (record.url, *record.others()):
        for name, place in record.read(url).items():
            upload = Upload(url, place)
            if url != record.url or name not in urls or place["Key"] != _key(urls[name]):
                upload.abort()
                continue
            with suppress(CkptError):  # of an object that was completed there is none
                upload.there()
                there[name] = place
        if url != record.url:
            record.remove(url)
    return there


def _key(url: str) -> str:
    fs, path = filesystem(url)
    return str(fs.split_path(path)[1])


def _abort(begun: Mapping[str, Upload], record: _Record | None) -> None:
    with uninterrupted(insisting=True):
        for upload in begun.values():
            upload.abort()
        if record is not None:
            record.remove(record.url)


def _known(shares: Sequence[Share], begun: Mapping[str, Upload]) -> dict[str, list[dict[str, Any]]]:
    """By the number of the share what the store said of its parts, where all are there and no other share waits."""
    there = {name: upload.there() for name, upload in begun.items()}
    found = {}
    for number, share in enumerate(shares):
        have = [(at, there[share.name].get(at, (-1, ""))) for at in range(share.first, share.first + len(share.sizes))]
        if [size for _, (size, _) in have] == share.sizes and not (share.late or share.crcs):
            found[str(number)] = [{"PartNumber": at, "ETag": tag} for at, (_, tag) in have]
    return found


Told = tuple[int, list[dict[str, Any]], list[int]]  # of a share: its number, its parts, its checksums


@dataclass(slots=True)
class _Task:
    """What one rank does: it takes the next share that nobody has taken, and sends it."""

    job: Job
    shares: Sequence[Share]
    uploads: Mapping[str, Upload]
    known: Mapping[str, list[dict[str, Any]]]

    def run(self) -> list[Told]:
        """What the store said of each share that this rank sent. Raises `CkptError`, `FailedElsewhere`."""
        early = [number for number, share in enumerate(self.shares) if not share.late and not self._is_done(number)]
        todo = sorted(early, key=lambda number: -sum(self.shares[number].sizes))
        done: list[Told] = []
        told = 0
        while (at := self.job.next("share")) < len(todo):
            self.job.check()
            progress.advance(sum(sum(self.shares[number].sizes) for number in todo[told:at]))  # sent by others
            told = at + 1
            try:
                done.append(self._send(todo[at]))
            except CkptError:
                self.job.check()  # where another rank has failed, the upload is gone
                raise
        return done

    def _is_done(self, number: int) -> bool:
        """Whether nobody has to look at the share: its parts are there, and are not to be verified."""
        return str(number) in self.known and not self.uploads[self.shares[number].name].verify

    def _send(self, number: int) -> Told:
        share = self.shares[number]
        upload = self.uploads[share.name]
        there = {part["PartNumber"]: part for part in self.known.get(str(number), ())}
        with answered(upload.url), sources_stay():
            parts = enumerate(share.parts(), share.first)
            said = [upload.put(at, part, there.get(at)) for at, part in parts]
        progress.has_written(sum(share.sizes))
        progress.has_made(*((share.run.length, 0) if isinstance(share.run, Span) else amounts(share.run)))
        return number, said, [crc.value for crc in share.crcs]

    def finish(self, told: Sequence[Told]) -> None:
        """Sends the late shares, once all others are there. Raises `CkptError` where one is missing."""
        said = {int(number): list(own) for number, own in self.known.items()}
        for number, own, values in told:
            said[number] = own
            for crc, value in zip(self.shares[number].crcs, values):
                crc.value = value
        for number, share in enumerate(self.shares):
            if share.late:
                said[number] = self._send(number)[1]
        missing = len(self.shares) - len(said)
        if missing:
            raise CkptError(f"{missing} parts were sent by no rank", hint="this is a bug: report it")
        for number, own in said.items():
            self.uploads[self.shares[number].name].parts.extend(own)
