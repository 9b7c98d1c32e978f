"""Tensors that are the parts of one on the other side: query, key and value in one projection, gate and up."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ckpttool.naming.inference import words
from ckpttool.naming.inference.values import Group, Template, Tensor

May = Callable[[Group, Group], bool]


@dataclass(frozen=True, slots=True)
class Fused:
    """One tensor and its parts, in every layer."""

    pairs: tuple[tuple[str, tuple[str, ...]], ...]
    evidence: str


def fused(wholes: Sequence[Group], parts: Sequence[Group], may: May) -> Iterator[Fused]:
    """The wholes of one side that exactly one set of parts of the other makes up.

    `may` says whether what is known of the modules around them allows a whole and a part.
    """
    for names, row in _rows(parts):
        fits = [whole for whole in wholes if may(whole, row[0]) and _adds_up(whole, row)]
        fits = [whole for whole in fits if words.is_fused(whole.template)] or fits
        if len(fits) == 1:
            members = fits[0].members.items()
            pairs = tuple((one.key, tuple(part.members[at].key for part in row)) for at, one in members)
            yield Fused(pairs, f"shapes add up, parts in the field's order {', '.join(names)}")


def _rows(parts: Sequence[Group]) -> Iterator[tuple[tuple[str, ...], tuple[Group, ...]]]:
    """Groups beside each other that are, by name, the parts of something that layers may keep in one tensor."""
    homes: defaultdict[tuple[Template, str], dict[str, list[Group]]] = defaultdict(lambda: defaultdict(list))
    for group in parts:
        name = words.part(group.template)
        home = next((group.template[:at] for at in _part_at(group.template, name)), ())
        homes[home, words.kind(group.template)][name].append(group)
    for by_name in homes.values():
        for names in words.FUSED:
            rows = [by_name.get(name, []) for name in names]
            if all(len(row) == 1 for row in rows):
                yield names, tuple(row[0] for row in rows)
                break


def _part_at(path: Template, name: str) -> Iterator[int]:
    """Where in the path the segment stands that says the part."""
    return (at for at in range(len(path) - 1, -1, -1) if name.endswith(words.part(path[at : at + 1]) or "?"))


def _adds_up(whole: Group, row: Sequence[Group]) -> bool:
    if words.kind(whole.template) != words.kind(row[0].template):
        return False
    if any(part.members.keys() != whole.members.keys() for part in row):
        return False
    return all(_sums(one, [part.members[at] for part in row]) for at, one in whole.members.items())


def _sums(whole: Tensor, parts: Sequence[Tensor]) -> bool:
    shape = whole.shape
    if not shape or not all(part.shape for part in parts) or len({part.dtype for part in parts}) > 1:
        return False
    return sum(part.shape[0] for part in parts) == shape[0] and all(part.shape[1:] == shape[1:] for part in parts)
