"""The nodes that rebuild tensors, made for one torch file: new ones from entries, copies of those of other files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any

from ckpttool import dtypes
from ckpttool.checkpoint import Storage, TensorEntry
from ckpttool.formats.containers.pickle_tree import Call, Global, Persistent, PickledSet
from ckpttool.formats.torch.tensors import HOLDS, Carried, Storages, malformed, typed_storage
from ckpttool.values import dataclass


@dataclass(slots=True, eq=False)
class Rebuilder:
    """Makes the nodes of tensors for one file; every storage keeps one key, every global is named once.

    `words` are the strings of the file's own references: a pickle names one object once, and equal ones again.
    `kept` are the dtypes by which nodes of other files, or of this one as it was, refer to storages, by their id;
    `apart` are second storages of the same bytes, for tensors of other dtypes: torch takes all references to a storage
    for the first.
    """

    keys: dict[int, str] = field(default_factory=dict)
    storages: dict[str, Storage] = field(default_factory=dict)
    globals: dict[str, Global] = field(default_factory=dict)
    words: dict[str, str] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)
    kept: dict[int, str] = field(default_factory=dict)
    apart: dict[tuple[int, str], Storage] = field(default_factory=dict)

    def node(self, entry: TensorEntry, mixed: bool = False) -> Call:
        """The node of a strided tensor on the CPU. `mixed`: tensors of other dtypes look at the same storage."""
        assert entry.storage is not None
        row, storage = dtypes.BY_NAME[entry.dtype], entry.storage
        kept = self.kept.get(id(storage))
        if kept in ("uint8", entry.dtype):
            plain = kept == entry.dtype
        else:
            if kept is not None:
                storage, mixed = self.apart.setdefault((id(storage), entry.dtype), Storage(storage.data)), False
            plain = row.storage is not None and not mixed and storage.nbytes % row.itemsize == 0
        reference = self.reference(storage, row if plain else None)
        args = (reference, entry.offset, entry.shape, entry.stride, False, self._hooks())
        if plain:
            return Call(self._global("torch._utils", "_rebuild_tensor_v2"), args)
        return Call(self._global("torch._utils", "_rebuild_tensor_v3"), (*args, self._global("torch", entry.dtype)))

    def reference(self, storage: Storage, row: dtypes.DType | None) -> Persistent:
        """The reference to a storage of the file, typed by `row` of the table or untyped."""
        name = row.storage if row else None
        kind = self._global("torch", name) if name else self._global("torch.storage", "UntypedStorage")
        numel = storage.nbytes // (row.itemsize if row else 1)
        return Persistent((self._word("storage"), kind, self.key(storage), self._word("cpu"), numel))

    def key(self, storage: Storage) -> str:
        """The key of the storage's record in the file: the one that it has, or the first number that is free."""
        key = self.keys.get(id(storage))
        if key is None:
            number = len(self.taken)
            while str(number) in self.taken:
                number += 1
            key = str(number)
            self.adopt(storage, key)
        return key

    def adopt(self, storage: Storage, key: str) -> None:
        """From now on `storage` is called `key`."""
        self.keys[id(storage)] = key
        self.storages[key] = storage
        self.taken.add(key)

    def keep(self, storages: Storages) -> None:
        """Notes of which dtype nodes that stay refer to storages, or that are moved from another file."""
        found = ((key, storage) for key, storage in storages.found.items() if key in storages.dtypes)
        self.kept.update((id(storage), storages.dtypes[key]) for key, storage in found)

    def learn(self, storages: Storages) -> None:
        """Takes over the keys and words of the file whose tree is changed."""
        for key, storage in storages.found.items():
            self.adopt(storage, key)
        nodes = (carried.node for carried in storages.carried.values())
        first = next((node.args[0] for node in nodes if node.args), None)
        if type(first) is Persistent:
            self.words.update((part, part) for part in reversed(first.id) if type(part) is str)

    def _word(self, word: str) -> str:
        return self.words.setdefault(word, word)

    def parameter(self, data: Any, requires_grad: bool) -> Call:
        """The node of a Parameter of the tensor that the node `data` makes; torch does so for subclasses too."""
        return Call(self._global("torch._utils", "_rebuild_parameter"), (data, requires_grad, self._hooks()))

    def _hooks(self) -> Call:
        return Call(self._global("collections", "OrderedDict"), ())

    def _global(self, module: str, name: str) -> Global:
        return self.globals.setdefault(f"{module}.{name}", Global(module, name))

    def transplant(self, carried: Carried) -> Any:
        """A copy of a node of another file, its storage references changed to this file's keys."""
        return _copy(carried.node, lambda reference: self._moved(reference, carried.storages), {}, 0)

    def _moved(self, reference: Persistent, storages: Storages) -> Persistent:
        storage = typed_storage(reference, storages)[1]
        word, kind, _, *rest = reference.id
        return Persistent((word, self._global(kind.module, kind.name), self.key(storage), *rest))


def renumbered(root: Any, numbers: Mapping[str, str]) -> Any:
    """The tree with its storages under other keys."""

    def moved(reference: Persistent) -> Persistent:
        word, kind, key, *rest = reference.id
        return Persistent((word, kind, numbers[key], *rest))

    return with_references(root, moved)


def with_references(root: Any, moved: Callable[[Persistent], Persistent]) -> Any:
    """The tree with other references to its storages."""
    return _copy(root, moved, {}, 0)


def is_parameter(node: Any) -> bool:
    """True for a node that says itself that its tensor is a Parameter."""
    return type(node) is Call and type(node.func) is Global and node.func.name.startswith("_rebuild_parameter")


def _copy(node: Any, moved: Callable[[Persistent], Persistent], done: dict[int, Any], depth: int) -> Any:
    kind = type(node)
    if kind not in HOLDS:
        return node
    if id(node) in done:
        return done[id(node)]
    if depth > 200:
        raise malformed("an object is nested too deep to be moved to another file")

    def copy(part: Any) -> Any:
        return _copy(part, moved, done, depth + 1)

    made: Any
    if kind is Persistent:
        made = moved(node)
    elif kind is tuple:
        made = tuple(map(copy, node))
    elif kind is list:
        made = done[id(node)] = []
        made.extend(map(copy, node))
    elif kind is dict:
        made = done[id(node)] = {}
        made.update((copy(key), copy(value)) for key, value in node.items())
    elif kind is PickledSet:
        made = PickledSet(copy(node.items), node.frozen)
    else:
        made = done[id(node)] = Call(copy(node.func), copy(node.args), node.how, copy(node.kwargs))
        made.items, made.pairs = copy(node.items), copy(node.pairs)
        made.state, made.setter = copy(node.state), copy(node.setter)
    done[id(node)] = made
    return made
