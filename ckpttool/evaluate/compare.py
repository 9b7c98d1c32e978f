"""Compare, hash and describe the values of tensors, streamed from their files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from math import isfinite, sqrt
from typing import Any, Union

from ckpttool.core.checkpoint import (
    Checkpoint,
    ExtraEntry,
    Lazy,
    Payload,
    Span,
    Storage,
    TensorEntry,
)
from ckpttool.core.dtypes import itemsize
from ckpttool.core.errors import Problem
from ckpttool.core.text import dotted
from ckpttool.core.values import dataclass
from ckpttool.io import pieces
from ckpttool.io.pieces import Piece, stream

Entry = Union[TensorEntry, ExtraEntry]
Chunks = Iterable["bytes | memoryview"]
Fingerprints = Mapping["tuple[str, str]", "tuple[object, ...]"]

EQUAL = "the values are equal, their bytes are not (-0.0, or another kind of NaN)"


def same_values(left: Entry, right: Entry) -> bool:
    """Return whether two entries are the same: tensors of one dtype and shape with the same bytes,
    or equal objects.

    False also if that is unknown.
    """
    if isinstance(left, ExtraEntry) and isinstance(right, ExtraEntry):
        return same_objects(left, right)
    if isinstance(left, ExtraEntry) or isinstance(right, ExtraEntry):
        return False
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    if left.layout != right.layout:
        left, right = _resolve(left), _resolve(right)
    if left.layout != right.layout or _meaning(left) != _meaning(right):
        return False
    if left.storage is None or right.storage is None:
        if left.payload is not None and left.payload is right.payload:
            return True
        return _same_content(left.payload, right.payload) or _is_empty(left, right)
    if left.identity == right.identity:
        return True
    left_data, right_data = _in_order(left), _in_order(right)
    if left_data is not None and right_data is not None:
        return pieces.same_data(left_data, right_data)
    chunks = _in_step(elements(left), elements(right), itemsize(left.dtype))
    return all(left_bytes == right_bytes for left_bytes, right_bytes in chunks)


def same_objects(left: ExtraEntry, right: ExtraEntry) -> bool:
    """Return whether two objects are equal, including the tensors inside them; False also if that
    is unknown.
    """
    if isinstance(left.payload, Payload) and isinstance(right.payload, Payload):
        return left.payload is right.payload or _same_content(left.payload, right.payload)
    return left.value is not None and repr(left.value) == repr(right.value)


def _resolve(entry: TensorEntry) -> TensorEntry:
    """Return a lazily conjugated or negated tensor as a dense one, any other entry as it is."""
    return entry.payload.resolved(entry) if isinstance(entry.payload, Payload) else entry


def _meaning(entry: TensorEntry) -> str:
    return entry.payload.meaning if isinstance(entry.payload, Payload) else ""


def _same_content(left: object, right: object) -> bool:
    content = _content(left)
    return content is not None and content == _content(right)


def _content(payload: object) -> bytes | None:
    return payload.content() if isinstance(payload, Payload) else None


def _is_empty(left: TensorEntry, right: TensorEntry) -> bool:
    return left.layout == "meta" or not (left.nbytes or right.nbytes)


def _in_order(entry: TensorEntry) -> Span | Lazy | None:
    """Return the tensor's elements in row-major order, or None if they must be gathered."""
    assert entry.storage is not None
    is_all = entry.is_contiguous and entry.nbytes == entry.storage.nbytes
    return entry.span or (entry.storage.data if is_all else None)


def elements(entry: TensorEntry) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a dense tensor in row-major order; a chunk is valid until the next one is
    requested.
    """
    data = _in_order(entry)
    if data is not None:
        yield from stream([Piece(data)])
    else:
        from ckpttool.evaluate import numpy_eval

        yield from numpy_eval.in_order(entry)


def is_constant(entry: TensorEntry) -> bool:
    """Return whether all elements of a dense tensor have the same bytes."""
    size = itemsize(entry.dtype)
    element = b""
    for chunk in whole_elements(elements(entry), size):
        element = element or chunk[:size]
        if chunk != element * (len(chunk) // size):
            return False
    return True


def whole_elements(chunks: Chunks, size: int) -> Iterator[bytes]:
    """Yield the bytes in chunks of whole elements of `size` bytes."""
    rest = b""
    for chunk in chunks:
        data = rest + bytes(chunk)
        end = len(data) - len(data) % size
        rest = data[end:]
        if end:
            yield data[:end]


def _in_step(left: Chunks, right: Chunks, size: int) -> Iterator[tuple[bytes, bytes]]:
    """Yield the same elements of both sides, as many as both chunks have.

    left   [0 1 2 3][4 5]        yields (0 1), (2 3), (4 5)
    right  [0 1][2 3 4 5]
    """
    lefts, rights = whole_elements(left, size), whole_elements(right, size)
    a, b = next(lefts, b""), next(rights, b"")
    while a and b:
        count = min(len(a), len(b))
        yield a[:count], b[:count]
        a = a[count:] or next(lefts, b"")
        b = b[count:] or next(rights, b"")


# Differences


@dataclass(frozen=True, slots=True)
class Change:
    """How far the numbers of a tensor changed from left to right.

    `norm` is the norm of the difference, `relative` is `norm` divided by the norm of left,
    `maximum` is the largest distance of two elements; `differing` counts the `elements` that
    differ. Norms and distances are of finite elements, and None if they are not finite themselves.
    """

    relative: float | None
    norm: float | None
    maximum: float
    differing: int
    elements: int
    nan_left: int
    nan_right: int
    infinite_left: int
    infinite_right: int


@dataclass(frozen=True, slots=True)
class Difference:
    """How the values of two tensors differ: a text, and the distances.

    `spread` are sorted pairs ``(exponent, count)``: the distance of so many elements is at least
    2**exponent, and less than twice that; from 1023 on, it is not a number. Empty if it was not
    measured. `change` is None for dtypes without numbers.
    """

    text: str
    spread: tuple[tuple[int, int], ...] = ()
    change: Change | None = None


def difference(
    left: TensorEntry, right: TensorEntry, rtol: float, atol: float
) -> Difference | None:
    """Return how the values of two tensors of one dtype and shape differ, or None if they are the
    same.

    Bitwise if both tolerances are 0, and for dtypes without numbers (``bits8``,
    ``float4_e2m1fn_x2``); else ``|left - right| <= atol + rtol * |right|`` as in ``torch.isclose``.
    """
    if same_values(left, right):
        return None
    left, right = _resolve(left), _resolve(right)
    if left.storage is None or right.storage is None:
        return Difference(f"{left.layout} tensors of other content, or not to be compared")
    return difference_of_elements(left.dtype, elements(left), elements(right), rtol, atol)


def difference_of_elements(
    dtype: str, left: Chunks, right: Chunks, rtol: float, atol: float
) -> Difference | None:
    """Return how two tensors differ that are known to differ in some byte; None if all elements are
    within tolerance (NaN equals NaN).
    """
    import numpy as np

    from ckpttool.evaluate.numpy_eval import reader

    read, size = reader(dtype), itemsize(dtype)
    if read is None:
        return _difference_of_bits(left, right, size)
    count = total = 0
    farthest = squares = squares_of_left = 0.0
    exponents = np.zeros(2048, np.int64)  # of float64
    not_finite = Counter[str]()
    with np.errstate(all="ignore"):
        for left_bytes, right_bytes in _in_step(left, right, size):
            x, y = read(left_bytes), read(right_bytes)
            if x.dtype.kind in "fc":
                number = np.complex128 if x.dtype.kind == "c" else np.float64
                x, y = x.astype(number), y.astype(number)
                for side, values in (("left", x), ("right", y)):
                    not_finite[f"NaN in {side}"] += int(np.count_nonzero(np.isnan(values)))
                    not_finite[f"infinite in {side}"] += int(np.count_nonzero(np.isinf(values)))
            equal, distance = _distances(x, y)
            close = equal
            if rtol or atol:
                within = distance <= atol + rtol * np.abs(_as_floats(y))
                close = equal | (np.isfinite(distance) & within)
            count += int(np.count_nonzero(~close))
            total += x.size
            far = np.nan_to_num(np.where(equal, 0.0, distance), nan=np.inf, posinf=np.inf)
            farthest = max(farthest, float(far[np.isfinite(far)].max(initial=0.0)))
            squares += _sum_of_squares(far)
            squares_of_left += _sum_of_squares(x)
            far_exponents = far.view(np.uint64).astype(np.int64).reshape(-1) >> 52
            exponents += np.bincount(far_exponents, minlength=2048)
    if not count:
        return None if rtol or atol else Difference(EQUAL)
    text = f"{count:,} of {total:,} elements differ"
    if farthest:
        text += f", by {farthest:.3g} at most"
    counts = []
    for kind, elements in not_finite.items():
        if elements:
            counts.append(f"{elements:,} {kind}")
    if counts:
        text += f"; {', '.join(counts)}"
    exponents[0] = 0  # of equal elements
    places = np.flatnonzero(exponents)
    spread = tuple((int(place) - 1023, int(exponents[place])) for place in places)
    norm, norm_of_left = sqrt(squares), sqrt(squares_of_left)
    change = Change(
        _finite(norm / norm_of_left) if norm_of_left else None,
        _finite(norm),
        farthest,
        count,
        total,
        not_finite["NaN in left"],
        not_finite["NaN in right"],
        not_finite["infinite in left"],
        not_finite["infinite in right"],
    )
    return Difference(text, spread, change)


def _difference_of_bits(left: Chunks, right: Chunks, size: int) -> Difference:
    """Return how many elements of `size` bytes differ."""
    import numpy as np

    count = total = 0
    for left_bytes, right_bytes in _in_step(left, right, size):
        x, y = np.frombuffer(left_bytes, f"u{size}"), np.frombuffer(right_bytes, f"u{size}")
        count += int(np.count_nonzero(x != y))
        total += x.size
    return Difference(f"{count:,} of {total:,} elements differ")


def _distances(x: Any, y: Any) -> tuple[Any, Any]:
    """Return which elements of two arrays are equal, and the distance of each two."""
    import numpy as np

    if x.dtype.kind in "fc":
        return (x == y) | (np.isnan(x) & np.isnan(y)), np.abs(x - y)
    # float64 cannot hold all integers, only their distance (modulo 2^64)
    larger, smaller = np.maximum(x, y), np.minimum(x, y)
    distance = larger.astype(np.uint64) - smaller.astype(np.uint64)
    return x == y, distance.astype(np.float64)


def _as_floats(values: Any) -> Any:
    return values if values.dtype.kind in "fc" else values.astype("float64")


def _sum_of_squares(values: Any) -> float:
    """Return the sum for the finite elements of an array."""
    import numpy as np

    values = _as_floats(values)
    total = float(np.vdot(values, values).real)
    if isfinite(total):
        return total
    finite = values[np.isfinite(values)]
    return float(np.vdot(finite, finite).real)


def _finite(number: float) -> float | None:
    return number if isfinite(number) else None


# Hashes


def digest(entry: TensorEntry) -> bytes:
    """Return a hash of the bytes of a dense tensor's elements in row-major order."""
    return _hash(elements(entry), size=16)


def content_of_storage(storage: Storage) -> bytes:
    return _hash(stream([Piece(storage.data)]))


def _hash(chunks: Chunks, size: int = 64) -> bytes:
    import hashlib  # loads OpenSSL

    digest = hashlib.blake2b(digest_size=size)
    for chunk in chunks:
        digest.update(chunk)
    return digest.digest()


def fingerprint(entry: Entry) -> tuple[object, ...]:
    """Return values that are equal for two entries that are the same, with a None if that is
    unknown.
    """
    if isinstance(entry, ExtraEntry):
        return (_content(entry.payload),) if entry.value is None else (repr(entry.value),)
    geometry = entry.dtype, entry.shape, entry.layout
    if entry.storage is not None:
        return (*geometry, _meaning(entry), digest(entry))
    if _is_empty(entry, entry):
        return (*geometry, b"")
    return (*geometry, _content(entry.payload))


def fingerprints(checkpoint: Checkpoint) -> Fingerprints:
    """Return the fingerprint of each section and key: they remain known after the files are
    replaced.
    """
    return {place: fingerprint(entry) for place, entry in checkpoint.entries().items()}


def verify(written: Checkpoint, expected: Checkpoint | Fingerprints) -> list[Problem]:
    """Return how the `written` file differs from `expected`: every key, dtype, shape and byte is
    compared.
    """
    sources = expected.entries() if isinstance(expected, Checkpoint) else expected
    entries = written.read_for(sources).entries()
    problems, different = [], []
    for place, source in sources.items():
        if place not in entries:
            problems.append(Problem("not in the output", dotted(*place)))
        elif not _is_as_planned(entries[place], source):
            different.append(Problem("other bytes in the output", dotted(*place)))
    for place in entries:
        if place not in sources:
            problems.append(Problem("in the output, and not planned", dotted(*place)))
    return problems + different


def _is_as_planned(entry: Entry, planned: Entry | tuple[object, ...]) -> bool:
    """Return whether the entry is the planned one, which is given as it is or by its
    fingerprint.
    """
    if not isinstance(planned, tuple):
        return same_values(planned, entry)
    return None not in planned and fingerprint(entry) == planned


# Statistics


@dataclass(frozen=True, slots=True)
class Statistics:
    """`minimum`, `maximum` and `mean` are of the finite values, None if there are none; all but
    `sha256`, which is of the elements in row-major order, are None for a dtype without real
    numbers.
    """

    minimum: float | int | None
    maximum: float | int | None
    mean: float | None
    zeros: int | None
    nan: int | None
    inf: int | None
    sha256: str


def statistics(entry: TensorEntry) -> Statistics:
    """Return the statistics of a dense tensor, read in chunks. Raises `CkptError` if it cannot be
    read.
    """
    import hashlib

    import numpy as np

    from ckpttool.evaluate.numpy_eval import reader

    read = None if entry.dtype.startswith("complex") else reader(entry.dtype)
    digest = hashlib.sha256()
    least: float | None = None
    most: float | None = None
    total = 0.0
    count = zeros = nan = inf = 0
    for chunk in whole_elements(elements(entry), itemsize(entry.dtype)):
        digest.update(chunk)
        if read is None:
            continue
        values = read(chunk)
        zeros += values.size - int(np.count_nonzero(values))
        is_finite = np.isfinite(values) if values.dtype.kind == "f" else None
        if is_finite is not None and not is_finite.all():
            nan += int(np.isnan(values).sum())
            inf += int(np.isinf(values).sum())
            values = values[is_finite]
        if values.size:
            low, high = values.min().item(), values.max().item()
            least = low if least is None else min(least, low)
            most = high if most is None else max(most, high)
            total += float(values.sum(dtype=np.float64))
            count += values.size
    if read is None:
        return Statistics(None, None, None, None, None, None, digest.hexdigest())
    mean = total / count if count else None
    return Statistics(least, most, mean, zeros, nan, inf, digest.hexdigest())
