"""An optimizer's state dict as plain dicts and lists with entries in them: from the tree of a pickle, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ckpttool.checkpoint import ExtraEntry, TensorEntry
from ckpttool.formats.pickle_tree import ABSENT, Call, Global
from ckpttool.formats.torch_tensor import Carried, Storages, entry_of, is_tensor

_SCALARS = (bool, int, float, str, bytes, type(None))
_MAX_DEPTH = 50
_MAX_REPEATS = 500_000  # of shared containers: by sharing them a small pickle can make a tree without end
_DICTS = (Global("collections", "OrderedDict"), Global("builtins", "dict"), Global("__builtin__", "dict"))


class _TooMuch(Exception):
    """The tree is larger than any optimizer's."""


def mapping_of(node: Any, storages: Storages) -> Mapping[Any, Any] | None:
    """The state dict that `node` makes; None where it is too large to be taken apart, or no mapping.

    An ``OrderedDict`` is a dict here; any other object stands as an `ExtraEntry` that carries its node.
    """
    seen: set[int] = set()
    repeats = [0]

    def value(node: Any, path: tuple[str, ...]) -> Any:
        if type(node) in _SCALARS:
            return node
        key = ".".join(path)
        if is_tensor(node):
            return entry_of(key, node, storages)
        repeats[0] += id(node) in seen
        seen.add(id(node))
        if repeats[0] > _MAX_REPEATS:
            raise _TooMuch
        if len(path) < _MAX_DEPTH:
            pairs = _pairs(node)
            if pairs is not None:
                return {name: value(part, (*path, str(name))) for name, part in pairs.items()}
            if type(node) in (list, tuple):
                return type(node)(value(part, (*path, str(index))) for index, part in enumerate(node))
        return ExtraEntry(key, Carried(node, storages))

    try:
        found = value(node, ())
    except _TooMuch:
        return None
    return found if isinstance(found, dict) else None


def _pairs(node: Any) -> dict[Any, Any] | None:
    """What a dict holds whose keys are ids or names; None for every other node."""
    pairs = node if type(node) is dict else None
    if type(node) is Call and type(node.func) is Global and node.func in _DICTS and not node.args:
        pairs = (node.pairs or {}) if node.state is ABSENT else None
    return pairs if pairs is not None and all(type(key) in (int, str) for key in pairs) else None


def node_of(value: Any, entry_node: Callable[[TensorEntry | ExtraEntry], Any]) -> Any:
    """The node that makes `value`, a mapping or a part of one; `entry_node` makes those of entries."""
    if isinstance(value, Mapping):
        return {name: node_of(part, entry_node) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(node_of(part, entry_node) for part in value)
    return entry_node(value) if isinstance(value, (TensorEntry, ExtraEntry)) else value
