"""Which entries of a checkpoint are made by dangerous imports, so that they can be left out or carried on knowingly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.keys import dotted
from ckpttool.core.pickle_imports import DANGEROUS, verdict
from ckpttool.formats.pickle_read import Global
from ckpttool.formats.torch.tensors import HOLDS


def entries_with_code(checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    """Yield the dotted path of each entry that a dangerous import makes, and the name of the import."""
    others = set(checkpoint.others)
    found = [(extra.key, extra.payload) for extra in checkpoint.objects if extra.key in others]
    for section in checkpoint.sections:
        found += [(dotted(section.path, entry.key), entry.payload) for entry in section.entries]
    seen: set[int] = set()
    for path, payload in found:
        for name in _code_in(getattr(payload, "node", None), seen):
            yield path, name


def _code_in(root: Any, seen: set[int]) -> Iterator[str]:
    todo = [root]
    while todo:
        node = todo.pop()
        if type(node) is Global and verdict(node.module, node.name) == DANGEROUS:
            yield str(node)
        elif type(node) in HOLDS and id(node) not in seen:
            seen.add(id(node))
            todo.extend(HOLDS[type(node)](node))
