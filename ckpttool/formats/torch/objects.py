"""Read pickled modules and optimizers: their tensors under the keys of a state dict."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from ckpttool.core.checkpoint import ExtraEntry, TensorEntry
from ckpttool.core.errors import CkptError
from ckpttool.core.optimizer_state import rebuilt
from ckpttool.formats.pickle_read import ABSENT, Call, PickledSet
from ckpttool.formats.torch.nodes import Steps, is_mapping, pairs_of, text_of
from ckpttool.formats.torch.tensors import Carried, Storages, entry_of, is_tensor

SLOTS = ("_parameters", "_buffers", "_modules")

_MAX_DEPTH = 200  # modules inside each other
_MAX_MODULES = 1_000_000  # a pickle shares nodes: a small one can hold a tree without end


class Slot(NamedTuple):
    """A tensor of a module: its key, the steps to its node, the node, and whether ``state_dict()`` has it."""

    key: str
    steps: Steps
    node: Any
    is_persistent: bool


def is_module(node: Any) -> bool:
    """Return whether the node makes a module."""
    return _attributes(node) is not None


def class_of(node: Any) -> str:
    """Return the name of the module's class."""
    is_older = str(node.func) in ("copy_reg._reconstructor", "copyreg._reconstructor")  # of protocols 0 and 1
    return str(node.args[0] if is_older and node.args else node.func)


def slots_of(module: Any, steps: Steps) -> Iterator[Slot]:
    """Yield the tensors of the module and its submodules, in the order of ``state_dict()``.

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
        names: Any = attributes.get("_non_persistent_buffers_set")  # a set, or the call that protocol 2 writes for one
        if type(names) is PickledSet:
            names = names.items
        elif type(names) is Call and len(names.args) == 1 and isinstance(names.args[0], (list, tuple)):
            names = names.args[0]
        else:
            names = ()
        unsaved = {name for name in names if type(name) is str}
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
    """Return the attributes of a module, and the steps to them from its node; None for any other node."""
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
    """Yield name, key and value of each entry of a slot."""
    for key, value in (pairs_of(node) or {}).items():
        name = text_of(key)
        if name is not None:
            yield name, key, value


_SCALARS = (bool, int, float, str, bytes, type(None))
_MAX_OPTIMIZER_DEPTH = 50
_MAX_REPEATS = 500_000  # of shared containers: by sharing them a small pickle can make a tree without end


class _TooMuch(Exception):
    """The tree is larger than any optimizer's."""


def mapping_of(node: Any, entries: Iterable[TensorEntry], storages: Storages) -> Mapping[Any, Any] | None:
    """Return the state dict that `node` makes; None if it is too large, or not a mapping.

    `entries` are its known tensors. Any of Python's dicts becomes a dict, any other object an `ExtraEntry` with its
    node. A list of scalars stays its node, shared as in the pickle.
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
        if len(path) < _MAX_OPTIMIZER_DEPTH:
            is_dict = type(node) is dict or (is_mapping(node) and node.state is ABSENT)
            pairs = pairs_of(node) if is_dict else None
            if pairs is not None and all(type(key) in (int, str) for key in pairs):
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


def node_of(value: Any, entry_node: Callable[[TensorEntry | ExtraEntry], Any]) -> Any:
    """Return the node that makes `value`, a mapping or a part of one; `entry_node` makes the nodes of entries.

    A value without entries is its own node, and stays shared.
    """
    return rebuilt(value, lambda path, part: entry_node(part) if isinstance(part, (TensorEntry, ExtraEntry)) else part)
