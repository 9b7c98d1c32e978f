"""Collapse the keys of repeated layers into one line: ``layers.{0-31}.attn.wq.weight``."""

from __future__ import annotations

import re
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from itertools import chain, islice, pairwise, zip_longest
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
        groups.setdefault((template, likeness), []).append((indices, key))
    for (template, likeness), rows in groups.items():
        yield from _exact(template, likeness, rows)


def patterns(keys: Iterable[str]) -> list[str]:
    """Return the keys, repeated layers as one pattern."""
    groups = collapse((key, None) for key in keys)
    return [group.pattern for group in groups]


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
    return _first(collapse((key, None) for key in distinct), len(distinct))


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
    # the number of keys on the left, the templates of all keys -> the indices of all keys
    groups: dict[tuple[int, tuple[Texts, ...], L], list[tuple[Texts, ...]]] = {}
    for left, right, likeness in pairs:
        templates, indices = zip(*map(_split, (*left, *right)))
        groups.setdefault((len(left), templates, likeness), []).append(indices)
    for (count, templates, likeness), rows in groups.items():
        by_first = [(indices[0], indices) for indices in rows]
        for group in _exact(templates[0], likeness, by_first):
            names = [group.pattern]
            for template, column in zip(templates[1:], islice(zip(*group.keys), 1, None)):
                names.append(_first_of(template, column))
            yield " + ".join(names[:count]), " + ".join(names[count:]), len(group.keys), likeness


def _first_of(template: Texts, rows: Iterable[Texts]) -> str:
    """Return the first pattern of the keys that have these indices, as `first_pattern` does."""
    distinct = dict.fromkeys(rows)
    return _first(_exact(template, None, [(row, row) for row in distinct]), len(distinct))


def _exact(
    template: Texts, likeness: L, rows: Sequence[tuple[Texts, K]]
) -> Iterator[KeyPattern[K, L]]:
    """Yield one group if the indices are a full grid; else one for each value of the first index
    that varies.
    """
    distinct = {indices for indices, _ in rows}  # a key may repeat: in two sections, or in an entry
    columns = [set(column) for column in zip(*distinct)]
    varying = [at for at, column in enumerate(columns) if len(column) > 1]
    if len(varying) > _MOST_VARYING:
        for indices, key in rows:
            yield KeyPattern(_joined(template, indices), (key,), likeness)
    elif prod(map(len, columns)) == len(distinct):
        segments = [_segment(column) for column in columns]
        yield KeyPattern(_joined(template, segments), tuple([key for _, key in rows]), likeness)
    else:
        by_value: dict[str, list[tuple[Texts, K]]] = {}
        for row in rows:
            by_value.setdefault(row[0][varying[0]], []).append(row)
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
    step = indices[1] - indices[0]
    if len(indices) > _MOST_STEPS and step > 1 and all(b - a == step for a, b in pairwise(indices)):
        return f"{','.join(map(str, indices[:3]))},...,{indices[-1]}"
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
