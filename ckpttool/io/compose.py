"""Compose objects from parts: what the same store already has is copied inside the store."""

from __future__ import annotations

import hashlib
import logging
from base64 import b64decode
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import field
from inspect import signature
from itertools import pairwise
from typing import Any

from ckpttool.core.checkpoint import Span
from ckpttool.core.errors import CkptError
from ckpttool.core.values import dataclass
from ckpttool.io import progress
from ckpttool.io.files import size as size_of
from ckpttool.io.paths import is_url
from ckpttool.io.pieces import Piece, Pieces, nbytes_of, stream
from ckpttool.io.remote import Stat, answered, check_assumed, filesystem, forget, stat, there
from ckpttool.io.sources import note_streamed
from ckpttool.io.syscalls import uninterrupted

LEAST = 5 << 20  # bytes of any part but the last
_SENT = 1 << 24  # bytes of a part that is sent; about two are in memory
_COPIED = 1 << 29  # bytes of a part that is copied: the store takes 5 GiB, and works on several at a time
_AT_A_TIME = 8  # requests
_WORTH = 1 << 24  # bytes of a span that is copied: of less most would be sent anyway
MOST_PARTS, _MOST_RUNS = 9_000, 1_000  # a store takes 10,000 parts

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Plan:
    """The runs of an object in order: pieces to send, and spans of other objects that the store copies."""

    runs: Sequence[Pieces | Span]

    @property
    def copied(self) -> int:
        return sum(run.length for run in self.runs if isinstance(run, Span))

    @property
    def sent(self) -> int:
        return sum(piece.nbytes for run in self.runs if not isinstance(run, Span) for piece in run)

    def parts(self) -> Iterator[bytes | Span]:
        """Yield the parts of the upload in order. Raises `CkptError` if a source cannot be read."""
        for run in self.runs:
            if isinstance(run, Span):
                yield from copied(run)
            else:
                yield from sent(run, lengths(nbytes_of(run), self.sent, ends=run is self.runs[-1]))


def copied(span: Span) -> Iterator[Span]:
    count = -(-span.length // _COPIED)
    ends = [span.length * number // count for number in range(count + 1)]
    return (Span(span.path, span.offset + start, end - start) for start, end in pairwise(ends))


def lengths(nbytes: int, total: int, *, ends: bool = False) -> list[int]:
    """Return the bytes of each part of `nbytes` that are sent, of `total` for the whole object.

    The last part is longer if the rest is too short for a part. If the object `ends` here, the rest is a part however
    short it is: some stores require that no part is longer than those before it.
    """
    size = max(_SENT, -(-total // MOST_PARTS))
    count = max(1, -(-nbytes // size) if ends else (nbytes - LEAST) // size + 1)
    return [*[size] * (count - 1), nbytes - size * (count - 1)]


def sent(pieces: Pieces, sizes: Sequence[int]) -> Iterator[bytes]:
    remaining, part = iter(sizes), bytearray()
    size = next(remaining)
    for data in stream(pieces):
        part += data
        while len(part) > size:  # the last part is the rest
            yield bytes(part[:size])
            del part[:size]
            size = next(remaining)
    yield bytes(part)


def plan(pieces: Pieces, out: str) -> Plan | None:
    """Return how the object at the URL `out` is made of parts; None if its store joins none, or if one is enough.

    The pieces before a copied span are at least as long as a part must be: bytes of the span itself are sent too.
    """
    fs, _ = filesystem(out)
    if not hasattr(fs, "call_s3") or nbytes_of(pieces) <= LEAST:
        return None
    paths = {piece.data.path for piece in pieces if isinstance(piece.data, Span) and is_url(piece.data.path)}
    there = {path for path in paths if filesystem(path)[0] is fs}
    runs: list[Pieces | Span] = []
    waiting: list[Piece] = []  # for the next run
    count = 0  # bytes of these
    for piece in _joined(pieces):
        data = piece.data
        short = max(0, LEAST - count) if waiting else 0
        copies = isinstance(data, Span) and piece.crc is None and data.path in there
        if not isinstance(data, Span) or not copies or data.length - short < _WORTH:
            waiting.append(piece)
            count += piece.nbytes
            continue
        if waiting:
            runs.append([*waiting, *([Piece(Span(data.path, data.offset, short))] if short else [])])
            waiting, count = [], 0
        runs.append(Span(data.path, data.offset + short, data.length - short))
    if waiting:
        runs.append(waiting)
    return Plan(runs if len(runs) < _MOST_RUNS else [pieces])


def _joined(pieces: Pieces) -> Iterator[Piece]:
    last, *others = pieces
    for piece in others:
        a, b = last.data, piece.data
        plain = last.crc is None and piece.crc is None
        if (
            plain
            and isinstance(a, Span)
            and isinstance(b, Span)
            and (a.path, a.offset + a.length) == (b.path, b.offset)
        ):
            last = Piece(Span(a.path, a.offset, a.length + b.length))
        else:
            yield last
            last = piece
    yield last


def begin(out: str, *, verify: bool = False) -> Upload:
    """Begin an upload to the URL `out`; nothing is visible until it is completed. Raises `CkptError`."""
    fs, path = filesystem(out)
    bucket, key, _ = fs.split_path(path)
    with answered(out):
        number = fs.call_s3("create_multipart_upload", Bucket=bucket, Key=key)["UploadId"]
    return Upload(out, {"Bucket": bucket, "Key": key, "UploadId": number}, verify)


@contextmanager
def begun(out: str, *, replace: bool, verify: bool = False) -> Iterator[Upload]:
    """Yield an upload to the URL `out`, which is completed at the end, and aborted if the block raises.

    Without `replace` it is not completed if an object is there already. Raises `CkptError` if the store refuses.
    """
    upload = begin(out, verify=verify)
    try:
        with answered(out):
            yield upload
        upload.complete(replace=replace)
    except BaseException:
        upload.abort()
        raise


def is_exclusive(fs: Any) -> bool:
    """Return True if the store can refuse to replace an object.

    That is S3, if both the driver (s3fs 2024.12) and botocore (1.35) are new enough.
    """
    if not hasattr(fs, "call_s3") or "mode" not in signature(fs._pipe_file).parameters:
        return False
    asked = fs.s3.meta.service_model.operation_model("CompleteMultipartUpload").input_shape
    return "IfNoneMatch" in asked.members


def check_absent(url: str) -> None:
    forget(url)
    if stat(url) is not None:
        raise came_meanwhile(url)


def came_meanwhile(url: str) -> CkptError:
    return CkptError(
        f"{url} exists: another process has written it meanwhile",
        hint="pass --force to overwrite it, or name another place",
    )


@dataclass(frozen=True, slots=True)
class Upload:
    """A multipart upload to `url`; `place` is the store's name for it, `parts` what the store said about each part.

    To `verify` it, each part also has its expected ``MD5``; for `copied` parts, by number, it is computed last.
    """

    url: str
    place: Mapping[str, str]
    verify: bool = False
    parts: list[dict[str, Any]] = field(default_factory=list)
    copied: dict[int, Span] = field(default_factory=dict)

    @property
    def fs(self) -> Any:
        return filesystem(self.url)[0]

    def call(self, method: str, **arguments: Any) -> Any:
        return self.fs.call_s3(method, **self.place, **arguments)

    def complete(self, *, replace: bool) -> None:
        """Make the object; without `replace` only if there is none yet. Raises `CkptError`."""
        absent = {} if replace else {"IfNoneMatch": "*"}
        parts = [{"PartNumber": part["PartNumber"], "ETag": part["ETag"]} for part in self._in_order()]
        if not replace and not is_exclusive(self.fs):
            check_absent(self.url)
        with answered(self.url), uninterrupted(insisting=True):
            self.call("complete_multipart_upload", MultipartUpload={"Parts": parts}, **absent)
        forget(self.url)

    def is_proved(self, nbytes: int) -> bool:
        """Return True if the store's checksums prove that the completed object has the right parts.

        The tag of a part is the MD5 of its bytes, and the object's tag is the MD5 of these. Other tags, as of objects
        encrypted with the user's own keys, prove nothing. The source of copied parts is read for that. Raises
        `CkptError` if that fails, or if the store does not answer.
        """
        copied = {number: self._md5(span) for number, span in self.copied.items()}
        parts = [{"MD5": copied.get(part["PartNumber"]), **part} for part in self._in_order()]
        if any(part["ETag"].strip('"') != part["MD5"] for part in parts):
            return False
        whole = hashlib.md5(b"".join(bytes.fromhex(part["MD5"]) for part in parts), usedforsecurity=False)
        tag = f'"{whole.hexdigest()}-{len(parts)}"'
        return stat(self.url) == Stat(folder=False, size=nbytes, version=("ETag", tag))

    def _in_order(self) -> list[dict[str, Any]]:
        return sorted(self.parts, key=lambda part: int(part["PartNumber"]))

    def abort(self) -> None:
        """Let the store forget all parts, if it answers."""
        with uninterrupted(insisting=True), suppress(Exception):
            self.call("abort_multipart_upload")

    def there(self) -> dict[int, tuple[int, str]]:
        """Return bytes and ETag of each part that the store has, by number. Raises `CkptError`, also for no upload."""
        found, after, more = dict[int, tuple[int, str]](), 0, True
        with answered(self.url):
            while more:
                said = self.call("list_parts", PartNumberMarker=after)
                found |= {part["PartNumber"]: (part["Size"], part["ETag"]) for part in said.get("Parts", ())}
                after, more = said.get("NextPartNumberMarker", 0), said.get("IsTruncated", False)
        return found

    def fill(self, made: Plan) -> None:
        """Send the parts, or have them copied, several at a time."""
        with ThreadPoolExecutor(_AT_A_TIME) as pool:
            answers: list[Future[dict[str, Any]]] = []
            try:
                for number, part in enumerate(made.parts(), 1):
                    answer = pool.submit(self._put, number, part)
                    if isinstance(part, Span):
                        self.copied[number] = part
                        answers.append(answer)
                    else:  # waits, so that never many are in memory
                        self.parts.append({**answer.result(), "MD5": self._md5(part)})
                        progress.has_written(len(part))
                for answer in answers:
                    self.parts.append(answer.result())
                    progress.has_written(self.copied[self.parts[-1]["PartNumber"]].length)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        log.info("%s: %s bytes sent, %s copied by the store", self.place["Key"], f"{made.sent:,}", f"{made.copied:,}")

    def put(self, number: int, part: Span | bytes, there: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Send the part, or have it copied, and return what the store says about it.

        `there` is what it says about a part that it has: one with the same MD5 is not sent again.
        """
        md5 = self._md5(part)
        if there is None or there["ETag"].strip('"') != md5:
            there = self._put(number, part)
        return {**there, "MD5": md5}

    def _put(self, number: int, part: Span | bytes) -> dict[str, Any]:
        if isinstance(part, bytes):
            tag = self.call("upload_part", PartNumber=number, Body=part)["ETag"]
        else:
            tag = self.call("upload_part_copy", PartNumber=number, **self._range(part))["CopyPartResult"]["ETag"]
        return {"PartNumber": number, "ETag": tag}

    def _md5(self, part: Span | bytes) -> str | None:
        if not self.verify:
            return None
        found = hashlib.md5(usedforsecurity=False)
        for data in [part] if isinstance(part, bytes) else stream([Piece(part)]):
            found.update(data)
        return found.hexdigest()

    def _range(self, span: Span) -> dict[str, Any]:
        """Return the arguments that copy the span, of the version that was read only."""
        check_assumed(span.path)
        note_streamed(span.path)
        bucket, key, version = self.fs.split_path(filesystem(span.path)[1])
        return {
            "CopySource": {"Bucket": bucket, "Key": key, **({"VersionId": version} if version else {})},
            "CopySourceRange": f"bytes={span.offset}-{span.offset + span.length - 1}",
            "CopySourceIfMatch": there(span.path).version[1],
        }


_MOST = 1 << 26  # bytes around the range that are read for it


def is_copied(runs: Sequence[Pieces | Span], out: str) -> bool:
    """Return True if the CRCs of the store prove that the object `out` is these runs, one of them a range of another.

    Return False if that is not known: the store has no such CRCs, or ``awscrt``, which computes them, is not installed.
    Raises `CkptError` if the source cannot be read.
    """
    spans = [(number, run) for number, run in enumerate(runs) if isinstance(run, Span)]
    try:
        from awscrt.checksums import combine_crc64nvme as combined
    except ImportError:
        return False
    if len(spans) != 1:
        return False
    number, span = spans[0]
    sent = [[] if isinstance(run, Span) else run for run in runs]
    head, tail = ([piece for run in some for piece in run] for some in (sent[:number], sent[number + 1 :]))
    size, end = size_of(span.path), span.offset + span.length
    before, after = [Piece(Span(span.path, 0, span.offset))], [Piece(Span(span.path, end, size - end))]
    theirs, ours = _of_object(span.path, size), _of_object(out, span.length + nbytes_of([*head, *tail]))
    if theirs is None or ours is None or nbytes_of([*head, *tail, *before, *after]) > _MOST:
        return False

    def of_range(whole: int, head: Pieces, tail: Pieces, more: int) -> int:
        """Return the CRC of the range with as many zeros after it as both tails have bytes."""
        zeros = nbytes_of(tail) + more
        return int(combined(whole ^ _crc(tail), 0, more) ^ combined(_crc(head), 0, span.length + zeros))

    return of_range(theirs, before, after, nbytes_of(tail)) == of_range(ours, head, tail, nbytes_of(after))


def _crc(pieces: Pieces) -> int:
    from awscrt.checksums import crc64nvme

    found = 0
    for data in stream(pieces):
        found = crc64nvme(bytes(data), found)
    return found


def _of_object(url: str, nbytes: int) -> int | None:
    """Return the CRC of the object, of so many bytes, if its store tells it."""
    fs, path = filesystem(url)
    bucket, key, version = fs.split_path(path)
    with suppress(Exception):  # drivers and stores raise what they like at what they do not know
        of = {"Bucket": bucket, "Key": key, **({"VersionId": version} if version else {})}
        said = fs.call_s3("head_object", ChecksumMode="ENABLED", **of)
        if (said["ContentLength"], said["ETag"]) == (nbytes, there(url).version[1]):
            return int.from_bytes(b64decode(said["ChecksumCRC64NVME"]), "big")
    return None
