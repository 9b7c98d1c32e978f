"""A program's tensors under other names: which have one, and the records that say so, the graph's and the indexes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ckpttool.checkpoint import Section
from ckpttool.errors import Problem
from ckpttool.formats.pt2 import graph, since_2_9, until_2_8
from ckpttool.formats.pt2.program import Home, Program


def under_old_names(old: Section, new: Section) -> tuple[Section, dict[str, str]]:
    """`new` with each entry of the program's section `old` under the name that it has there, and the new name of each.

    An entry is known by its payload, whatever it is called: two tensors that change names are not two new values.
    """
    payloads = [(id(entry.payload), key) for key, entry in old.by_key().items()]
    count = Counter(payload for payload, _ in payloads)
    was = {payload: key for payload, key in payloads if count[payload] == 1}
    names = {was.get(id(entry.payload), key): key for key, entry in new.by_key().items()}
    tensors = tuple(entry.under(was.get(id(entry.payload), entry.key)) for entry in new.tensors)
    extras = tuple(entry.under(was.get(id(entry.payload), entry.key)) for entry in new.extras)
    names = {before: now for before, now in names.items() if before != now}
    return (replace(new, tensors=tensors, extras=extras) if names else new), names


def renamed(program: Program, names: Sequence[Mapping[str, str]]) -> tuple[dict[Home, bytes], list[Problem]]:
    """What the program's file says of its names with those of each section changed, and what stands against it."""
    every = {key: name for own in names for key, name in own.items()}
    if not every:
        return {}, []
    if program.compiled:
        return {}, [Problem("compiled code calls its weights by the names that they have", key) for key in every]
    text, problems = graph.renamed(program, every)
    changed = {Home(program.model): text}
    for index, own in zip(program.indexes, names):
        if own and program.layout == since_2_9.LAYOUT:
            changed[Home(index)] = since_2_9.renamed(program, index, own)
        elif own:
            inner, pickle = until_2_8.renamed(program, index, own)
            changed[Home(index, inner, "data.pkl")] = pickle
    return changed, problems
