"""Tensors that are the parts of one on the other side: query, key and value in one projection, gate and up."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence

from ckpttool.naming.inference import words
from ckpttool.naming.inference.unpaired import kind, part
from ckpttool.naming.inference.values import Group, Template
from ckpttool.values import dataclass

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
    rows = list(_rows(parts))
    kinds: defaultdict[Hashable, list[Group]] = defaultdict(list)
    for whole in wholes if rows else ():
        kinds[kind(whole), frozenset((at, one.shape) for at, one in whole.members.items())].append(whole)
    for names, row in rows:
        fits = [whole for whole in kinds.get(_sums(row), ()) if may(whole, row[0])]
        fits = [whole for whole in fits if words.is_fused(whole.template)] or fits
        if len(fits) == 1:
            members = fits[0].members.items()
            pairs = tuple((one.key, tuple(part.members[at].key for part in row)) for at, one in members)
            yield Fused(pairs, f"shapes add up, parts in the field's order {', '.join(names)}")


def _rows(parts: Sequence[Group]) -> Iterator[tuple[tuple[str, ...], tuple[Group, ...]]]:
    """Groups beside each other that are, by name, the parts of something that layers may keep in one tensor."""
    homes: defaultdict[tuple[Template, str], dict[str, list[Group]]] = defaultdict(lambda: defaultdict(list))
    for group in parts:
        path, name = group.template, part(group)
        home = next((path[:at] for at in _part_at(path, name)), ()) if name else ()
        homes[home, kind(group)][name].append(group)
    for by_name in homes.values():
        for names in words.FUSED:
            rows = [by_name.get(name, []) for name in names]
            if all(len(row) == 1 for row in rows):
                yield names, tuple(row[0] for row in rows)
                break


def _part_at(path: Template, name: str) -> Iterator[int]:
    """Where in the path the segment stands that says the part."""
    return (at for at in range(len(path) - 1, -1, -1) if name.endswith(words.part(path[at : at + 1]) or "?"))


def _sums(row: Sequence[Group]) -> Hashable:
    """The kind and the shapes, layer by layer, of the tensor that these are the parts of; None where of none."""
    first = row[0]
    if any(part.members.keys() != first.members.keys() for part in row):
        return None
    shapes = []
    for at, one in first.members.items():
        own = [part.members[at] for part in row]
        if not all(part.shape and (part.dtype, part.shape[1:]) == (one.dtype, one.shape[1:]) for part in own):
            return None
        shapes.append((at, (sum(part.shape[0] for part in own), *one.shape[1:])))
    return kind(first), frozenset(shapes)
