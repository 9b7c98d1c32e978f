"""Find different values under another name, transposed, or with their rows in another order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from typing import TypeGuard

from ckpttool.core.checkpoint import AnyEntry, Section, TensorEntry
from ckpttool.core.expression import Op, Ref
from ckpttool.core.values import dataclass
from ckpttool.diffing.causes import Cause, Code
from ckpttool.diffing.result import Entry, statuses_of
from ckpttool.diffing.sides import BothSides
from ckpttool.evaluate.apply import Digests
from ckpttool.evaluate.compare import elements

_FIRST = 4096  # bytes that are enough to tell most tensors apart
_ROWS = 1 << 20  # the order of more rows is not examined
# most rows of one head; with four rows the order is its own reverse, which says nothing
_HEADS = 256


def explain_moved(entries: Iterable[Entry], sides: BothSides) -> tuple[Entry, ...]:
    """Return the entries; those with different values say where the values are, if they are
    anywhere.
    """
    entries = tuple(entries)
    left, right = sides.left.section, sides.right.section
    if "value" not in statuses_of(entries):
        return entries
    differing = _differing(entries, left, right)
    if not differing:
        return entries
    left_digests, right_digests = Digests(left.by_key()), Digests(right.by_key())
    # A tensor that is the same under its own name did not move: many hold nothing but ones.
    skipped = set(right.aliases())
    for entry in entries:
        if entry.status == "same":
            skipped.update(entry.right)
    candidates = [tensor for tensor in right.tensors if tensor.key not in skipped]
    places = _places(candidates, [old for old, _ in differing.values()], right_digests)

    explained = []
    for entry in entries:
        if entry in differing and entry.cause is not None:
            old, new = differing[entry]
            keys = places.get((_likeness(old), left_digests.of(Ref(old.key))), [])
            if len(keys) != 1:
                cause = _transposed_or_reordered(old, new, left_digests, right_digests)
            elif keys[0] != new.key:
                cause = _moved(old.key, keys[0])
            else:  # the copies of other ranks differ
                cause = None
            entry = replace(entry, cause=entry.cause.and_also(cause))
        explained.append(entry)
    return tuple(explained)


def _differing(
    entries: Iterable[Entry], left: Section, right: Section
) -> dict[Entry, tuple[TensorEntry, TensorEntry]]:
    """Return the pairs of dense tensors of one dtype that have different values."""
    left_entries, right_entries = left.by_key(), right.by_key()
    differing = {}
    for entry in entries:
        # else hooks compute it
        if entry.status == "value" and len(entry.left) == len(entry.right) == 1:
            old, new = left_entries[entry.left[0]], right_entries[entry.right[0]]
            if _is_dense(old) and _is_dense(new) and old.dtype == new.dtype:
                differing[entry] = old, new
    return differing


def _places(
    candidates: Iterable[TensorEntry], tensors: Iterable[TensorEntry], digests: Digests
) -> dict[Hashable, list[str]]:
    """Map dtype, shape and hash of each tensor to the keys of the candidates that have them.

    A candidate is read only if dtype, shape and first bytes are equal to a tensor's.
    """
    beginnings = {_beginning(tensor) for tensor in tensors}
    likenesses = {likeness for likeness, _ in beginnings}
    places: defaultdict[Hashable, list[str]] = defaultdict(list)
    for tensor in candidates:
        likeness = _likeness(tensor)
        if tensor.storage is None or likeness not in likenesses:
            continue
        if _beginning(tensor) in beginnings:
            places[likeness, digests.of(Ref(tensor.key))].append(tensor.key)
    return places


def _transposed_or_reordered(
    left: TensorEntry, right: TensorEntry, left_digests: Digests, right_digests: Digests
) -> Cause | None:
    """Return the cause if a square matrix is the transpose of the other, or has its rows in another
    order.
    """
    if len(left.shape) == 2 and left.shape[0] == left.shape[1]:
        transpose = Op("aten.permute.default", (Ref(left.key), (1, 0)))
        if left_digests.of(transpose) == right_digests.of(Ref(right.key)):
            return Cause(Code.TRANSPOSED)
    return _row_order(left, right)


def _is_dense(entry: object) -> TypeGuard[TensorEntry]:
    return isinstance(entry, TensorEntry) and entry.storage is not None


def _likeness(entry: TensorEntry) -> Hashable:
    return entry.dtype, entry.shape


def _beginning(entry: TensorEntry) -> tuple[Hashable, bytes]:
    """Return dtype, shape and first bytes: if these differ, the rest is not read."""
    first = b""
    for chunk in elements(entry):
        first += chunk[:_FIRST]
        if len(first) >= _FIRST:
            break
    return _likeness(entry), first[:_FIRST]


def _moved(left: str, right: str) -> Cause:
    """Name the two, without the segments that both end in."""
    path, other_path = left.split("."), right.split(".")
    while len(path) > 1 and len(other_path) > 1 and path[-1] == other_path[-1]:
        path.pop()
        other_path.pop()
    return Cause(Code.MOVED, (".".join(path), ".".join(other_path)))


def _row_order(left: TensorEntry, right: TensorEntry) -> Cause | None:
    """Return the cause if the two have the same rows in another order."""
    count = left.shape[0] if left.shape else 0
    if not 1 < count <= _ROWS:
        return None
    left_rows, right_rows = _rows(left, count), _rows(right, count)
    if sorted(left_rows) != sorted(right_rows):
        return None
    order = _rotary(left_rows, right_rows)
    if order is None:
        return Cause(Code.ROW_ORDER)
    return Cause(Code.ROTARY_LEFT if order.left_is_adjacent else Code.ROTARY_RIGHT, (order.size,))


@dataclass(frozen=True, slots=True)
class Rotary:
    """The two orders of rows for rotary embeddings: `size` rows a head, whose pairs are adjacent in
    one of the two.
    """

    size: int
    left_is_adjacent: bool

    @property
    def rows(self) -> tuple[int, int, int]:
        """The sizes that dimension 0 of the left splits into; with the last two swapped they are
        the right's.
        """
        half = self.size // 2
        return (-1, half, 2) if self.left_is_adjacent else (-1, 2, half)


def rotary(left: AnyEntry, right: AnyEntry) -> Rotary | None:
    """Return how the rows of two tensors are in the two rotary orders; None if they are not."""
    if not _is_dense(left) or not _is_dense(right):
        return None
    count = left.shape[0] if left.shape else 0
    if not 1 < count <= _ROWS or not left.numel or _likeness(left) != _likeness(right):
        return None
    left_rows, right_rows = _rows(left, count), _rows(right, count)
    # equal rows (a norm of ones) say nothing
    return None if left_rows == right_rows else _rotary(left_rows, right_rows)


def _rotary(left: Sequence[bytes], right: Sequence[bytes]) -> Rotary | None:
    """Return the size of a head for which the rows are in the two orders; None if there is none.

    Of a head of 6 rows::

        adjacent  0 1 2 3 4 5
        apart     0 2 4 1 3 5
    """
    for size in range(6, min(len(left), _HEADS) + 1, 2):
        if len(left) % size:
            continue
        if _are_rotary(left, right, size):
            return Rotary(size, left_is_adjacent=True)
        if _are_rotary(right, left, size):
            return Rotary(size, left_is_adjacent=False)
    return None


def _are_rotary(adjacent: Sequence[bytes], apart: Sequence[bytes], size: int) -> bool:
    for start in range(0, len(adjacent), size):
        head, other_head = adjacent[start : start + size], apart[start : start + size]
        if [*head[::2], *head[1::2]] != [*other_head]:
            return False
    return True


def _rows(entry: TensorEntry, count: int) -> list[bytes]:
    """Return a hash of each row, streamed."""
    import hashlib  # loads OpenSSL

    size, rest = entry.nbytes // count, b""
    hashes = []
    for chunk in elements(entry):
        data = rest + bytes(chunk)
        end = len(data) - len(data) % size
        for start in range(0, end, size):
            row = data[start : start + size]
            hashes.append(hashlib.blake2b(row, digest_size=12).digest())
        rest = data[end:]
    return hashes
