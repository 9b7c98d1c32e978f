"""Collapse the keys of repeated layers into one line: ``layers.{0-31}.attn.wq.weight``."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import chain, pairwise, zip_longest
from math import prod
from typing import Generic, TypeVar

from ckpttool.core.text import number
from ckpttool.core.values import dataclass

_INDEX = re.compile(r"(?<![^.])(0|[1-9][0-9]{0,8})(?![^.])")  # as ModuleList and Sequential number their children
_MOST_STEPS = 6  # indices at equal distances that are all listed
_MOST_VARYING = 6  # indices in one key; models have up to three, hostile files would make the search slow and deep

L = TypeVar("L", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Group(Generic[L]):
    """Keys that differ only in indices. `pattern` names exactly these keys."""

    pattern: str
    keys: tuple[str, ...]
    likeness: L


Template = tuple[str, ...]  # the parts of a key between its indices
Row = tuple[tuple[str, ...], str]  # the indices of a key, and the key


def collapse(items: Iterable[tuple[str, L]]) -> list[Group[L]]:
    """Group keys that have the same likeness (dtype, shape, ...) and differ only in indices, in order of their first.

    `items` are pairs of key and likeness.
    """
    groups: dict[tuple[Template, L], list[Row]] = {}
    interned: dict[str, str] = {}  # an index is in many keys, and is kept once
    for key, likeness in items:
        parts = _INDEX.split(key)
        indices = tuple([interned.setdefault(index, index) for index in parts[1::2]])
        template = tuple(parts[::2])
        rows = groups.get((template, likeness))
        if rows is None:
            rows = groups[template, likeness] = []
        rows.append((indices, key))
    return [group for (template, likeness), rows in groups.items() for group in _exact(template, likeness, rows)]


def first_pattern(keys: Iterable[str], all: bool = False) -> str:
    """Return the first pattern and how many keys it leaves out, ``layers.{0-3}.wq (+8 more)``; ``-`` for no keys.

    With `all`, return every key.
    """
    if all:
        return " + ".join(keys) or "-"
    groups = collapse((key, None) for key in dict.fromkeys(keys))
    if not groups:
        return "-"
    more = sum(len(group.keys) for group in groups[1:])
    return groups[0].pattern + (f" (+{number(more)} more)" if more else "")


def paired(pairs: Iterable[tuple[tuple[str, ...], tuple[str, ...], L]]) -> list[tuple[str, str, int, L]]:
    """Collapse keys of two sides that belong together: the patterns of both, how many pairs, and their likeness."""
    rows: list[tuple[str, str, int, L]] = []
    singles: dict[tuple[str, L], tuple[tuple[str, ...], tuple[str, ...]]] = {}
    forms: dict[object, object] = {}  # the form of a repeated layer is kept once

    def items() -> Iterator[tuple[str, tuple[int, object, L]]]:
        for left, right, likeness in pairs:
            first = (left or right)[0]
            form = tuple(tuple(_INDEX.split(key)[::2]) for side in (left, right) for key in side)
            singles[first, likeness] = left, right
            yield first, (len(left), forms.setdefault(form, form), likeness)

    for group in collapse(items()):
        likeness = group.likeness[2]
        own = [singles[key, likeness] for key in group.keys]
        old, new = (" + ".join(first_pattern(keys) for keys in zip(*(one[side] for one in own))) for side in (0, 1))
        rows.append((old, new, len(own), likeness))
    return rows


def _exact(template: Template, likeness: L, rows: Sequence[Row]) -> list[Group[L]]:
    """Return one group if the indices are a full grid; else one for each value of the first index that varies."""
    columns = [list(dict.fromkeys(column)) for column in zip(*(indices for indices, _ in rows))]
    varying = [i for i, column in enumerate(columns) if len(column) > 1]
    keys = tuple([key for _, key in rows])
    if len(varying) > _MOST_VARYING:
        return [Group(key, (key,), likeness) for key in keys]
    if prod(len(columns[i]) for i in varying) == len(set(keys)):  # a key may repeat: in two sections, or in an entry
        segments = [values[0] if len(values) == 1 else f"{{{_ranges(sorted(map(int, values)))}}}" for values in columns]
        return [Group("".join(chain(*zip_longest(template, segments, fillvalue=""))), keys, likeness)]
    by_value: dict[str, list[Row]] = {}
    for row in rows:
        by_value.setdefault(row[0][varying[0]], []).append(row)
    return [group for part in by_value.values() for group in _exact(template, likeness, part)]


def _ranges(indices: Sequence[int]) -> str:
    """Return ``0-3,8,10-11`` for sorted indices without repeats; many steps of one length are ``0,4,8,...,28``."""
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
