"""The ranks send the objects of one output to a store that takes the parts of an object from several processes.

Each object is a multipart upload that the first rank begins, and nothing is visible before it is complete. A small
object next to OUT, ``.OUT.DIGEST.ckpttool.job``, names the uploads, so that the same command on the same sources can
continue: the store says which parts it has.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from ckpttool.core.checkpoint import Span
from ckpttool.core.errors import CkptError
from ckpttool.core.values import dataclass
from ckpttool.distributed.files import (
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
from ckpttool.io import compose, paths, progress, sources
from ckpttool.io.compose import Upload
from ckpttool.io.files import sources_stay
from ckpttool.io.pieces import BLOCK, Files, Held, Link, Piece, Pieces, amounts, nbytes_of
from ckpttool.io.remote import answered, filesystem, remove
from ckpttool.io.syscalls import uninterrupted


def can(out: str) -> bool:
    return hasattr(filesystem(out)[0], "call_s3")


@contextmanager
def sent(
    job: Job, files: Files, urls: Mapping[str, str], out: str, plan: object, *, verify: bool = False
) -> Iterator[dict[str, Pieces | Link | Upload]]:
    """Yield the files of the folder `out`, those with tensors as uploads to their URLs that have all parts.

    The block, in which they are completed, runs on the first rank only. Without a `plan` no later run can continue. To
    `verify` them, each rank computes the MD5 of its parts, also of parts that are there. Raises `CkptError` if the
    ranks mean different outputs, if a source changes and if the store refuses: the uploads are then aborted. If a
    signal ends this, the next run continues.
    """
    contents = {name: as_pieces(content) for name, content in files.items()}
    items = [
        item for name, pieces in contents.items() if not is_text(pieces) for item in _items(name, pieces, urls[name])
    ]
    agreed = digest(contents, job.command, plan, sources.states())
    job.agree(agreed)
    if not job.is_first:
        uploads, told = job.hear("begun")
        begun = {name: Upload(urls[name], place, verify) for name, place in uploads.items()}
        known = {int(number): record for number, record in told.items()}
        write_all(job, items, _Sender(job, items, begun, known).write, known, verify=verify)
    note = None if plan is None else _Note(paths.join(out, staging_name(list(files)[-1], agreed)), list(files)[-1])
    with _begun(job, urls, {item.name for item in items}, note, verify) as begun:
        known = _known(items, begun)
        job.tell("begun", ({name: dict(upload.place) for name, upload in begun.items()}, known))
        records = write_all(job, items, _Sender(job, items, begun, known).write, known, verify=verify)
        for number, record in records.items():
            begun[items[number].name].parts.extend(record["parts"])
        yield {**{name: content for name, content in files.items() if name not in begun}, **begun}


def note(held: Held, files: Files, contents: Mapping[str, Pieces | Link | Upload]) -> None:
    """Note which of the files, whose uploads are complete, the store's checksums prove."""
    for name, upload in contents.items():
        pieces = as_pieces(files[name])
        if isinstance(upload, Upload) and upload.is_proved(nbytes_of(pieces)):
            held.note(upload.url, pieces)


def _items(name: str, pieces: Pieces, out: str) -> Iterator[Item]:
    """Cut the object into items of at least as many bytes as a part must have, but for the last."""
    made = compose.plan(pieces, out)
    runs: Sequence[Pieces | Span] = [pieces] if made is None else made.runs
    total = 2 * sum(nbytes_of(run) for run in runs if not isinstance(run, Span))  # an item may end in a short part
    most = max(compose.LEAST, min(MOST, total // COUNT // BLOCK * BLOCK), -(-total // compose.MOST_PARTS))
    first = 1
    for run in runs:
        if isinstance(run, Span):
            for span in compose.copied(run):
                yield Item(name, first, span, sizes=(span.length,))
                first += 1
            continue
        groups: list[list[Piece]] = [[]]
        for piece in cut(run, most):
            if groups[-1] and nbytes_of(groups[-1]) >= most:
                groups.append([])
            groups[-1].append(piece)
        if len(groups) > 1 and nbytes_of(groups[-1]) < compose.LEAST:
            groups[-2:] = [groups[-2] + groups[-1]]
        for group in groups:
            crcs = {id(piece.crc) for piece in group}
            late = any(id(crc) not in crcs for piece in group for crc in piece.needs)
            sizes = tuple(compose.lengths(nbytes_of(group), total))
            yield Item(name, first, group, late, sizes)
            first += len(sizes)


@dataclass(frozen=True, slots=True)
class _Note:
    """The small object at `url` that names the uploads of one plan for an OUT that ends with the file `last`."""

    url: str
    last: str

    def read(self, url: str) -> dict[str, dict[str, str]]:
        """Return the places of the uploads; none if there is no such object, or if it is damaged."""
        fs, path = filesystem(url)
        with suppress(ValueError, FileNotFoundError, AttributeError):
            return {str(name): dict(place) for name, place in json.loads(fs.cat_file(path)).items()}
        return {}

    def others(self) -> list[str]:
        """Return the notes of other plans for the same OUT, which are never continued."""
        home = paths.parent(self.url)
        fs, folder = filesystem(home)
        fs.invalidate_cache(folder)
        try:
            names = [str(found).rpartition("/")[2] for found in fs.ls(folder, detail=False)]
        except FileNotFoundError:
            return []
        urls = [paths.join(home, name) for name in names if is_staging(name, self.last)]
        return [url for url in urls if url != self.url]


@contextmanager
def _begun(
    job: Job, urls: Mapping[str, str], names: set[str], note: _Note | None, verify: bool
) -> Iterator[dict[str, Upload]]:
    """Yield the uploads, also of a run that was killed; aborted if the block raises, but not by a signal."""
    begun: dict[str, Upload] = {}
    try:
        with answered(next(iter(urls.values()))):
            places = {} if note is None else _continued(note, urls)
            for name in sorted(names):
                there = Upload(urls[name], places[name], verify) if name in places else None
                begun[name] = there or compose.begin(urls[name], verify=verify)
            if note is not None:
                fs, path = filesystem(note.url)
                fs.pipe_file(path, json.dumps({name: dict(upload.place) for name, upload in begun.items()}).encode())
        yield begun
    except KeyboardInterrupt:
        if note is None:
            _abort(begun)
        raise
    except BaseException:
        job.fail()  # first: another rank that is just sending is refused from now on
        _abort(begun)
        if note is not None:
            remove(note.url)
        raise
    if note is not None:
        remove(note.url)


def _abort(begun: Mapping[str, Upload]) -> None:
    with uninterrupted(insisting=True):
        for upload in begun.values():
            upload.abort()


def _continued(note: _Note, urls: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Return the uploads of this plan that still exist; abort all others that were begun for the same OUT."""
    there: dict[str, dict[str, str]] = {}
    for url in (note.url, *note.others()):
        for name, place in note.read(url).items():
            upload = Upload(url, place)
            fs, path = filesystem(urls.get(name, url))
            if url != note.url or name not in urls or place["Key"] != str(fs.split_path(path)[1]):
                upload.abort()
                continue
            with suppress(CkptError):  # an object that was completed has no upload
                upload.there()
                there[name] = place
        if url != note.url:
            remove(url)
    return there


def _known(items: Sequence[Item], begun: Mapping[str, Upload]) -> dict[int, Record]:
    """Return the records of the items whose parts the store has, if no other item needs their checksums."""
    there = {name: upload.there() for name, upload in begun.items()}
    known: dict[int, Record] = {}
    for number, item in enumerate(items):
        parts = [(at, *there[item.name].get(at, (-1, ""))) for at in range(item.first, item.first + len(item.sizes))]
        if [size for _, size, _ in parts] == [*item.sizes] and not (item.late or item.crcs):
            own = [{"PartNumber": at, "ETag": tag} for at, _, tag in parts]
            known[number] = {"item": number, "crcs": [], "parts": own}
    return known


@dataclass(slots=True)
class _Sender:
    job: Job
    items: Sequence[Item]
    uploads: Mapping[str, Upload]
    known: Mapping[int, Record]

    def write(self, number: int) -> Record:
        """Send the item, or have it copied, and return what the store says. Raises `CkptError`."""
        try:
            return self._send(number)
        except CkptError:
            self.job.check()  # if another rank has failed, the upload was aborted
            raise

    def _send(self, number: int) -> Record:
        item = self.items[number]
        upload = self.uploads[item.name]
        known = self.known.get(number, {"parts": ()})
        there: dict[int, Any] = {part["PartNumber"]: part for part in known["parts"]}
        parts: Iterator[Span | bytes]
        if isinstance(item.data, Span):
            parts, made = iter([item.data]), (item.nbytes, 0)
        else:
            parts, made = compose.sent(item.data, item.sizes), amounts(item.data)
        with answered(upload.url), sources_stay():
            said = [upload.put(at, part, there.get(at)) for at, part in enumerate(parts, item.first)]
        progress.has_written(item.nbytes)
        progress.has_made(*made)
        return {"item": number, "crcs": [crc.value for crc in item.crcs], "parts": said}
