"""Pickled modules (``torch.save(model)``): their tensors under the keys of ``state_dict()``, their classes never run.

What a module is made of stands in its attributes ``_parameters``, ``_buffers`` and ``_modules``
(torch/nn/modules/module.py). Hooks and overridden methods are code, and code is not in the file: what they would rename
or leave out keeps the name that it has in the module.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from ckpttool.errors import CkptError
from ckpttool.formats.containers.pickle_tree import Call, PickledSet
from ckpttool.formats.torch.mappings import pairs_of, text_of
from ckpttool.formats.torch.tensors import is_tensor

SLOTS = ("_parameters", "_buffers", "_modules")

_MAX_DEPTH = 200  # modules inside each other
_MAX_MODULES = 1_000_000  # a pickle shares nodes: a small one can hold a tree without end

Steps = tuple[tuple[str, Any], ...]


class Slot(NamedTuple):
    """A tensor of a module: its key, the steps to its node, the node, and whether ``state_dict()`` has it."""

    key: str
    steps: Steps
    node: Any
    is_persistent: bool


def is_module(node: Any) -> bool:
    """True for a node that makes a module."""
    return _attributes(node) is not None


def class_of(node: Any) -> str:
    """The name of the module's class."""
    is_older = str(node.func) in ("copy_reg._reconstructor", "copyreg._reconstructor")  # of protocols 0 and 1
    return str(node.args[0] if is_older and node.args else node.func)


def slots_of(module: Any, steps: Steps) -> Iterator[Slot]:
    """The tensors of the module and of those inside it, in the order of ``state_dict()``.

    Raises `CkptError` for more modules than a model has.
    """
    todo: list[tuple[tuple[str, ...], Steps, Any]] = [((), steps, module)]
    left = _MAX_MODULES
    while todo:
        path, at, node = todo.pop()
        left -= 1
        if left < 0 or len(path) > _MAX_DEPTH:
            raise CkptError("a pickled module holds too many others", hint="the file is damaged or hostile")
        found = _attributes(node)
        if found is None:
            continue
        attributes, more = found
        unsaved = _names(attributes.get("_non_persistent_buffers_set"))
        for kind in SLOTS[:2]:
            for name, key, value in _named(attributes[kind]):
                if is_tensor(value):
                    place = (*at, *more, ("item", kind), ("item", key))
                    yield Slot(".".join((*path, name)), place, value, kind == "_parameters" or name not in unsaved)
        inside = [
            ((*path, name), (*at, *more, ("item", "_modules"), ("item", key)), value)
            for name, key, value in _named(attributes["_modules"])
        ]
        todo += reversed(inside)


def _attributes(node: Any) -> tuple[dict[Any, Any], Steps] | None:
    """The attributes of a module, and the steps to them from its node; None for any other node."""
    if type(node) is not Call:
        return None
    if _are_attributes(node.state):
        return node.state, (("state", None),)
    if type(node.state) is tuple and node.state and _are_attributes(node.state[0]):  # of a class with __slots__
        return node.state[0], (("state", None), ("item", 0))
    for index, part in enumerate(node.args):  # a GraphModule is made of them
        if _are_attributes(part):
            return part, (("arg", index),)
    return None


def _are_attributes(node: Any) -> bool:
    return type(node) is dict and all(pairs_of(node.get(name)) is not None for name in SLOTS)


def _named(node: Any) -> Iterator[tuple[str, Any, Any]]:
    """Name, key and value of each entry of a slot."""
    for key, value in (pairs_of(node) or {}).items():
        name = text_of(key)
        if name is not None:
            yield name, key, value


def _names(node: Any) -> set[str]:
    """The strings in a set."""
    parts: Any = ()
    if type(node) is PickledSet:
        parts = node.items
    elif type(node) is Call and len(node.args) == 1 and isinstance(node.args[0], (list, tuple)):
        parts = node.args[0]
    return {part for part in parts if type(part) is str}
