"""Find the sections of a torch file: state dicts, optimizers and modules in the tree of its
pickle.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from functools import partial
from itertools import repeat
from types import MappingProxyType
from typing import Any, NamedTuple

from ckpttool.containers.arrays import array_entry, is_array
from ckpttool.containers.nodes import (
    Steps,
    children,
    content_of,
    is_mapping,
    metadata_of,
    pairs_of,
    text_of,
)
from ckpttool.containers.pickle_read import ABSENT, Call, Persistent, Pickle, PickledSet
from ckpttool.containers.tensors import Carried, Storages, entry_of, is_tensor, storage_key
from ckpttool.containers.zip_read import Archive
from ckpttool.core.checkpoint import (
    Checkpoint,
    ExtraEntry,
    Payload,
    Readings,
    Section,
    TensorEntry,
    Unreached,
)
from ckpttool.core.errors import CkptError
from ckpttool.core.optimizer_state import looks_flat, rebuilt
from ckpttool.core.tables import present
from ckpttool.core.text import dotted, free, prefix_of, title_of
from ckpttool.core.values import dataclass, many_objects

# names of lists of parameters, of torch_ema and of EMAModel in diffusers
LISTS = ("shadow_params",)
SLOTS = ("_parameters", "_buffers", "_modules")

Path = tuple[str, ...]  # of a node: its dotted path, in parts
Child = tuple[Path, Steps, Any]  # a node inside of another one, with the way to it

_MAX_MODULE_DEPTH = 200  # modules inside each other
# with their tensors; a pickle shares nodes: a small one can hold a tree without end
_MAX_MODULES = 1_000_000
_GRAPH_MODULE_ARGS = 3  # of the call that makes a GraphModule; its attributes are one of them


class ModuleTensor(NamedTuple):
    """A tensor of a module: its key, the steps to its node, the node, and whether ``state_dict()``
    has it.
    """

    key: str
    steps: Steps
    node: Any
    is_persistent: bool


def is_module(node: Any) -> bool:
    return _attributes(node) is not None


def class_of(node: Any) -> str:
    # of protocols 0 and 1
    is_older = str(node.func) in ("copy_reg._reconstructor", "copyreg._reconstructor")
    return str(node.args[0] if is_older and node.args else node.func)


def slots_of(module: Any, steps: Steps) -> Iterator[ModuleTensor]:
    """Yield the tensors of the module and its submodules, in the order of ``state_dict()``.

    Raises `CkptError` for more modules than a model has.
    """
    todo: list[Child] = [((), steps, module)]
    left = _MAX_MODULES
    while todo:
        path, at, node = todo.pop()
        attributes, steps_inside = _attributes(node) or ({}, ())
        slots = {slot: pairs_of(attributes.get(slot)) or {} for slot in SLOTS}
        left -= 1 + len(slots["_parameters"]) + len(slots["_buffers"])
        if left < 0 or len(path) > _MAX_MODULE_DEPTH:
            raise CkptError(
                "a pickled module holds too many others", hint="the file is damaged or hostile"
            )
        inside = (*at, *steps_inside)
        unsaved = _texts_in(attributes.get("_non_persistent_buffers_set"))
        for slot in ("_parameters", "_buffers"):
            for name, key, value in _named(slots[slot]):
                if not is_tensor(value):
                    continue
                place = (*inside, ("item", slot), ("item", key))
                is_saved = slot == "_parameters" or name not in unsaved
                yield ModuleTensor(".".join((*path, name)), place, value, is_saved)
        submodules = list(_named(slots["_modules"]))
        for name, key, submodule in reversed(submodules):
            place = (*inside, ("item", "_modules"), ("item", key))
            todo.append(((*path, name), place, submodule))


def _texts_in(node: Any) -> set[str]:
    """Return the texts in a set, or in the call that protocol 2 writes for one."""
    parts: Any = ()
    if type(node) is PickledSet:
        parts = node.items
    elif type(node) is Call and len(node.args) == 1 and type(node.args[0]) in (list, tuple):
        parts = node.args[0]
    return {part for part in parts if type(part) is str}


def _attributes(node: Any) -> tuple[dict[Any, Any], Steps] | None:
    """Return the attributes of a module, and the steps to them from its node; None for any other
    node.
    """
    if type(node) is not Call:
        return None
    if _are_attributes(node.state):
        return node.state, (("state", None),)
    # of a class with __slots__
    if type(node.state) is tuple and node.state and _are_attributes(node.state[0]):
        return node.state[0], (("state", None), ("item", 0))
    for index, part in enumerate(node.args[:_GRAPH_MODULE_ARGS]):
        if _are_attributes(part):
            return part, (("arg", index),)
    return None


def _are_attributes(node: Any) -> bool:
    if type(node) is not dict:
        return False
    slots = map(node.get, SLOTS)
    return None not in map(pairs_of, slots)


def _named(slot: Mapping[Any, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield name, key and value of each entry of a slot."""
    for key, value in slot.items():
        name = text_of(key)
        if name is not None:
            yield name, key, value


_SCALARS = frozenset((bool, int, float, str, bytes, type(None)))
_MAX_OPTIMIZER_DEPTH = 50
# of shared containers and their parts: a small pickle can share them without end
_MAX_REPEATS = 500_000


class _TooMuch(Exception): ...


def mapping_of(
    node: Any, entries: Iterable[TensorEntry], storages: Storages
) -> Mapping[Any, Any] | None:
    """Return the state dict that `node` makes; None if it is too large, or not a mapping.

    `entries` are the tensors in it that have entries. Any of Python's dicts becomes a dict, any
    other object an `ExtraEntry` with its node. A list of scalars stays its node, shared as in the
    pickle.
    """
    by_node: dict[int, TensorEntry] = {}
    for entry in entries:
        if isinstance(entry.payload, Carried):
            by_node[id(entry.payload.node)] = entry
    seen: set[int] = set()
    flat: set[int] = set()
    repeats = 0

    def value(node: Any, path: Path) -> Any:
        nonlocal repeats
        if type(node) in _SCALARS or id(node) in flat:
            return node
        key = ".".join(path)
        if is_tensor(node):
            entry = by_node.get(id(node))
            is_same = entry is not None and entry.key == key
            return entry if is_same else entry_of(key, node, storages)
        is_list = type(node) in (list, tuple)
        if id(node) in seen:
            repeats += 1 + len(pairs_of(node) or (node if is_list else ()))
        seen.add(id(node))
        if repeats > _MAX_REPEATS:
            raise _TooMuch
        if len(path) >= _MAX_OPTIMIZER_DEPTH:
            return ExtraEntry(key, Carried(node, storages))
        if is_list and _SCALARS.issuperset(map(type, node)):
            flat.add(id(node))
            return node
        if is_list:
            parts = [value(part, (*path, str(index))) for index, part in enumerate(node)]
            return type(node)(parts)
        pairs = _dict_pairs(node)
        if pairs is not None:
            return {name: value(part, (*path, str(name))) for name, part in pairs.items()}
        return ExtraEntry(key, Carried(node, storages))

    try:
        mapping = value(node, ())
    except _TooMuch:
        return None
    return mapping if isinstance(mapping, dict) else None


def _dict_pairs(node: Any) -> dict[Any, Any] | None:
    """Return the pairs of one of Python's dicts with numbers and strings as keys; None for any
    other node.
    """
    if type(node) is not dict and (not is_mapping(node) or node.state is not ABSENT):
        return None
    pairs = pairs_of(node)
    if pairs is not None and {int, str}.issuperset(map(type, pairs)):
        return pairs
    return None


def node_of(value: Any, entry_node: Callable[[TensorEntry | ExtraEntry], Any]) -> Any:
    """Return the node that makes `value`, a mapping or a part of one; `entry_node` makes the nodes
    of entries.

    A value without entries is its own node, and stays shared.
    """

    def node(_path: object, part: Any) -> Any:
        return entry_node(part) if isinstance(part, (TensorEntry, ExtraEntry)) else part

    return rebuilt(value, node)


_MAX_DEPTH = 200  # containers inside each other; below that nothing is looked for

# A pickle can share: a few bytes put a section at any number of places. Each 16 bytes of the pickle
# (a tensor takes 110) allow one entry at a further place; 10,000 entries are always allowed.
_PICKLED, _LEAST_AGAIN = 16, 10_000

# Bytes of memory, from above: for a container that was looked into, for each step of a path, an
# entry, a section.
_WALKED, _STEP, _ENTRY, _SECTION = 150, 16, 500, 4000

Adder = Callable[["Tree", Any, Path, Steps], None]  # adds the section that a node is


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """The place of a section: the steps to its node, and unless it is a state dict those to each of
    its tensors.
    """

    section: Section
    steps: Steps
    node: Any = None
    tensors: Mapping[str, Steps] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Tensors:
    """Tensors below some nodes, each under another key, with the steps to it.

    `listed` are the ids of tensors that have another place already. Containers whose ids are `seen`
    or `barren` are not looked into: that was done, or they have no tensor to list.
    """

    storages: Storages
    entries: list[TensorEntry] = field(default_factory=list)
    steps: dict[str, Steps] = field(default_factory=dict)
    listed: set[int] = field(default_factory=set)
    seen: set[int] = field(default_factory=set)
    barren: set[int] = field(default_factory=set)

    def add(self, key: str, node: Any, steps: Steps) -> None:
        """Add the tensor under the key, or the first free one like it."""
        key = free(key, self.steps)
        self.storages.memory.take(_ENTRY + len(key) + _STEP * len(steps))
        self.entries.append(entry_of(key, node, self.storages))
        self.steps[key] = steps

    def find(self, node: Any, path: Path, steps: Steps) -> None:
        """Add all tensors below the node, in whatever containers."""
        if is_tensor(node):
            if id(node) not in self.listed:
                self.add(".".join(path), node, steps)
            return
        if not isinstance(node, (dict, list, tuple, Call)) or len(steps) > _MAX_DEPTH:
            return
        if id(node) in self.seen or id(node) in self.barren:
            return
        self.seen.add(id(node))
        before = len(self.entries)
        self.find_inside(node, path, steps)
        if before == len(self.entries):
            self.barren.add(id(node))

    def find_inside(self, node: Any, path: Path, steps: Steps) -> None:
        """Add all tensors in the parts of the node."""
        for child_path, child_steps, child in _named_children(self.storages, node, path, steps):
            self.find(child, child_path, child_steps)


@dataclass(slots=True, eq=False)
class Tree:
    """The contents of a pickle's tree, and the state of the walk through it.

    Attributes:
        storages: The storages of the file.
        places: Section path -> its place.
        others: Path -> everything else, with the steps to it.
        rings: The places that refer back to a container around them: the steps there, and to that
            container.
        outer: Path -> a pickled object that has sections or tensors in it.
        dicts: Path -> the keys of what could be a state dict.
        notes: Sentences on sections that are not listed at each place.
        unreached: Storages that no tensor is made of, as the reader of the file lists them.
        whole: Paths of dicts that are read as state dicts.
        loose: Tensors that are in no section.
        seen: Ids of the containers that were walked.
        around: By id, the containers that are being walked.
        added: By id of what is or holds a section: what adds it, and the entries that looking at it
            again costs.
        noted: Ids of dicts inside entries of state dicts that are in `dicts`.
        of_tensors: By id of a mapping, whether tensors are in it.
        barren: Ids of containers without any tensor.
        again_left: Entries of sections at further places that are still allowed.
        plain_left: Nodes that may still be turned into plain values.
    """

    storages: Storages
    loose: _Tensors
    whole: Collection[str] = ()
    places: dict[str, Place] = field(default_factory=dict)
    others: dict[str, tuple[Steps, Any]] = field(default_factory=dict)
    rings: dict[str, tuple[Steps, Steps]] = field(default_factory=dict)
    outer: dict[str, Any] = field(default_factory=dict)
    dicts: dict[str, Sequence[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    unreached: tuple[Unreached, ...] = ()
    seen: set[int] = field(default_factory=set)
    around: dict[int, Steps] = field(default_factory=dict)
    added: dict[int, tuple[Adder | None, int]] = field(default_factory=dict)
    noted: set[int] = field(default_factory=set)
    of_tensors: dict[int, bool] = field(default_factory=dict)
    barren: set[int] = field(default_factory=set)
    again_left: int = 100_000
    plain_left: int = 1_000_000


def find_sections(root: Any, storages: Storages, whole: Collection[str] = ()) -> Tree:
    """Return the sections of the tree, loose tensors as a last one (``other``). Raises `CkptError`
    on bad tensors.

    The dicts at the dotted paths `whole` are read as state dicts.
    """
    tree = Tree(storages, _Tensors(storages), whole)
    allowed = max(_LEAST_AGAIN, storages.pickled // _PICKLED)
    tree.again_left = min(tree.again_left, allowed)
    if not _walk(tree, root, (), (), foreign=False):
        for path, steps, node in _named_children(storages, root, (), ()):
            tree.others[".".join(path)] = steps, node
    if tree.loose.entries:
        name = "(other)" if "" in tree.places else ""
        section = Section(name, "other", tuple(tree.loose.entries))
        tree.places[name] = Place(section, (), None, tree.loose.steps)
    return tree


def _walk(tree: Tree, node: Any, path: Path, steps: Steps, foreign: bool) -> bool:
    """Find the sections and tensors in `node`; False if there are none. `foreign`: inside a pickled
    object.
    """
    if is_tensor(node):
        tree.loose.add(".".join(path), node, steps)
        return True
    if len(steps) > _MAX_DEPTH or not isinstance(node, (dict, list, tuple, Call)):
        return False
    if id(node) in tree.seen:
        return _add_again(tree, node, path, steps, foreign)
    tree.seen.add(id(node))
    _take_path(tree, path)
    before = len(tree.places)
    add = _recognized(tree, node, ".".join(path), foreign)
    has_sections = _add(tree, add, node, path, steps, foreign)
    if len(tree.places) > before:
        last = next(reversed(tree.places.values())).section
        tree.added[id(node)] = add, max(1, len(last.entries), _count_inside(node))
    return has_sections


def _add(tree: Tree, add: Adder | None, node: Any, path: Path, steps: Steps, foreign: bool) -> bool:
    """Add the section that `node` is, by `add`, or the sections in it; False if there are none."""
    if add is not None:
        add(tree, node, path, steps)
        return True
    is_foreign = foreign or (isinstance(node, Call) and pairs_of(node) is None)
    rest: list[tuple[Path, tuple[Steps, Any]]] = []
    has_sections = False
    tree.around[id(node)] = steps
    for child_path, child_steps, child in _named_children(tree.storages, node, path, steps):
        if _walk(tree, child, child_path, child_steps, is_foreign):
            has_sections = True
        elif not is_foreign:
            tree.storages.memory.take(_WALKED + _STEP * len(child_steps))
            rest.append((child_path, (child_steps, child)))
    del tree.around[id(node)]
    if not has_sections:
        return False
    if is_foreign and not foreign:
        tree.outer[".".join(path)] = node
    tree.storages.memory.take(len(rest) * (_WALKED + sum(map(len, path))))
    for child_path, place in rest:
        tree.others[free(".".join(child_path), tree.others)] = place
    return True


def _add_again(tree: Tree, node: Any, path: Path, steps: Steps, foreign: bool) -> bool:
    """Add a node again that is or holds a section at another place; False for others: they stay at
    their first place.
    """
    if id(node) in tree.around:
        tree.rings[free(".".join(path), tree.rings)] = steps, tree.around[id(node)]
        return False
    add, count = tree.added.get(id(node), (None, 0))
    if not count or (add is not None and foreign and metadata_of(node) is None):
        return False
    if not _spend_again(tree, path, count):
        return False
    _take_path(tree, path)
    return _add(tree, add, node, path, steps, foreign)


def _take_path(tree: Tree, path: Path) -> None:
    """Count the memory of a place: a tuple of its parts, and its text, as a path and in the keys of
    a report.
    """
    tree.storages.memory.take(_WALKED + 2 * sum(map(len, path)) + _STEP * len(path))


def _spend_again(tree: Tree, path: Path, count: int) -> bool:
    """Look at `count` entries again; False if no more are allowed, and a note says where that
    begins.
    """
    left = tree.again_left
    tree.again_left -= count
    if left >= 0 > tree.again_left:
        note = f"from {'.'.join(path)} on, a section at several places is listed at one of them"
        tree.notes.append(note)
    return tree.again_left >= 0


def _recognized(tree: Tree, node: Any, path: str, foreign: bool) -> Adder | None:
    """Return the function that adds the node as a section; None for a container that may hold
    sections. The keys of a mapping that could be a state dict are noted in `tree.dicts`.
    """
    names = _names(node)
    if path in tree.whole and names is not None and not foreign:
        return _add_state_dict
    if is_module(node):
        return _add_module
    if path.rpartition(".")[2] in LISTS and _is_list_of_tensors(node) and not foreign:
        return _add_list
    if names and not foreign and _are_arrays(node):
        return _add_arrays
    is_optimizer = _is_optimizer(node)
    prefix = prefix_of(path)
    is_around = any(whole.startswith(prefix) for whole in tree.whole)
    is_candidate = names is not None and not is_optimizer and not is_around
    if is_candidate and _is_state_dict(tree, node, names or (), foreign):
        return _add_state_dict
    if names and not foreign:
        tree.storages.memory.take(_WALKED + len(path) + 8 * len(names))
        tree.dicts.setdefault(path, names)
    return _add_optimizer if is_optimizer else None


def _named_children(storages: Storages, node: Any, path: Path, steps: Steps) -> Iterator[Child]:
    """Yield path, steps and node of the nodes inside. A pickled object's attributes have the path
    of the object.
    """
    storages.look(_count_inside(node))
    for kind, parts in _parts_by_kind(node):
        for key, value in parts:
            name = text_of(key) or str(key)
            yield (*path, name), (*steps, (kind, key)), value
    if isinstance(node, Call) and node.state is not ABSENT:
        yield path, (*steps, ("state", None)), node.state


def _parts_by_kind(node: Any) -> Iterator[tuple[str, Iterable[tuple[Any, Any]]]]:
    """Yield the nodes inside by kind, each with its key or index."""
    yield "item", (pairs_of(node) or {}).items()
    if isinstance(node, (list, tuple)):
        yield "item", enumerate(node)
    if isinstance(node, Call):
        yield "arg", enumerate(node.args)
        yield "kwarg", (node.kwargs or {}).items()
        yield "element", enumerate(node.items or ())


def _count_inside(node: Any) -> int:
    """Return how many nodes are inside of the node."""
    if isinstance(node, (list, tuple)):
        return len(node)
    count = len(pairs_of(node) or ())
    if isinstance(node, Call):
        count += len(node.args) + len(node.kwargs or ()) + len(node.items or ())
        count += node.state is not ABSENT
    return count


# State dicts


def _is_optimizer(node: Any) -> bool:
    """Return whether it is the state dict of an optimizer, flattened or not."""
    pairs = pairs_of(node)
    if pairs is None:
        return False
    if looks_flat(list(pairs)):
        return True
    return pairs_of(pairs.get("state")) is not None and type(pairs.get("param_groups")) is list


def _names(node: Any) -> list[str] | None:
    """Return the keys of a mapping as text; None if some have no text, or two have the same."""
    pairs = pairs_of(node)
    if pairs is None:
        return None
    names = [text_of(key) for key in pairs]
    named = present(names)
    return named if len(set(named)) == len(names) else None


# bytes of torch's generators: of the CPU, and of CUDA before and since 2.0
_RANDOM_STATES = ((5056,), (816,), (16,))
_SETTINGS = (bool, int, float, str, type(None))


def _may_be_random_state(entry: TensorEntry) -> bool:
    """Return True for the dtype and shape of a random generator's state."""
    return entry.dtype == "uint8" and entry.shape in _RANDOM_STATES


def _is_state_dict(tree: Tree, node: Any, names: Sequence[str], foreign: bool) -> bool:
    """Return whether a mapping has ``_metadata``, or holds tensors and no section of tensors.

    A configuration with a tensor among its settings is not one, nor are the states of random
    generators.
    """
    if metadata_of(node) is not None:
        return True
    if foreign:
        return False
    values = list((pairs_of(node) or {}).values())
    tensors = {name: value for name, value in zip(names, values) if is_tensor(value)}
    settings = sum(type(value) in _SETTINGS for value in values)
    if not tensors or settings > len(tensors):
        return False
    entries = (entry_of(name, value, tree.storages) for name, value in tensors.items())
    if all(map(_may_be_random_state, entries)):
        return False
    # Next to `encoder.weight`, a dict `encoder.cache` is an entry of the module `encoder`. A dict
    # of tensors with a name of one word would be a section, and this mapping the one around it.
    has_paths = any("." in name for name in tensors)
    for name, value in zip(names, values):
        is_path = has_paths and "." in name
        if is_path or name.endswith("_extra_state"):
            continue
        if _holds_tensors(tree, value):
            return False
    return True


def _holds_tensors(tree: Tree, node: Any) -> bool:
    pairs = pairs_of(node)
    if pairs is None:
        return False
    if id(node) not in tree.of_tensors:
        tree.of_tensors[id(node)] = any(map(is_tensor, pairs.values()))
    return tree.of_tensors[id(node)]


def _add_section(
    tree: Tree,
    section: Section,
    path: Path,
    steps: Steps,
    node: Any,
    tensors: Mapping[str, Steps] = MappingProxyType({}),
) -> None:
    """Add the section under its path, or the first free one; `tensors` as in `Place`."""
    section = replace(section, path=free(".".join(path), tree.places))
    tree.places[section.path] = Place(section, steps, node, tensors)


def _add_state_dict(tree: Tree, node: Any, path: Path, steps: Steps) -> None:
    pairs = pairs_of(node) or {}
    tree.storages.memory.take(_SECTION + _STEP * len(steps) + _ENTRY * len(pairs))
    tensors: list[TensorEntry] = []
    extras: list[ExtraEntry] = []
    for key, value in pairs.items():
        name = str(text_of(key))
        if is_tensor(value):
            tensors.append(entry_of(name, value, tree.storages))
        else:
            extras.append(_extra(tree, name, value))
            _note_dicts(tree, value, (*path, name))
    modules = metadata_of(node)
    if modules is not None:
        modules = dict(modules)
    section = Section("", "state_dict", tuple(tensors), tuple(extras), modules)
    _add_section(tree, section, path, steps, node)


def _note_dicts(tree: Tree, node: Any, path: Path) -> None:
    """Note the dicts inside an entry of a state dict, each once: a model may be saved in one of
    them.
    """
    if id(node) in tree.noted or len(path) > _MAX_DEPTH:
        return
    tree.noted.add(id(node))
    tree.storages.memory.take(_WALKED + sum(map(len, path)))
    names = _names(node)
    if not names:
        return
    tree.dicts.setdefault(".".join(path), names)
    for name, value in zip(names, (pairs_of(node) or {}).values()):
        _note_dicts(tree, value, (*path, name))


def _extra(tree: Tree, key: str, node: Any) -> ExtraEntry:
    """Return the entry of an object that is not a tensor, with the tensors inside it."""
    inner = _Tensors(tree.storages, barren=tree.barren)
    inner.find(node, (), ())
    return ExtraEntry(key, Carried(node, tree.storages), _plain(tree, node), tuple(inner.entries))


def extra_of(key: str, node: Any, storages: Storages) -> ExtraEntry:
    """Return the entry of an object outside of any section, with the tensors inside it."""
    return _extra(Tree(storages, _Tensors(storages)), key, node)


def _add_module(tree: Tree, node: Any, path: Path, steps: Steps) -> None:
    """Add the state dict of a pickled module, and its other tensors as loose ones."""
    inner = _Tensors(tree.storages, seen=tree.seen)  # which finds each container once
    tensors: list[TensorEntry] = []
    places: dict[str, Steps] = {}
    for tensor in slots_of(node, steps):
        inner.listed.add(id(tensor.node))
        if tensor.is_persistent:
            tensors.append(entry_of(tensor.key, tensor.node, tree.storages))
            places[tensor.key] = tensor.steps
        else:
            inner.add(tensor.key, tensor.node, tensor.steps)
    inner.find_inside(node, (), steps)
    for entry in inner.entries:
        words = [word for word in (*path, *entry.key.split(".")) if word not in SLOTS]
        key = free(".".join(words), tree.loose.steps)
        tree.loose.entries.append(entry.under(key))
        tree.loose.steps[key] = inner.steps[entry.key]
    section = Section(
        "",
        "state_dict",
        tuple(tensors),
        has_runtime_names=True,
        packed_as="module",
        module_class=class_of(node),
    )
    _add_section(tree, section, path, steps, node, places)


def _is_list_of_tensors(node: Any) -> bool:
    return type(node) in (list, tuple) and bool(node) and all(map(is_tensor, node))


def _add_list(tree: Tree, node: Any, path: Path, steps: Steps) -> None:
    """Add a list of tensors as a state dict whose keys are numbers."""
    tree.storages.memory.take(_SECTION + (_STEP * len(steps) + _ENTRY) * len(node))
    tensors: list[TensorEntry] = []
    places: dict[str, Steps] = {}
    for index, value in enumerate(node):
        key = str(index)
        tensors.append(entry_of(key, value, tree.storages))
        places[key] = (*steps, ("item", index))
    section = Section("", "state_dict", tuple(tensors), packed_as="list")
    _add_section(tree, section, path, steps, node, places)


def _are_arrays(node: Any) -> bool:
    """Return whether all values of a mapping are NumPy arrays that can be read."""
    values = (pairs_of(node) or {}).values()
    return all(map(is_array, values)) and all(array_entry("", value) for value in values)


def _add_arrays(tree: Tree, node: Any, path: Path, steps: Steps) -> None:
    """Add a mapping of arrays as a state dict."""
    pairs = pairs_of(node) or {}
    tree.storages.memory.take(_SECTION + (_STEP * len(steps) + _ENTRY) * len(pairs))
    tensors: list[TensorEntry] = []
    places: dict[str, Steps] = {}
    entries: dict[int, TensorEntry | None] = {}  # by id of the node: two keys may have one array
    for key, value in pairs.items():
        name = str(text_of(key))
        if id(value) not in entries:
            entries[id(value)] = array_entry(name, value)
        entry = entries[id(value)]
        assert entry is not None
        tensors.append(entry.under(name))
        places[name] = (*steps, ("item", key))
    section = Section("", "state_dict", tuple(tensors), packed_as="arrays")
    _add_section(tree, section, path, steps, node, places)


def _add_optimizer(tree: Tree, node: Any, path: Path, steps: Steps) -> None:
    # an optimizer that was saved twice has one state for each parameter
    inner = _Tensors(tree.storages, seen=set() if tree.again_left >= 0 else tree.seen)
    inner.find_inside(node, (), steps)
    if inner.seen is not tree.seen:
        _spend_again(tree, path, len(inner.seen & tree.seen))
        tree.seen |= inner.seen
    mapping = mapping_of(node, inner.entries, tree.storages)
    section = Section("", "optimizer", tuple(inner.entries), mapping=mapping)
    _add_section(tree, section, path, steps, node, inner.steps)


_PLAIN_DEPTH = 16


def _plain(tree: Tree, node: Any) -> object:
    """Return the Python value of a node of numbers, strings, lists and dicts; None for any
    other.
    """

    def convert(node: Any, depth: int) -> object:
        tree.plain_left -= 1
        if depth > _PLAIN_DEPTH or tree.plain_left < 0:
            raise ValueError
        if node is None or type(node) in (bool, int, float, str):
            return node
        if type(node) in (list, tuple):
            return [convert(part, depth + 1) for part in node]
        pairs = pairs_of(node)
        if pairs is not None and {str}.issuperset(map(type, pairs)):
            return {key: convert(value, depth + 1) for key, value in pairs.items()}
        raise ValueError

    try:
        return convert(node, 0)
    except ValueError:
        return None


def unreached(root: Any, storages: Storages, sizes: Mapping[str, int]) -> tuple[Unreached, ...]:
    """Return the storages that no tensor of the index is made of, by the path at which `root`
    refers to them.

    `sizes` are the bytes of all storages by key. Raises `CkptError` if one cannot be read.
    """
    left = [key for key in sizes if key not in storages.reached]
    if not left:
        return ()
    places = _storage_places(root, storages)
    by_name: dict[str, Unreached] = {}
    for key in left:
        name = f"data/{key}"
        if key in places:
            name = title_of(places[key])
        if name in by_name:
            name = f"{name} (data/{key})"
        by_name[name] = Unreached(name, storages.get(key, sizes[key]), key in places)
    return tuple(by_name.values())


def _storage_places(root: Any, storages: Storages) -> dict[str, str]:
    """Return the path at which the tree first refers to each storage, by the storage's key."""
    places: dict[str, str] = {}
    seen: set[int] = set()
    todo: list[tuple[str, Any]] = [("", root)]
    while todo:
        path, node = todo.pop()
        if id(node) in seen or not children(node):
            continue
        seen.add(id(node))
        if type(node) is Persistent:
            places.setdefault(storage_key(node), path)
        parts = _parts(node)
        storages.look(len(parts))
        for name, part in reversed(parts):
            todo.append((dotted(path, name), part))
    return places


def _parts(node: Any) -> list[tuple[str, Any]]:
    """Return every node inside `node` with its name there; attributes and arguments of an object
    have the object's.
    """
    if isinstance(node, (list, tuple)):
        indexes = map(str, range(len(node)))
        return list(zip(indexes, node))
    if type(node) is PickledSet:
        return list(zip(repeat(""), node.items))
    pairs = pairs_of(node) or {}
    unnamed = list(pairs)
    if type(node) is Call:
        unnamed += (node.func, *node.args, node.kwargs, node.items, node.state, node.setter)
    parts = []
    for key, value in pairs.items():
        parts.append((text_of(key) or "", value))
    parts += zip(repeat(""), unnamed)
    return parts


@dataclass(frozen=True, slots=True, eq=False)
class Container:
    """The parts of a file for its writer; `folder` is the prefix of all records of `archive`,
    ``NAME/``.

    `archive` is None for a file that is not a torch zip, which is written as a new one.
    """

    pickle: Pickle
    tree: Tree
    archive: Archive | None = None
    folder: str = ""


@many_objects()
def read_tree(
    source: str,
    format: str,
    nbytes: int,
    pickle: Pickle,
    storages: Storages,
    sizes: Mapping[str, int],
    *,
    container: Callable[[Pickle, Tree], Container] = Container,
    whole: Collection[str] = (),
    notes: tuple[str, ...] = (),
    **fields: Any,
) -> Checkpoint:
    """Return the checkpoint that a pickle describes; `sizes` are the bytes of all storages by key.

    `container` makes the container, `fields` are other fields of the checkpoint. The dicts at the
    dotted paths `whole` are read as state dicts. Raises `CkptError` on bad tensors.
    """
    storages.looked_at = 0
    tree = find_sections(pickle.root, storages, whole)
    tree.unreached = unreached(pickle.root, storages, sizes)
    sections = tuple(place.section for place in tree.places.values())
    read = partial(
        read_tree,
        source,
        format,
        nbytes,
        pickle,
        storages,
        sizes,
        container=container,
        notes=notes,
        **fields,
    )
    # separate objects, then objects around sections and tensors
    objects = [ExtraEntry(path, Carried(node, storages)) for path, (_, node) in tree.others.items()]
    objects += [ExtraEntry(path, _Around(node, tree)) for path, node in tree.outer.items()]
    readings = None
    if tree.dicts:
        readings = Readings(tree.dicts, sections, lambda paths: read(whole={*whole, *paths}))
    return Checkpoint(
        source=source,
        format=format,
        nbytes=nbytes,
        sections=sections,
        others=tuple(tree.others),
        container=container(pickle, tree),
        notes=(*notes, *tree.notes),
        unreached=tree.unreached,
        readings=readings,
        objects=tuple(objects),
        **fields,
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Around(Payload):
    """The payload of an object with tensors inside: its content leaves out these tensors and the
    sections in it.
    """

    node: Any
    tree: Tree

    def content(self) -> bytes | None:
        sections = {id(place.node) for place in self.tree.places.values()}

        def left_out(node: Any) -> bytes | None:
            return b"" if is_tensor(node) or id(node) in sections else None

        return content_of(self.node, left_out)
