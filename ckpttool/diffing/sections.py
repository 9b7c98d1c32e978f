"""Compare two state dicts key by key."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from itertools import chain
from typing import Any, TypeGuard

from ckpttool.core.checkpoint import ExtraEntry, Section, TensorEntry
from ckpttool.core.expression import Op, Ref
from ckpttool.core.names import Hook
from ckpttool.core.values import dataclass
from ckpttool.diffing.result import KIND, OBJECT, Entry, segment_reason
from ckpttool.evaluate.apply import Digests
from ckpttool.evaluate.compare import Difference, elements, same_objects
from ckpttool.formats.ranks.sharded import must_be_alike
from ckpttool.formats.remarks import PLACEHOLDER, is_placeholder
from ckpttool.formats.torch.tensors import is_dense, kind
from ckpttool.naming.call_variants import aliases
from ckpttool.naming.match import unlike

Values = Callable[[TensorEntry, TensorEntry], "Difference | None"]


def compare(left: Section, right: Section, values: Values | None = None) -> tuple[Entry, ...]:
    """Two state dicts, key by key; `values` compares two tensors of one dtype and shape and says how they differ.

    Names that differ by wrappers' segments only are one tensor, where this can be read in one way.
    """
    have, want = left.by_key(), right.by_key()
    entries = [compare_pair(have[key], want[key], values) for key in have if key in want]
    mine, theirs = [key for key in have if key not in want], [key for key in want if key not in have]
    if not mine and not theirs:
        return tuple(entries)
    found = unlike(have, want, mine, theirs)
    for old, new in found.items():
        entries.append(renamed(have[old], want[new], segment_reason(old, new), values))
    taken = set(found.values())
    entries += leftover(
        "unexpected", left, [key for key in mine if key not in found], {*want, *found} if found else want
    )
    entries += leftover(
        "missing", right, [key for key in theirs if key not in taken], {*have, *taken} if found else have
    )
    return tuple(entries)


def compare_pair(left: Any, right: Any, values: Values | None = None) -> Entry:
    """One tensor under one key on both sides, or under two names."""
    name = (left.key,)
    names = name, name if left.key == right.key else (right.key,)
    if not isinstance(left, TensorEntry) or not isinstance(right, TensorEntry):
        if type(left) is type(right):
            return _compare_objects(left, right, values)
        return Entry("shape", *names, f"{OBJECT} on one side")
    if not is_one_kind(left, right):
        return Entry("shape", *names, KIND, None, f"{kind(left)} instead of {kind(right)}")
    if left.shape != right.shape:
        reason = PLACEHOLDER if is_placeholder(left) else "another shape"
        return Entry("shape", *names, reason, None, f"{list(left.shape)} instead of {list(right.shape)}")
    if left.dtype != right.dtype:
        return Entry("dtype", *names, f"{left.dtype} instead of {right.dtype}")
    where = ""
    for one, other in chain([(left, right)], must_be_alike(left, right)):
        if one is None or other is None or (one.shape, one.dtype) != (other.shape, other.dtype):
            return Entry("shape", *names, "of other shapes on other ranks")
        differs = None if values is None else values(one, other)
        if differs is not None:
            return Entry("value", *names, f"other values{where}", None, differs.text, differs.spread or None)
        where = " on other ranks"
    return Entry("same", *names)


def is_one_kind(left: TensorEntry, right: TensorEntry) -> bool:
    """Whether one loads where the other does, as far as their kinds go; into a tensor without data every kind goes."""
    return kind(left) == kind(right) or (is_dense(left) and is_dense(right)) or right.layout == "meta"


def _compare_objects(left: ExtraEntry, right: ExtraEntry, values: Values | None) -> Entry:
    """What is no tensor under one key on both sides: by the tensors inside it, and with `values` by all it holds."""
    names = (left.key,), (right.key,)
    mine, theirs = ({part.key: part for part in entry.tensors} for entry in (left, right))
    for key in {**mine, **theirs}:
        if key not in mine or key not in theirs:
            only = "left" if key in mine else "right"
            return Entry(
                "shape",
                *names,
                f"{OBJECT}, with other tensors inside it",
                None,
                f"{left.key}.{key}: only {only} has it",
            )
        found = compare_pair(mine[key], theirs[key], values)
        if found.status != "same":
            detail = ": ".join(filter(None, (f"{left.key}.{key}", found.detail)))
            return Entry(found.status, *names, f"{OBJECT}, with a tensor inside it: {found.reason}", None, detail)
    if values is None:
        return Entry("extra_state", *names, f"{OBJECT}: carried, not compared")
    if same_objects(left, right):
        return Entry("same", *names)
    return Entry("value", *names, f"{OBJECT}, and another object")


def renamed(left: Any, right: Any, reason: str, values: Values | None = None, hook: Hook | None = None) -> Entry:
    """One tensor under two names; a difference in shape, dtype or values weighs more than that in names."""
    found = compare_pair(left, right, values)
    if found.status in ("same", "extra_state"):
        return Entry("renamed", found.left, found.right, reason, hook)
    return replace(found, reason=f"{found.reason}, and renamed: {reason}", hook=hook)


def leftover(status: str, section: Section, keys: Iterable[str], known: Collection[str]) -> list[Entry]:
    """Keys that only one side has; one that is a second name of a tensor that both have is an alias."""
    twice = aliases(section)
    names: dict[str, set[str]] = {}
    for key, first in twice.items():
        names.setdefault(first, {first}).add(key)
    is_left = status == "unexpected"
    reason = f"only {'left' if is_left else 'right'} has it"
    entries = []
    for key in keys:
        others = [name for name in names.get(twice.get(key, key), ()) if name in known] if names else ()
        side: tuple[tuple[str, ...], tuple[str, ...]] = ((key,), ()) if is_left else ((), (key,))
        if others:
            entries.append(
                Entry("alias", *side, "a second name of a tensor that both sides have", None, f"same as {min(others)}")
            )
        else:
            entries.append(Entry(status, *side, reason))
    return entries


# What a reason says of both, and how it is mended.
COMPUTED = "computed from"
MENDED = (
    "of parameters that one side computes from others",
    "no rename makes one of the other: load the file into a model built like the one that saved it, take off or put on "
    "there what computes them (torch.nn.utils), and save its state_dict()",
)

_PARAMETRIZED = "parametrizations"
# Suffixes of the parts that are always there, and of those that may be; and what computes the parameter from them.
_SUFFIXES = (
    (("_g", "_v"), (), "weight norm"),
    (("_orig", "_mask"), (), "pruning"),
    (("_orig", "_u"), ("_v",), "spectral norm"),
)
_ENDS = tuple(needed[0] for needed, _, _ in _SUFFIXES)


def parts(keys: Collection[str]) -> dict[str, tuple[str, str]]:
    """Keys that are parts of a parameter -> its name, and what computes it from them."""
    found = {}
    for key in keys:
        if _PARAMETRIZED not in key and not key.endswith(_ENDS):
            continue
        segments = key.split(".")
        if _PARAMETRIZED in segments[:-2]:
            at = segments.index(_PARAMETRIZED)
            found[key] = ".".join((*segments[:at], segments[at + 1])), "a parametrization"
        for needed, more, how in _SUFFIXES:
            name = key.removesuffix(needed[0])
            if name != key and all(name + suffix in keys for suffix in needed):
                found |= {name + suffix: (name, how) for suffix in (*needed, *more) if name + suffix in keys}
    return found


def explain_computed(entries: Sequence[Entry]) -> tuple[Entry, ...]:
    """The entries, and why the parts and the parameters among them have no partner."""
    left, right = _alone(entries, "unexpected"), _alone(entries, "missing")
    reasons = {**_reasons(parts(left), right), **_reasons(parts(right), left)}
    if not reasons:
        return tuple(entries)
    keys = [(*entry.left, *entry.right)[0] for entry in entries]
    open_ = left | right
    return tuple(
        replace(entry, reason=reasons[key]) if key in reasons and open_.get(key) is entry else entry
        for key, entry in zip(keys, entries)
    )


def unpairable(entries: Iterable[Entry]) -> tuple[set[str], set[str]]:
    """Keys of each side that are no other tensors under other names: parts, where the other side has none."""
    entries = tuple(entries)
    known = {key for entry in entries if COMPUTED in entry.reason for key in (*entry.left, *entry.right)}
    left, right = (set(parts(_alone(entries, status))) for status in ("unexpected", "missing"))
    return known | (left if not right else set()), known | (right if not left else set())


def _alone(entries: Iterable[Entry], status: str) -> dict[str, Entry]:
    return {(entry.left or entry.right)[0]: entry for entry in entries if entry.status == status}


def _reasons(parts_of: Mapping[str, tuple[str, str]], others: Collection[str]) -> dict[str, str]:
    """Key -> its reason, for parts of one side and the parameters of the other."""
    found = {}
    for part, (name, how) in parts_of.items():
        if name in others:
            found[part] = f"the other side holds what is {COMPUTED} it ({how})"
            found[name] = f"the other side holds what it is {COMPUTED} ({how})"
    return found


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


def explain_moved(entries: Iterable[Entry], left: Section, right: Section) -> tuple[Entry, ...]:
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
