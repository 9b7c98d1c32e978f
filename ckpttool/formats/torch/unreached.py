"""The account of a file's storages: each is that of a tensor in the index, or named as one that is not understood."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ckpttool.checkpoint import Storage, Unreached
from ckpttool.formats.containers.pickle_tree import Call, Persistent, PickledSet
from ckpttool.formats.torch.mappings import pairs_of, text_of
from ckpttool.formats.torch.tensors import HOLDS, Storages, storage_key
from ckpttool.keys import dotted


def unreached(
    root: Any, storages: Storages, keys: Iterable[str], find: Callable[[str], Storage]
) -> tuple[Unreached, ...]:
    """Those of the storages `keys` that no tensor of the index is made of, by where `root` refers to them.

    `find` looks one up by its key. Raises `CkptError` where it cannot be read.
    """
    left = [key for key in keys if key not in storages.reached]
    if not left:
        return ()
    places = ways(root, lambda node: storage_key(node) if type(node) is Persistent else None)
    found: dict[str, Unreached] = {}
    for key in left:
        path = places.get(key)
        name = f"data/{key}" if path is None else path or "(root)"
        if name in found:
            name = f"{name} (data/{key})"
        found[name] = Unreached(name, find(key), path is not None)
    return tuple(found.values())


def ways(root: Any, wanted: Callable[[Any], object]) -> dict[Any, str]:
    """What `wanted` says of a node, other than None -> the dotted way to the first node of which it says so."""
    found: dict[Any, str] = {}
    seen: set[int] = set()
    todo: list[tuple[str, Any]] = [("", root)]
    while todo:
        path, node = todo.pop()
        if type(node) not in HOLDS or id(node) in seen:
            continue
        seen.add(id(node))
        if (key := wanted(node)) is not None:
            found.setdefault(key, path)
        todo += [(dotted(path, name), part) for name, part in reversed(_parts(node))]
    return found


def _parts(node: Any) -> list[tuple[str, Any]]:
    """Every node inside `node` with its name there; attributes and arguments of an object stand under its own."""
    pairs = pairs_of(node)
    named = [(text_of(key) or "", value) for key, value in (pairs or {}).items()]
    named += [("", key) for key in pairs or ()]
    if isinstance(node, (list, tuple)):
        return [(str(index), part) for index, part in enumerate(node)]
    if type(node) is PickledSet:
        return [("", part) for part in node.items]
    if type(node) is Call:
        named += [("", part) for part in (node.func, *node.args, node.kwargs, node.items, node.state, node.setter)]
    return named
