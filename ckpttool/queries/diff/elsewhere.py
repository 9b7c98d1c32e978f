"""Tensors that differ under one name, and whose values are there all the same: under another name, or in another order.

Only what differs is looked at again, and what it could be: tensors of its dtype and shape.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from typing import TypeGuard

from ckpttool.checkpoint import ExtraEntry, Section, TensorEntry
from ckpttool.evaluate.compare import elements
from ckpttool.evaluate.digests import Digests
from ckpttool.expression import Op, Ref
from ckpttool.queries.diff.result import Entry
from ckpttool.values import dataclass

# What a reason says where the values of a tensor are there, and how it is mended.
MENDED_BY = {
    "the same rows in the order of rotary embeddings": (
        "whose rows other code for rotary embeddings has in another order",
        "`diff LEFT RIGHT --values --suggest rules.toml` writes the rule that brings them into the right's (`permute`)",
    ),
    "the same rows in another order": ("whose rows stand in another order", "index them yourself: no rule sorts rows"),
    "each is the other transposed": ("transposed", "`transpose` in a file of rules turns it (docs/rules.md)"),
    "` is right `": (
        "with values that the right has under other names",
        "--rule 'FROM => TO' for each of them gives all of them these names at once",
    ),
}

_FIRST = 4096  # bytes by which most tensors are told apart
_ROWS = 1 << 20  # of more rows the order is not looked for
_HEADS = 256  # rows of one head at most; of four rows the order is its own reverse, so that it tells nothing


def explained(entries: Iterable[Entry], left: Section, right: Section) -> tuple[Entry, ...]:
    """The entries, those of other values with where the values are, where this is known."""
    entries = tuple(entries)
    if all(entry.status != "value" for entry in entries):
        return entries
    have, want = left.by_key(), right.by_key()
    differing = [entry for entry in entries if entry.status == "value" and _dense(entry, have, want)]
    mine, theirs = Digests(have), Digests(want)
    placed = {key for entry in entries if entry.status == "same" for key in entry.right}
    homes = _homes(right, placed, theirs, {_beginning(have[entry.left[0]]) for entry in differing})
    found: dict[Entry, Entry] = {}
    for entry in differing:
        old, new = have[entry.left[0]], want[entry.right[0]]
        assert isinstance(old, TensorEntry)
        assert isinstance(new, TensorEntry)
        keys = homes.get((_likeness(old), mine(Ref(old.key))), [])
        reason = _moved(old.key, keys[0]) if len(keys) == 1 else _turned(old, new, mine, theirs) or _order(old, new)
        if reason:
            found[entry] = replace(entry, reason=f"{entry.reason}: {reason}")
    return tuple(found.get(entry, entry) for entry in entries)


def _dense(entry: Entry, left: Mapping[str, object], right: Mapping[str, object]) -> bool:
    return _is_dense(left[entry.left[0]]) and _is_dense(right[entry.right[0]])


def _is_dense(entry: object) -> TypeGuard[TensorEntry]:
    return isinstance(entry, TensorEntry) and entry.storage is not None


def _likeness(entry: object) -> Hashable:
    assert isinstance(entry, TensorEntry)
    return entry.dtype, entry.shape


def _beginning(entry: object) -> tuple[Hashable, bytes]:
    """Dtype, shape and first bytes: of tensors that differ in these the rest is not read."""
    assert isinstance(entry, TensorEntry)
    first = b""
    for chunk in elements(entry):
        first += chunk[:_FIRST]
        if len(first) >= _FIRST:
            break
    return _likeness(entry), first[:_FIRST]


def _homes(
    section: Section, placed: Set[str], digests: Digests, beginnings: Set[tuple[Hashable, bytes]]
) -> dict[Hashable, list[str]]:
    """Dtype, shape and hash -> the keys that have these values, of tensors that begin so, and are not `placed`.

    What is the same under one name on both sides has come from no other: many tensors hold nothing but ones.
    """
    found: defaultdict[Hashable, list[str]] = defaultdict(list)
    aliases, likenesses = section.aliases(), {likeness for likeness, _ in beginnings}
    for entry in section.tensors:
        if entry.storage is None or entry.key in aliases or entry.key in placed or _likeness(entry) not in likenesses:
            continue
        if _beginning(entry) in beginnings:
            found[_likeness(entry), digests(Ref(entry.key))].append(entry.key)
    return found


def _moved(left: str, right: str) -> str:
    """``left `layers.0` is right `layers.1` ``: without what both names end in."""
    mine, theirs = left.split("."), right.split(".")
    while len(mine) > 1 and len(theirs) > 1 and mine[-1] == theirs[-1]:
        mine.pop()
        theirs.pop()
    return f"left `{'.'.join(mine)}` is right `{'.'.join(theirs)}`"


def _turned(left: TensorEntry, right: TensorEntry, mine: Digests, theirs: Digests) -> str:
    """Whether a square matrix is the other's transposed."""
    if len(left.shape) != 2 or left.shape[0] != left.shape[1]:
        return ""
    same = mine(Op("aten.permute.default", (Ref(left.key), (1, 0)))) == theirs(Ref(right.key))
    return "each is the other transposed" if same else ""


def _order(left: TensorEntry, right: TensorEntry) -> str:
    """Whether the two have the same rows in another order, and which order it is."""
    count = left.shape[0] if left.shape else 0
    if not 1 < count <= _ROWS:
        return ""
    mine, theirs = _rows(left, count), _rows(right, count)
    if sorted(mine) != sorted(theirs):
        return ""
    found = _rotary(mine, theirs)
    if found is None:
        return "the same rows in another order"
    names = ("left", "right") if found.beside else ("right", "left")
    return (
        f"the same rows in the order of rotary embeddings, heads of {found.size}: pairs of rows side by side in "
        f"{names[0]}, half a head apart in {names[1]}"
    )


@dataclass(frozen=True, slots=True)
class Rotary:
    """Rows in the two orders of rotary embeddings: `size` rows a head; `beside`: pairs of them lie so in the left."""

    size: int
    beside: bool

    @property
    def rows(self) -> tuple[int, int, int]:
        """What dimension 0 of the left consists of; its last two in turn are those of the right."""
        half = self.size // 2
        return (-1, half, 2) if self.beside else (-1, 2, half)


def rotary(left: TensorEntry | ExtraEntry, right: TensorEntry | ExtraEntry) -> Rotary | None:
    """How the rows of two tensors of one shape and dtype stand in the orders of rotary embeddings; None where not."""
    if not _is_dense(left) or not _is_dense(right):
        return None
    count = left.shape[0] if left.shape else 0
    if not 1 < count <= _ROWS or not left.numel or _likeness(left) != _likeness(right):
        return None
    mine, theirs = _rows(left, count), _rows(right, count)
    return None if mine == theirs else _rotary(mine, theirs)  # equal rows, as of norms that are all ones, tell nothing


def _rotary(mine: Sequence[bytes], theirs: Sequence[bytes]) -> Rotary | None:
    for size in range(6, min(len(mine), _HEADS) + 1, 2):
        for beside, one, other in (True, mine, theirs), (False, theirs, mine):
            if _is_rotary(one, other, size):
                return Rotary(size, beside)
    return None


def _is_rotary(beside: Sequence[bytes], apart: Sequence[bytes], size: int) -> bool:
    """Whether row 2i of each head of `size` rows became row i of it, and row 2i + 1 row size / 2 + i."""
    if len(beside) % size:
        return False
    heads = range(0, len(beside), size)
    return all(
        [*beside[at : at + size : 2], *beside[at + 1 : at + size : 2]] == [*apart[at : at + size]] for at in heads
    )


def _rows(entry: TensorEntry, count: int) -> list[bytes]:
    """A hash of each row, streamed."""
    import hashlib  # loads OpenSSL

    size, found, rest = entry.nbytes // count, list[bytes](), b""
    for chunk in elements(entry):
        data = rest + bytes(chunk)
        whole = len(data) // size
        found += [hashlib.blake2b(data[at * size : (at + 1) * size], digest_size=12).digest() for at in range(whole)]
        rest = data[whole * size :]
    return found
