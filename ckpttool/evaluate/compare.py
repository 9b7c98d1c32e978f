"""Compares the values of two tensors where their bytes lie, streamed; torch says how far complex numbers differ."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from ckpttool.core.checkpoint import (
    Checkpoint,
    Comparable,
    Digested,
    ExtraEntry,
    Lazy,
    Meaningful,
    Resolvable,
    Span,
    Storage,
    TensorEntry,
)
from ckpttool.core.dtypes import PLAIN, itemsize
from ckpttool.core.errors import Problem
from ckpttool.core.keys import dotted
from ckpttool.evaluate import numpy_eval
from ckpttool.evaluate.numpy_eval import Difference
from ckpttool.io import ranges
from ckpttool.io.pieces import Piece
from ckpttool.io.ranges import stream

if TYPE_CHECKING:
    from ckpttool.io.ranges import Digest


Same = Callable[[Span | Lazy, Span | Lazy], bool]  # whether these bytes are the same


def same_values(
    left: TensorEntry | ExtraEntry, right: TensorEntry | ExtraEntry, same_data: Same = ranges.same_data
) -> bool:
    """Whether two entries are the same: tensors of one dtype and shape with the same bytes, or objects that are equal.

    False also where it cannot be told.
    """
    if isinstance(left, ExtraEntry) and isinstance(right, ExtraEntry):
        return same_objects(left, right)
    if isinstance(left, ExtraEntry) or isinstance(right, ExtraEntry):
        return False
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        return False
    if _is_digest(left) or _is_digest(right):  # whose layout is a class by its name, where it is one
        return (left.layout == "strided") == (right.layout == "strided") and _same_digest(left, right)
    if left.layout != right.layout:
        left, right = _resolved(left), _resolved(right)
    if left.layout != right.layout or _meaning(left) != _meaning(right):
        return False
    if left.storage is None or right.storage is None:
        known = left.payload is not None and left.payload is right.payload
        return known or _same_content(left.payload, right.payload) or _is_empty(left, right)
    if left.identity == right.identity:
        return True
    mine, yours = _in_order(left), _in_order(right)
    if mine is not None and yours is not None:
        return same_data(mine, yours)
    pairs = numpy_eval.in_step(elements(left), elements(right), itemsize(left.dtype))
    return all(a == b for a, b in pairs)


def _resolved(entry: TensorEntry) -> TensorEntry:
    """A lazily conjugated or negated tensor as a dense one; any other entry as it is."""
    return entry.payload.resolved(entry) if isinstance(entry.payload, Resolvable) else entry


def _meaning(entry: TensorEntry) -> str:
    payload = entry.payload  # asking a protocol of None for each of many entries takes time
    return payload.meaning if payload is not None and isinstance(payload, Meaningful) else ""


def same_objects(left: ExtraEntry, right: ExtraEntry) -> bool:
    """Whether two objects are equal, the tensors inside them included; False also where it cannot be told."""
    if _is_digest(left) or _is_digest(right):
        return _same_digest(left, right)
    if isinstance(left.payload, Comparable) and isinstance(right.payload, Comparable):
        return left.payload is right.payload or _same_content(left.payload, right.payload)
    return left.value is not None and repr(left.value) == repr(right.value)


def _is_digest(entry: TensorEntry | ExtraEntry) -> bool:
    """Whether all that is known of the entry's values is their digest."""
    if isinstance(entry, ExtraEntry) or entry.storage is None:
        return isinstance(entry.payload, Digested)
    return isinstance(entry.storage.data, Lazy) and entry.storage.data.sha256 is not None


def _same_digest(left: TensorEntry | ExtraEntry, right: TensorEntry | ExtraEntry) -> bool:
    mine = sha256(left)
    return mine is not None and mine == sha256(right)


def sha256(entry: TensorEntry | ExtraEntry) -> str | None:
    """SHA-256 of the entry's values: of a dense tensor's elements in row-major order, of all else by what it holds.

    None where it cannot be told. Reads the bytes, unless the digest is what is known of them.
    """
    import hashlib

    if isinstance(entry.payload, Digested):
        return entry.payload.sha256
    if isinstance(entry, TensorEntry) and entry.storage is not None:
        if isinstance(entry.storage.data, Lazy) and entry.storage.data.sha256 is not None:
            return entry.storage.data.sha256
        return _hashed(elements(entry), hashlib.sha256()).hex()
    content = fingerprint(entry)[-1]
    if content is None:
        return None
    known = content if isinstance(content, bytes) else str(content).encode(errors="surrogatepass")
    return hashlib.sha256(known).hexdigest()


def _same_content(left: object, right: object) -> bool:
    mine = _content(left)
    return mine is not None and mine == _content(right)


def _content(payload: object) -> bytes | None:
    return payload.content() if isinstance(payload, Comparable) else None


def _is_empty(left: TensorEntry, right: TensorEntry) -> bool:
    """Whether neither tensor has values that could differ."""
    return left.layout == "meta" or not (left.nbytes or right.nbytes)


def _in_order(entry: TensorEntry) -> Span | Lazy | None:
    """The tensor's elements in row-major order, or None where they have to be gathered."""
    assert entry.storage is not None
    whole = entry.is_contiguous and entry.nbytes == entry.storage.nbytes
    return entry.span or (entry.storage.data if whole else None)


def difference(left: TensorEntry, right: TensorEntry, rtol: float, atol: float) -> Difference | None:
    """How the values of two tensors of one dtype and shape differ, or None where they are the same.

    Bitwise where both tolerances are 0, and of a dtype without numbers (``bits8``, ``float4_e2m1fn_x2``); else
    ``|left - right| <= atol + rtol * |right|`` as in ``torch.isclose``.
    """
    if same_values(left, right):
        return None
    if _is_digest(left) or _is_digest(right):
        return Difference(f"SHA-256 {sha256(left)!s:.12} instead of {sha256(right)!s:.12}")
    left, right = _resolved(left), _resolved(right)
    if left.storage is None or right.storage is None:
        return Difference(f"{left.layout} tensors of other content, or not to be compared")
    if numpy_eval.reader(left.dtype) is not None:
        return numpy_eval.difference(left.dtype, elements(left), elements(right), rtol, atol)
    if left.dtype not in PLAIN:
        return numpy_eval.other_bits(left.dtype, elements(left), elements(right))
    from ckpttool.evaluate import torch_eval

    said = torch_eval.difference(torch_eval.load(left), torch_eval.load(right), rtol, atol)
    return None if said is None else Difference(said)


Fingerprints = Mapping[tuple[str, str], tuple[object, ...]]


def fingerprints(checkpoint: Checkpoint) -> Fingerprints:
    """What a checkpoint holds, without its files: by section and key the dtype, the shape and a hash of the bytes."""
    return {at: fingerprint(entry) for at, entry in checkpoint.entries().items()}


def fingerprint(entry: TensorEntry | ExtraEntry) -> tuple[object, ...]:
    """Equal for two entries that are the same, with a None where that cannot be told. Reads the bytes of a tensor."""
    if isinstance(entry, ExtraEntry):
        return (_content(entry.payload),) if entry.value is None else (repr(entry.value),)
    if entry.storage is None:
        content = b"" if _is_empty(entry, entry) else _content(entry.payload)
        return entry.dtype, entry.shape, entry.layout, content
    return entry.dtype, entry.shape, entry.layout, _meaning(entry), digest(entry)


def content_of_storage(storage: Storage) -> bytes:
    """A hash of the storage's bytes."""
    import hashlib  # loads OpenSSL

    return _hashed(stream([Piece(storage.data)]), hashlib.blake2b())


def elements(entry: TensorEntry) -> Iterator[bytes | memoryview]:
    """The bytes of a dense tensor in row-major order, in chunks; each is valid until the next one is asked for."""
    data = _in_order(entry)
    if data is not None:
        yield from stream([Piece(data)])
    else:
        yield from numpy_eval.in_order(entry)


def digest(entry: TensorEntry) -> bytes:
    """A hash of the bytes of a dense tensor's elements in row-major order, streamed."""
    import hashlib

    return _hashed(elements(entry), hashlib.blake2b(digest_size=16))


def sha256_of(data: Span | Lazy) -> str:
    """SHA-256 of the bytes, streamed, unless it is what is known of them. Raises `CkptError` where that fails."""
    import hashlib

    if isinstance(data, Lazy) and data.sha256 is not None:
        return data.sha256
    return _hashed(stream([Piece(data)]), hashlib.sha256()).hex()


def _hashed(chunks: Iterable[bytes | memoryview], found: Digest) -> bytes:
    for chunk in chunks:
        found.update(chunk)
    return found.digest()


def verify(
    written: Checkpoint, expected: Checkpoint | Fingerprints, same_data: Same = ranges.same_data
) -> list[Problem]:
    """What of `expected` the file that was `written` does not hold: every key, dtype, shape and byte is compared.

    Fingerprints stand for a checkpoint whose own files are no longer there: they were replaced.
    """
    want: Mapping[tuple[str, str], object] = expected.entries() if isinstance(expected, Checkpoint) else expected
    have = written.read_for(want).entries()
    if isinstance(expected, Checkpoint):
        both = [(at, entry) for at, entry in expected.entries().items() if at in have]
        differ = [at for at, entry in both if not same_values(entry, have[at], same_data)]
    else:
        differ = [
            at for at, entry in expected.items() if at in have and (None in entry or fingerprint(have[at]) != entry)
        ]
    problems = [Problem("not in the output", dotted(*at)) for at in want if at not in have]
    problems += [Problem("in the output, and not planned", dotted(*at)) for at in have if at not in want]
    return problems + [Problem("other bytes in the output", dotted(*at)) for at in differ]
