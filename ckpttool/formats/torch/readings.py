"""A tree's checkpoint, and the other ways to read it: which of its dicts are state dicts."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from ckpttool.checkpoint import Checkpoint, Readings
from ckpttool.formats.torch.tensors import Storages
from ckpttool.formats.torch.tree import Tree, find_sections
from ckpttool.many import many_objects


@many_objects()
def read_tree(
    root: Any, storages: Storages, made: Callable[[Tree], Checkpoint], whole: Collection[str] = ()
) -> Checkpoint:
    """What `made` makes of the sections in the tree below `root`; the dicts at the paths `whole` are state dicts.

    Raises `CkptError` on bad tensors.
    """
    tree = find_sections(root, storages, whole)
    checkpoint = made(tree)
    other = Readings(tree.dicts, checkpoint.sections, lambda paths: read_tree(root, storages, made, {*whole, *paths}))
    return replace(checkpoint, readings=other if tree.dicts else None)
