"""A checkpoint of the tree of a pickle: its sections, and what stands beside and around them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from ckpttool.checkpoint import Checkpoint, ExtraEntry, Readings
from ckpttool.formats.torch.content import content_of
from ckpttool.formats.torch.mappings import pairs_of
from ckpttool.formats.torch.tensors import Carried, Storages, is_tensor
from ckpttool.formats.torch.tree import Steps, Tree, find_sections
from ckpttool.many import many_objects
from ckpttool.values import dataclass


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
    return replace(checkpoint, readings=other if tree.dicts else None, objects=_objects(root, tree))


@dataclass(frozen=True, slots=True, eq=False)
class _Around:
    """The payload of an object with tensors inside: its content is what it is without them and the sections in it."""

    node: Any
    tree: Tree

    def content(self) -> bytes | None:
        """See `checkpoint.Comparable`."""
        sections = {id(place.node) for place in self.tree.places.values()}
        return content_of(self.node, lambda node: b"" if is_tensor(node) or id(node) in sections else None)


def _objects(root: Any, tree: Tree) -> tuple[ExtraEntry, ...]:
    """What stands beside the sections, by its path; objects around sections and tensors after them."""
    others = [ExtraEntry(path, Carried(_at(root, steps), tree.storages)) for path, steps in tree.others.items()]
    return (*others, *(ExtraEntry(path, _Around(node, tree)) for path, node in tree.outer.items()))


def _at(node: Any, steps: Steps) -> Any:
    for kind, name in steps:
        node = _CHILD[kind](node, name)
    return node


# Kind of a step -> the node that it leads to; see `_named_children`.
_CHILD: dict[str, Callable[[Any, Any], Any]] = {
    "item": lambda node, key: (pairs_of(node) or node)[key],
    "arg": lambda node, index: node.args[index],
    "kwarg": lambda node, name: node.kwargs[name],
    "element": lambda node, index: node.items[index],
    "state": lambda node, _: node.state,
}
