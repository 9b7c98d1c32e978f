"""Two state dicts, key by key.

Nothing is decided by the likeness of names: what no hook, wrapper or alias explains is missing or unexpected.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from itertools import chain
from typing import Any

from ckpttool.checkpoint import ExtraEntry, Section, TensorEntry
from ckpttool.evaluate.compare import same_objects
from ckpttool.evaluate.with_numpy import Difference
from ckpttool.formats.ranks.parts import must_be_alike
from ckpttool.formats.remarks import PLACEHOLDER, is_placeholder
from ckpttool.formats.torch.tensors import is_dense, kind
from ckpttool.names import Hook
from ckpttool.naming.alignment import unlike
from ckpttool.naming.call_variants import aliases
from ckpttool.queries.diff.reasons import segment_reason
from ckpttool.queries.diff.result import KIND, Entry

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
        return Entry("shape", *names, "a tensor on one side only")
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
            return Entry("shape", *names, "other tensors inside it", None, f"{left.key}.{key}: only {only} has it")
        found = compare_pair(mine[key], theirs[key], values)
        if found.status != "same":
            detail = ": ".join(filter(None, (f"{left.key}.{key}", found.detail)))
            return Entry(found.status, *names, f"a tensor inside it: {found.reason}", None, detail)
    if values is None:
        return Entry("extra_state", *names, "no tensor: carried, not compared")
    if same_objects(left, right):
        return Entry("same", *names)
    return Entry("value", *names, "no tensor, and another object")


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
