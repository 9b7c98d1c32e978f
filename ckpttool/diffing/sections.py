"""Pair the keys of two state dicts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

from ckpttool.core.checkpoint import Section
from ckpttool.diffing.causes import NAMES, Cause, Code, wrapper_cause
from ckpttool.diffing.pairs import Values, compare_pair, renamed
from ckpttool.diffing.result import Entry, only_left, only_right
from ckpttool.naming.match import aliases_with_variants, pair_different_keys
from ckpttool.naming.wrappers import evidence_in


def compare(left: Section, right: Section, values: Values | None = None) -> tuple[Entry, ...]:
    """Compare two state dicts key by key; `values` compares the values too.

    Names that differ by the segments of wrappers only are one tensor, if there is only one way to
    pair them.
    """
    left_entries, right_entries = left.by_key(), right.by_key()
    entries: list[Entry] = []
    only_in_left = []
    for key, entry in left_entries.items():
        if key in right_entries:
            entries.append(compare_pair(entry, right_entries[key], values))
        else:
            only_in_left.append(key)
    only_in_right = [key for key in right_entries if key not in left_entries]
    if not only_in_left and not only_in_right:
        return tuple(entries)
    paths = evidence_in(left).paths, evidence_in(right).paths
    pairs = pair_different_keys(paths, only_in_left, only_in_right)
    for key, other in pairs.items():
        cause = wrapper_cause(key, other)
        entries.append(renamed(left_entries[key], right_entries[other], cause, values))
    paired = set(pairs.values())
    only_in_left = [key for key in only_in_left if key not in pairs]
    only_in_right = [key for key in only_in_right if key not in paired]
    entries += leftover(only_left, left, only_in_left, {*right_entries, *pairs})
    entries += leftover(only_right, right, only_in_right, {*left_entries, *paired})
    return tuple(entries)


def without_dtypes(entries: Iterable[Entry]) -> tuple[Entry, ...]:
    """Return the entries if dtypes do not count: a tensor with another dtype and another name is
    only renamed.
    """
    return tuple(map(_only_renamed, entries))


def _only_renamed(entry: Entry) -> Entry:
    if entry.status != "dtype" or entry.cause is None or not entry.has(*NAMES):
        return entry
    of_name = next(cause for cause in entry.cause.also if cause.code in NAMES)
    others = [replace(entry.cause, also=())]
    others += [cause for cause in entry.cause.also if cause is not of_name]
    return replace(entry, status="renamed", cause=of_name.and_also(*others))


def leftover(
    only: Callable[[str], Entry], section: Section, keys: Iterable[str], other_keys: Collection[str]
) -> list[Entry]:
    """Return the entries of keys that only one side has; a second name of a tensor that both have
    (one of the `other_keys`) is an alias.
    """
    first = aliases_with_variants(section)
    if not first:
        return list(map(only, keys))
    # first name of a tensor -> all its names
    names: dict[str, set[str]] = {}
    for key, name in first.items():
        names.setdefault(name, {name}).add(key)
    entries = []
    for key in keys:
        entry = only(key)
        all_names = names.get(first.get(key, key), ())
        others = [name for name in all_names if name in other_keys]
        if others:
            detail = f"same as {min(others)}"
            entry = Entry("alias", entry.left, entry.right, Cause(Code.SECOND_NAME), None, detail)
        entries.append(entry)
    return entries
