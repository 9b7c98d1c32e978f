"""Collapsing: the keys of repeated layers become one line, ``layers.{0-31}.attn.wq.weight``. Keys in, patterns out."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Sequence
from itertools import pairwise
from math import prod

from ckpttool.values import dataclass

_INDEX = re.compile(r"0|[1-9][0-9]{0,8}")  # as ModuleList and Sequential number their children
_MOST_VARYING = 6  # indices on one way; models have up to three, hostile files would make the search slow and deep


@dataclass(frozen=True, slots=True)
class Group:
    """Keys that differ only in the indices on their way. `pattern` names exactly these keys, no more and no less."""

    pattern: str
    keys: tuple[str, ...]


def collapse(items: Iterable[tuple[str, Hashable]]) -> list[Group]:
    """Groups keys that have the same likeness (dtype, shape, ...) and differ only in whole numeric segments.

    `items` are pairs of key and likeness; groups come in the order of their first key.
    """
    groups: dict[Hashable, list[list[str]]] = {}
    for key, likeness in items:
        parts = key.split(".")
        template = tuple(["" if part.isdecimal() and _INDEX.fullmatch(part) else part for part in parts])
        groups.setdefault((template, likeness), []).append(parts)
    return [group for rows in groups.values() for group in _exact(rows)]


def first_pattern(keys: Iterable[str]) -> str:
    """The first pattern of the keys, and how many more there are: ``layers.{0-3}.wq (+2 more)``; ``-`` for none."""
    groups = collapse((key, None) for key in dict.fromkeys(keys))
    if not groups:
        return "-"
    return groups[0].pattern + (f" (+{len(groups) - 1} more)" if len(groups) > 1 else "")


def _exact(rows: Sequence[list[str]]) -> list[Group]:
    """One group where the indices are a full grid of values; else one for each value of the first that varies."""
    columns = [list(dict.fromkeys(column)) for column in zip(*rows)]
    varying = [i for i, column in enumerate(columns) if len(column) > 1]
    keys = tuple(".".join(parts) for parts in rows)
    if len(varying) > _MOST_VARYING:
        return [Group(key, (key,)) for key in keys]
    if prod(len(columns[i]) for i in varying) == len(rows):
        return [Group(".".join(map(_segment, columns)), keys)]
    first = varying[0]
    return [group for value in columns[first] for group in _exact([parts for parts in rows if parts[first] == value])]


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
