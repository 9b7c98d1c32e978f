"""Tensors that shapes do not tell apart: were the values of two exchanged, loading would not notice."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable

from ckpttool.naming.inference import words
from ckpttool.naming.inference.values import NUMBER, Group, Outlined, Template, groups


def exchangeable(tensors: Iterable[Outlined]) -> tuple[tuple[str, ...], ...]:
    """Keys of tensors that have one shape in the same layers, a tuple for each shape; biases go with their weights.

    Layers themselves could be exchanged too, in every model: of that nothing is said.
    """
    found: defaultdict[Hashable, list[Group]] = defaultdict(list)
    for group in groups(tensors):
        if words.kind(group.path) in ("weight", "") and len(group.first.shape) > 0:
            found[group.signature, _stack(group.path)].append(group)
    alike = (own for own in found.values() if len(own) > 1)
    return tuple(tuple(one.key for group in own for one in group.members.values()) for own in alike)


def _stack(path: Template) -> Template:
    """The layers that a tensor is in; empty for one outside of all."""
    last = max((at for at, segment in enumerate(path) if segment == NUMBER), default=-1)
    return path[: last + 1]
