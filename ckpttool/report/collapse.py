"""Collapse the keys of repeated layers into one line: ``layers.{0-31}.attn.wq.weight``."""

from __future__ import annotations

import re
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from itertools import chain, pairwise, zip_longest
from math import prod
from sys import intern
from typing import Generic, TypeVar

from ckpttool.core.text import number
from ckpttool.core.values import dataclass

# as ModuleList and Sequential number their children
_INDEX = re.compile(r"\.(0|[1-9][0-9]{0,8})(?![^.])")
_MOST_STEPS = 6  # indices at equal distances that are all listed
# indices in one key; models have up to three, hostile files would make the search slow and deep
_MOST_VARYING = 6

K = TypeVar("K")
L = TypeVar("L", bound=Hashable)


@dataclass(frozen=True, slots=True)
class KeyPattern(Generic[K, L]):
    """Keys that differ only in indices. `pattern` names exactly these keys."""

    pattern: str
    keys: tuple[K, ...]
    likeness: L


Texts = tuple[str, ...]


def collapse(items: Iterable[tuple[str, L]]) -> Iterator[KeyPattern[str, L]]:
    """Yield groups of keys that have the same likeness (dtype, shape, ...) and differ only in
    indices.

    They are in the order of their first keys. `items` are pairs of key and likeness.
    """
    groups: dict[tuple[Texts, L], list[tuple[Texts, str]]] = {}
    for key, likeness in items:
        template, indices = _split(key)
        rows = groups.setdefault((template, likeness), [])
        rows.append((indices, key))
    for (template, likeness), rows in groups.items():
        yield from _exact(template, likeness, rows)


def collapse_keys(keys: Iterable[str]) -> Iterator[KeyPattern[str, None]]:
    """Collapse keys that count as alike."""
    return collapse((key, None) for key in keys)


def patterns(keys: Iterable[str]) -> list[str]:
    """Return the keys, repeated layers as one pattern."""
    return [group.pattern for group in collapse_keys(keys)]


def _split(key: str) -> tuple[Texts, Texts]:
    """Return the parts of a key between its indices, each with a dot before it, and the indices.

    An index is in many keys, and is kept once.
    """
    # a search for a dot is faster than one for the beginning of a segment
    parts = _INDEX.split(f".{key}")
    return tuple(parts[::2]), tuple(map(intern, parts[1::2]))


def first_pattern(keys: Iterable[str], all: bool = False) -> str:
    """Return the first pattern and how many keys it leaves out, ``layers.{0-3}.wq (+8 more)``;
    ``-`` for no keys.

    With `all`, return every key.
    """
    if all:
        return " + ".join(keys) or "-"
    distinct = dict.fromkeys(keys)
    return _first(collapse_keys(distinct), len(distinct))


def _first(groups: Iterator[KeyPattern[K, L]], count: int) -> str:
    first = next(groups, None)
    if first is None:
        return "-"
    more = count - len(first.keys)
    return f"{first.pattern} (+{number(more)} more)" if more else first.pattern


def paired(pairs: Iterable[tuple[Texts, Texts, L]]) -> Iterator[tuple[str, str, int, L]]:
    """Collapse keys of two sides that belong together: the patterns of both, how many pairs, and
    their likeness::

        (a.0.w,) (b.0.w,)
        (a.1.w,) (b.1.w,)   become   a.{0-1}.w  b.{0-1}.w  2

    The first key of a pair decides which pairs are collapsed.
    """
    # the number of keys on the left, the templates of all keys -> a row of indices for each pair
    groups: dict[tuple[int, tuple[Texts, ...], L], list[tuple[Texts, ...]]] = {}
    for left, right, likeness in pairs:
        templates, indices = zip(*map(_split, (*left, *right)))
        rows = groups.setdefault((len(left), templates, likeness), [])
        rows.append(indices)
    for (count, templates, likeness), rows in groups.items():
        by_first_key = [(indices[0], indices) for indices in rows]
        for group in _exact(templates[0], likeness, by_first_key):
            names = [group.pattern]
            columns = zip(*group.keys)
            next(columns)  # of the first key, whose pattern is there
            for template, column in zip(templates[1:], columns):
                names.append(_first_of(template, column))
            left_names, right_names = " + ".join(names[:count]), " + ".join(names[count:])
            yield left_names, right_names, len(group.keys), likeness


def _first_of(template: Texts, rows: Iterable[Texts]) -> str:
    """Return the first pattern of the keys that have these indices, as `first_pattern` does."""
    distinct = dict.fromkeys(rows)
    groups = _exact(template, None, [(indices, indices) for indices in distinct])
    return _first(groups, len(distinct))


def _exact(
    template: Texts, likeness: L, rows: Sequence[tuple[Texts, K]]
) -> Iterator[KeyPattern[K, L]]:
    """Yield one group if the indices are a full grid; else one for each value of the first index
    that varies.
    """
    distinct = {indices for indices, _ in rows}  # a key may repeat: in two sections, or in an entry
    columns = [set(column) for column in zip(*distinct)]
    varying = [place for place, column in enumerate(columns) if len(column) > 1]
    if len(varying) > _MOST_VARYING:
        for indices, key in rows:
            yield KeyPattern(_joined(template, indices), (key,), likeness)
        return
    if prod(map(len, columns)) == len(distinct):
        segments = [_segment(column) for column in columns]
        keys = tuple([key for _, key in rows])
        yield KeyPattern(_joined(template, segments), keys, likeness)
        return
    by_value: dict[str, list[tuple[Texts, K]]] = {}
    for row in rows:
        indices, _ = row
        by_value.setdefault(indices[varying[0]], []).append(row)
    for part in by_value.values():
        yield from _exact(template, likeness, part)


def _segment(values: Collection[str]) -> str:
    """Return the only index, or ``{0-3,8}`` for several."""
    if len(values) == 1:
        return next(iter(values))
    return f"{{{_ranges(sorted(map(int, values)))}}}"


def _joined(template: Texts, segments: Sequence[str]) -> str:
    dotted = (f".{segment}" for segment in segments)
    return "".join(chain(*zip_longest(template, dotted, fillvalue="")))[1:]


def _ranges(indices: Sequence[int]) -> str:
    """Return ``0-3,8,10-11`` for sorted indices without repeats; many steps of one length are
    ``0,4,8,...,28``.
    """
    steps = {after - before for before, after in pairwise(indices)}
    if len(indices) > _MOST_STEPS and len(steps) == 1 and 1 not in steps:
        first = ",".join(map(str, indices[:3]))
        return f"{first},...,{indices[-1]}"
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    ranges = []
    for run in runs:
        begin, end = run[0], run[-1]
        ranges.append(str(begin) if begin == end else f"{begin}-{end}")
    return ",".join(ranges)
