"""An optimizer's state dict as plain dicts and lists with entries in them: from the tree of a pickle, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ckpttool.checkpoint import ExtraEntry, TensorEntry
from ckpttool.formats.containers.pickle_tree import ABSENT
from ckpttool.formats.torch.mappings import is_mapping, pairs_of
from ckpttool.formats.torch.tensors import Carried, Storages, entry_of, is_tensor
from ckpttool.optimizer_state import rebuilt

_SCALARS = (bool, int, float, str, bytes, type(None))
_MAX_DEPTH = 50
_MAX_REPEATS = 500_000  # of shared containers: by sharing them a small pickle can make a tree without end


class _TooMuch(Exception):
    """The tree is larger than any optimizer's."""


def mapping_of(node: Any, entries: Iterable[TensorEntry], storages: Storages) -> Mapping[Any, Any] | None:
    """The state dict that `node` makes; None where it is too large to be taken apart, or no mapping.

    `entries` are its tensors as far as they are known. Any kind of Python's dicts is a dict here; any other object
    stands as an `ExtraEntry` that carries its node. A list of scalars stays the node that it is, shared where the
    pickle shares it.
    """
    known = {id(entry.payload.node): entry for entry in entries if isinstance(entry.payload, Carried)}
    seen: set[int] = set()
    flat: set[int] = set()
    repeats = [0]

    def value(node: Any, path: tuple[str, ...]) -> Any:
        if type(node) in _SCALARS or id(node) in flat:
            return node
        key = ".".join(path)
        if is_tensor(node):
            entry = known.get(id(node))
            return entry if entry is not None and entry.key == key else entry_of(key, node, storages)
        repeats[0] += id(node) in seen
        seen.add(id(node))
        if repeats[0] > _MAX_REPEATS:
            raise _TooMuch
        if len(path) < _MAX_DEPTH:
            pairs = _pairs(node)
            if pairs is not None:
                return {name: value(part, (*path, str(name))) for name, part in pairs.items()}
            if type(node) in (list, tuple):
                if all(type(part) in _SCALARS for part in node):
                    flat.add(id(node))
                    return node
                return type(node)(value(part, (*path, str(index))) for index, part in enumerate(node))
        return ExtraEntry(key, Carried(node, storages))

    try:
        found = value(node, ())
    except _TooMuch:
        return None
    return found if isinstance(found, dict) else None


def _pairs(node: Any) -> dict[Any, Any] | None:
    """What a dict holds whose keys are ids or names; None for every other node."""
    is_dict = type(node) is dict or (is_mapping(node) and node.state is ABSENT)
    pairs = pairs_of(node) if is_dict else None
    return pairs if pairs is not None and all(type(key) in (int, str) for key in pairs) else None


def node_of(value: Any, entry_node: Callable[[TensorEntry | ExtraEntry], Any]) -> Any:
    """The node that makes `value`, a mapping or a part of one; `entry_node` makes those of entries.

    What holds no entry is its own node, and stays shared.
    """

    def made(part: Any) -> Any:
        return entry_node(part) if isinstance(part, (TensorEntry, ExtraEntry)) else part

    return rebuilt(value, lambda path, part: made(part))
