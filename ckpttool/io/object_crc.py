"""What the CRCs of whole objects prove of a range that their store has copied: no byte of it has to come here.

A store may keep a CRC-64/NVME of each object (``ChecksumCRC64NVME`` of HeadObject; AWS's also of what was sent
without any checksum), and says that of the source and that of the copy. A CRC is linear: where the bytes before and
behind the range are known in both objects, the two tell whether the range is the same.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Sequence
from contextlib import suppress

from ckpttool.checkpoint import Span
from ckpttool.io.files import size as size_of
from ckpttool.io.pieces import Piece, Pieces, nbytes_of
from ckpttool.io.ranges import stream
from ckpttool.io.remote.read import filesystem, there

_MOST = 1 << 26  # bytes beside the range that are read for it


def is_copied(runs: Sequence[Pieces | Span], out: str) -> bool:
    """Whether the object `out` is proved to be these runs, one of which is a range of another object there.

    False also where that cannot be told: by a store that does not say these CRCs, or without ``awscrt``, which reckons
    them. Raises `CkptError` where the source cannot be read.
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
        """The CRC of the range, as it were with as many zeros behind it as both tails have bytes."""
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
    """The CRC of all of the object, of so many bytes, that its store says; None where it says none."""
    fs, path = filesystem(url)
    bucket, key, version = fs.split_path(path)
    with suppress(Exception):  # drivers and stores raise what they like at what they do not know
        of = {"Bucket": bucket, "Key": key, **({"VersionId": version} if version else {})}
        said = fs.call_s3("head_object", ChecksumMode="ENABLED", **of)
        if (said["ContentLength"], said["ETag"]) == (nbytes, there(url).version[1]):
            return int.from_bytes(b64decode(said["ChecksumCRC64NVME"]), "big")
    return None
