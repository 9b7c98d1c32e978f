"""Collapsing: the keys of repeated layers become one line, ``layers.{0-31}.attn.wq.weight``. Keys in, patterns out."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Sequence
from itertools import chain, pairwise, zip_longest
from math import prod
from typing import Generic, TypeVar

from ckpttool.core.text import number
from ckpttool.core.values import dataclass

_INDEX = re.compile(r"(?<![^.])(0|[1-9][0-9]{0,8})(?![^.])")  # as ModuleList and Sequential number their children
_MOST_VARYING = 6  # indices on one way; models have up to three, hostile files would make the search slow and deep

L = TypeVar("L", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Group(Generic[L]):
    """Keys that differ only in the indices on their way. `pattern` names exactly these keys, no more and no less."""

    pattern: str
    keys: tuple[str, ...]
    likeness: L


Template = tuple[str, ...]  # what stands before, between and behind the indices of a key
Row = tuple[tuple[str, ...], str]  # the indices of a key, and the key


def collapse(items: Iterable[tuple[str, L]]) -> list[Group[L]]:
    """Groups keys that have the same likeness (dtype, shape, ...) and differ only in whole numeric segments.

    `items` are pairs of key and likeness; groups come in the order of their first key.
    """
    groups: dict[tuple[Template, L], list[Row]] = {}
    known: dict[str, str] = {}  # an index stands in many keys, and is kept once
    for key, likeness in items:
        parts = _INDEX.split(key)  # the indices, and between them what stands around them
        template = tuple(parts[::2])
        own = groups.get((template, likeness))
        if own is None:
            own = groups[template, likeness] = []
        own.append((tuple([known.setdefault(index, index) for index in parts[1::2]]), key))
    return [group for (template, likeness), rows in groups.items() for group in _exact(template, likeness, rows)]


def first_pattern(keys: Iterable[str], all: bool = False) -> str:
    """The first pattern of the keys, and how many keys it leaves out: ``layers.{0-3}.wq (+8 more)``; ``-`` for none.

    With `all` every key by itself.
    """
    if all:
        return " + ".join(keys) or "-"
    groups = collapse((key, None) for key in dict.fromkeys(keys))
    if not groups:
        return "-"
    more = sum(len(group.keys) for group in groups[1:])
    return groups[0].pattern + (f" (+{number(more)} more)" if more else "")


def _exact(template: Template, likeness: L, rows: Sequence[Row]) -> list[Group[L]]:
    """One group where the indices are a full grid of values; else one for each value of the first that varies."""
    columns = [list(dict.fromkeys(column)) for column in zip(*(indices for indices, _ in rows))]
    varying = [i for i, column in enumerate(columns) if len(column) > 1]
    keys = tuple([key for _, key in rows])
    if len(varying) > _MOST_VARYING:
        return [Group(key, (key,), likeness) for key in keys]
    if prod(len(columns[i]) for i in varying) == len(set(keys)):  # two sections, or an entry and what is in another
        return [Group("".join(chain(*zip_longest(template, map(_segment, columns), fillvalue=""))), keys, likeness)]
    by_value: dict[str, list[Row]] = {}
    for row in rows:
        by_value.setdefault(row[0][varying[0]], []).append(row)
    return [group for own in by_value.values() for group in _exact(template, likeness, own)]


def _segment(values: Sequence[str]) -> str:
    return values[0] if len(values) == 1 else f"{{{_ranges(sorted(map(int, values)))}}}"


def _ranges(indices: Sequence[int]) -> str:
    """``0-3,8,10-11`` for sorted indices without repeats; steps of one length are ``0-28/4``."""
    step = indices[1] - indices[0]
    if len(indices) > 2 and step > 1 and all(b - a == step for a, b in pairwise(indices)):
        return f"{indices[0]}-{indices[-1]}/{step}"
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
