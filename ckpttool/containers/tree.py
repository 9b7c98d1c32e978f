"""Find the sections of a torch file: state dicts, optimizers and modules in the tree of its
pickle.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
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
    AnyEntry,
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
    # protocols 0 and 1 make an object by this function, with its class as an argument
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
            for name, key, value in _slot_entries(slots[slot]):
                if not is_tensor(value):
                    continue
                place = (*inside, ("item", slot), ("item", key))
                is_saved = slot == "_parameters" or name not in unsaved
                yield ModuleTensor(".".join((*path, name)), place, value, is_saved)
        submodules = list(_slot_entries(slots["_modules"]))
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


def _slot_entries(slot: Mapping[Any, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield name, key and value of each entry of a slot."""
    for key, value in slot.items():
        name = text_of(key)
        if name is not None:
            yield name, key, value


_SCALARS = frozenset((bool, int, float, str, bytes, type(None)))
_MAX_OPTIMIZER_DEPTH = 50
# of shared containers and their parts: a small pickle can share them without end
_MAX_REPEATS = 500_000


class _TooMuch(Exception):
    """A state dict that is too large to be turned into a mapping."""


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


def node_of(value: Any, entry_node: Callable[[AnyEntry], Any]) -> Any:
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

Adder = Callable[["_Walk", Any, Path, Steps], None]  # adds the section that a node is


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
    or `without_tensors` are not looked into: that was done, or they have no tensor to list.
    """

    storages: Storages
    entries: list[TensorEntry] = field(default_factory=list)
    steps: dict[str, Steps] = field(default_factory=dict)
    listed: set[int] = field(default_factory=set)
    seen: set[int] = field(default_factory=set)
    without_tensors: set[int] = field(default_factory=set)

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
        if id(node) in self.seen or id(node) in self.without_tensors:
            return
        self.seen.add(id(node))
        before = len(self.entries)
        self.find_inside(node, path, steps)
        if before == len(self.entries):
            self.without_tensors.add(id(node))

    def find_inside(self, node: Any, path: Path, steps: Steps) -> None:
        """Add all tensors in the parts of the node."""
        for child_path, child_steps, child in _inner_nodes(self.storages, node, path, steps):
            self.find(child, child_path, child_steps)


@dataclass(slots=True, eq=False)
class Tree:
    """The contents of a pickle's tree.

    Attributes:
        storages: The storages of the file.
        places: Section path -> its place.
        others: Path -> everything else, with the steps to it.
        rings: The places that refer back to a container around them: the steps there, and to that
            container.
        objects: Path -> a pickled object that has sections or tensors in it.
        dicts: Path -> the keys of what could be a state dict.
        notes: Sentences on sections that are not listed at each place.
        unreached: Storages that no tensor is made of, as the reader of the file lists them.
    """

    storages: Storages
    places: dict[str, Place] = field(default_factory=dict)
    others: dict[str, tuple[Steps, Any]] = field(default_factory=dict)
    rings: dict[str, tuple[Steps, Steps]] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    dicts: dict[str, Sequence[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    unreached: tuple[Unreached, ...] = ()


@dataclass(slots=True, eq=False)
class _Walk:
    """The state of the walk that fills a `Tree`.

    Attributes:
        tree: What was found so far.
        unsectioned: Tensors that are in no section.
        state_dicts: Paths of dicts that are read as state dicts.
        seen: Ids of the containers that were walked.
        open: By id, the containers that are being walked, with the steps to them.
        repeatable: By id of what is or holds a section: what adds it, and the entries that looking
            at it again costs.
        noted_dicts: Ids of dicts inside entries of state dicts that are in `dicts`.
        of_tensors: By id of a mapping, whether tensors are in it.
        without_tensors: Ids of containers without any tensor.
        repeats_left: Entries of sections at further places that are still allowed.
        plain_left: Nodes that may still be turned into plain values.
    """

    tree: Tree
    unsectioned: _Tensors
    state_dicts: Collection[str] = ()
    seen: set[int] = field(default_factory=set)
    open: dict[int, Steps] = field(default_factory=dict)
    repeatable: dict[int, tuple[Adder | None, int]] = field(default_factory=dict)
    noted_dicts: set[int] = field(default_factory=set)
    of_tensors: dict[int, bool] = field(default_factory=dict)
    without_tensors: set[int] = field(default_factory=set)
    repeats_left: int = 100_000
    plain_left: int = 1_000_000

    @property
    def storages(self) -> Storages:
        return self.tree.storages


def _new_walk(storages: Storages, state_dicts: Collection[str] = ()) -> _Walk:
    return _Walk(Tree(storages), _Tensors(storages), state_dicts)


def find_sections(root: Any, storages: Storages, state_dicts: Collection[str] = ()) -> Tree:
    """Return the sections of the tree, tensors outside of any as a last one (``other``). Raises
    `CkptError` on bad tensors.

    The dicts at the dotted paths `state_dicts` are read as state dicts.
    """
    walk = _new_walk(storages, state_dicts)
    tree, unsectioned = walk.tree, walk.unsectioned
    allowed = max(_LEAST_AGAIN, storages.pickled // _PICKLED)
    walk.repeats_left = min(walk.repeats_left, allowed)
    if not _find_in(walk, root, (), (), foreign=False):
        for path, steps, node in _inner_nodes(storages, root, (), ()):
            tree.others[".".join(path)] = steps, node
    if unsectioned.entries:
        name = "(other)" if "" in tree.places else ""
        section = Section(name, "other", tuple(unsectioned.entries))
        tree.places[name] = Place(section, (), None, unsectioned.steps)
    return tree


def _find_in(walk: _Walk, node: Any, path: Path, steps: Steps, foreign: bool) -> bool:
    """Return True if there are sections or tensors in `node`, after adding them. `foreign`: inside
    a pickled object.
    """
    if is_tensor(node):
        walk.unsectioned.add(".".join(path), node, steps)
        return True
    if len(steps) > _MAX_DEPTH or not isinstance(node, (dict, list, tuple, Call)):
        return False
    if id(node) in walk.seen:
        return _repeat(walk, node, path, steps, foreign)
    walk.seen.add(id(node))
    _charge_path(walk, path)
    places = walk.tree.places
    before = len(places)
    names = _keys_as_text(node)
    add = _adder_of(walk, node, names, ".".join(path), foreign)
    if names and not foreign and add in (None, _add_optimizer):
        _note_candidate(walk, names, ".".join(path))
    has_sections = _add_sections(walk, add, node, path, steps, foreign)
    if len(places) > before:
        last = next(reversed(places.values())).section
        walk.repeatable[id(node)] = add, max(1, len(last.entries), _count_inside(node))
    return has_sections


def _note_candidate(walk: _Walk, names: Sequence[str], path: str) -> None:
    """Note the keys of a mapping that could be a state dict: only a model's names can tell."""
    walk.storages.memory.take(_WALKED + len(path) + 8 * len(names))
    walk.tree.dicts.setdefault(path, names)


def _add_sections(
    walk: _Walk, add: Adder | None, node: Any, path: Path, steps: Steps, foreign: bool
) -> bool:
    """Add the section that `node` is, by `add`, or the sections in it. Return True if there are
    any.
    """
    if add is not None:
        add(walk, node, path, steps)
        return True
    tree = walk.tree
    is_foreign = foreign or (isinstance(node, Call) and pairs_of(node) is None)
    rest: list[tuple[Path, tuple[Steps, Any]]] = []
    has_sections = False
    walk.open[id(node)] = steps
    for child_path, child_steps, child in _inner_nodes(walk.storages, node, path, steps):
        if _find_in(walk, child, child_path, child_steps, is_foreign):
            has_sections = True
        elif not is_foreign:
            walk.storages.memory.take(_WALKED + _STEP * len(child_steps))
            rest.append((child_path, (child_steps, child)))
    del walk.open[id(node)]
    if not has_sections:
        return False
    if is_foreign and not foreign:
        tree.objects[".".join(path)] = node
    walk.storages.memory.take(len(rest) * (_WALKED + sum(map(len, path))))
    for child_path, place in rest:
        tree.others[free(".".join(child_path), tree.others)] = place
    return True


def _repeat(walk: _Walk, node: Any, path: Path, steps: Steps, foreign: bool) -> bool:
    """Return True if a node that was walked before is or holds a section, after adding that at this
    place too. Other nodes stay at their first place.
    """
    if id(node) in walk.open:
        rings = walk.tree.rings
        rings[free(".".join(path), rings)] = steps, walk.open[id(node)]
        return False
    add, count = walk.repeatable.get(id(node), (None, 0))
    if not count or (add is not None and foreign and metadata_of(node) is None):
        return False
    if not _charge_repeat(walk, path, count):
        return False
    _charge_path(walk, path)
    return _add_sections(walk, add, node, path, steps, foreign)


def _charge_path(walk: _Walk, path: Path) -> None:
    """Count the memory of a place: a tuple of its parts, and its text, as a path and in the keys of
    a report.
    """
    walk.storages.memory.take(_WALKED + 2 * sum(map(len, path)) + _STEP * len(path))


def _charge_repeat(walk: _Walk, path: Path, count: int) -> bool:
    """Return True if `count` entries may be listed once more. A note says where that ends."""
    left = walk.repeats_left
    walk.repeats_left -= count
    if left >= 0 > walk.repeats_left:
        note = f"from {'.'.join(path)} on, a section at several places is listed at one of them"
        walk.tree.notes.append(note)
    return walk.repeats_left >= 0


def _adder_of(
    walk: _Walk, node: Any, names: Sequence[str] | None, path: str, foreign: bool
) -> Adder | None:
    """Return the function that adds the node as a section; None for a container that may hold
    sections. `names` are the keys of a mapping.
    """
    if path in walk.state_dicts and names is not None and not foreign:
        return _add_state_dict
    if is_module(node):
        return _add_module
    if path.rpartition(".")[2] in LISTS and _is_list_of_tensors(node) and not foreign:
        return _add_list
    if names and not foreign and _are_arrays(node):
        return _add_arrays
    if _is_optimizer(node):
        return _add_optimizer
    prefix = prefix_of(path)
    is_around = any(state_dict.startswith(prefix) for state_dict in walk.state_dicts)
    is_candidate = names is not None and not is_around
    if is_candidate and _is_state_dict(walk, node, names or (), foreign):
        return _add_state_dict
    return None


def _inner_nodes(storages: Storages, node: Any, path: Path, steps: Steps) -> Iterator[Child]:
    """Yield path, steps and node of the nodes inside. A pickled object's attributes have the path
    of the object.
    """
    storages.look(_count_inside(node))
    for kind, key, value in _parts_by_kind(node):
        child_path = path
        if kind != "state":
            child_path = (*path, text_of(key) or str(key))
        yield child_path, (*steps, (kind, key)), value


def _parts_by_kind(node: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield kind, key or index, and node of the nodes inside."""
    for key, value in (pairs_of(node) or {}).items():
        yield "item", key, value
    if isinstance(node, (list, tuple)):
        for index, value in enumerate(node):
            yield "item", index, value
    if isinstance(node, Call):
        for index, value in enumerate(node.args):
            yield "arg", index, value
        for key, value in (node.kwargs or {}).items():
            yield "kwarg", key, value
        for index, value in enumerate(node.items or ()):
            yield "element", index, value
        if node.state is not ABSENT:
            yield "state", None, node.state


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


def _keys_as_text(node: Any) -> list[str] | None:
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


def _is_state_dict(walk: _Walk, node: Any, names: Sequence[str], foreign: bool) -> bool:
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
    entries = (entry_of(name, value, walk.storages) for name, value in tensors.items())
    if all(map(_may_be_random_state, entries)):
        return False
    # Next to `encoder.weight`, a dict `encoder.cache` is an entry of the module `encoder`. A dict
    # of tensors with a name of one word would be a section, and this mapping the one around it.
    has_paths = any("." in name for name in tensors)
    for name, value in zip(names, values):
        is_path = has_paths and "." in name
        if is_path or name.endswith("_extra_state"):
            continue
        if _holds_tensors(walk, value):
            return False
    return True


def _holds_tensors(walk: _Walk, node: Any) -> bool:
    pairs = pairs_of(node)
    if pairs is None:
        return False
    if id(node) not in walk.of_tensors:
        walk.of_tensors[id(node)] = any(map(is_tensor, pairs.values()))
    return walk.of_tensors[id(node)]


def _add_section(
    walk: _Walk,
    section: Section,
    path: Path,
    steps: Steps,
    node: Any,
    tensors: Mapping[str, Steps] = MappingProxyType({}),
) -> None:
    """Add the section under its path, or the first free one; `tensors` as in `Place`."""
    section = replace(section, path=free(".".join(path), walk.tree.places))
    walk.tree.places[section.path] = Place(section, steps, node, tensors)


def _add_state_dict(walk: _Walk, node: Any, path: Path, steps: Steps) -> None:
    pairs = pairs_of(node) or {}
    walk.storages.memory.take(_SECTION + _STEP * len(steps) + _ENTRY * len(pairs))
    tensors: list[TensorEntry] = []
    extras: list[ExtraEntry] = []
    for key, value in pairs.items():
        name = str(text_of(key))
        if is_tensor(value):
            tensors.append(entry_of(name, value, walk.storages))
        else:
            extras.append(_extra(walk, name, value))
            _note_dicts(walk, value, (*path, name))
    modules = metadata_of(node)
    if modules is not None:
        modules = dict(modules)
    section = Section("", "state_dict", tuple(tensors), tuple(extras), modules)
    _add_section(walk, section, path, steps, node)


def _note_dicts(walk: _Walk, node: Any, path: Path) -> None:
    """Note the dicts inside an entry of a state dict, each once: a model may be saved in one of
    them.
    """
    if id(node) in walk.noted_dicts or len(path) > _MAX_DEPTH:
        return
    walk.noted_dicts.add(id(node))
    walk.storages.memory.take(_WALKED + sum(map(len, path)))
    names = _keys_as_text(node)
    if not names:
        return
    walk.tree.dicts.setdefault(".".join(path), names)
    for name, value in zip(names, (pairs_of(node) or {}).values()):
        _note_dicts(walk, value, (*path, name))


def _extra(walk: _Walk, key: str, node: Any) -> ExtraEntry:
    """Return the entry of an object that is not a tensor, with the tensors inside it."""
    inner = _Tensors(walk.storages, without_tensors=walk.without_tensors)
    inner.find(node, (), ())
    return ExtraEntry(key, Carried(node, walk.storages), _plain(walk, node), tuple(inner.entries))


def extra_of(key: str, node: Any, storages: Storages) -> ExtraEntry:
    """Return the entry of an object outside of any section, with the tensors inside it."""
    return _extra(_new_walk(storages), key, node)


def _add_module(walk: _Walk, node: Any, path: Path, steps: Steps) -> None:
    """Add the state dict of a pickled module, and its other tensors as loose ones."""
    inner = _Tensors(walk.storages, seen=walk.seen)  # which finds each container once
    tensors: list[TensorEntry] = []
    places: dict[str, Steps] = {}
    for tensor in slots_of(node, steps):
        inner.listed.add(id(tensor.node))
        if tensor.is_persistent:
            tensors.append(entry_of(tensor.key, tensor.node, walk.storages))
            places[tensor.key] = tensor.steps
        else:
            inner.add(tensor.key, tensor.node, tensor.steps)
    inner.find_inside(node, (), steps)
    for entry in inner.entries:
        words = [word for word in (*path, *entry.key.split(".")) if word not in SLOTS]
        key = free(".".join(words), walk.unsectioned.steps)
        walk.unsectioned.entries.append(entry.under(key))
        walk.unsectioned.steps[key] = inner.steps[entry.key]
    section = Section(
        "",
        "state_dict",
        tuple(tensors),
        has_runtime_names=True,
        packed_as="module",
        module_class=class_of(node),
    )
    _add_section(walk, section, path, steps, node, places)


def _is_list_of_tensors(node: Any) -> bool:
    return type(node) in (list, tuple) and bool(node) and all(map(is_tensor, node))


def _add_list(walk: _Walk, node: Any, path: Path, steps: Steps) -> None:
    """Add a list of tensors as a state dict whose keys are numbers."""
    walk.storages.memory.take(_SECTION + (_STEP * len(steps) + _ENTRY) * len(node))
    tensors: list[TensorEntry] = []
    places: dict[str, Steps] = {}
    for index, value in enumerate(node):
        key = str(index)
        tensors.append(entry_of(key, value, walk.storages))
        places[key] = (*steps, ("item", index))
    section = Section("", "state_dict", tuple(tensors), packed_as="list")
    _add_section(walk, section, path, steps, node, places)


def _are_arrays(node: Any) -> bool:
    """Return whether all values of a mapping are NumPy arrays that can be read."""
    values = (pairs_of(node) or {}).values()
    return all(map(is_array, values)) and all(array_entry("", value) for value in values)


def _add_arrays(walk: _Walk, node: Any, path: Path, steps: Steps) -> None:
    """Add a mapping of arrays as a state dict."""
    pairs = pairs_of(node) or {}
    walk.storages.memory.take(_SECTION + (_STEP * len(steps) + _ENTRY) * len(pairs))
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
    _add_section(walk, section, path, steps, node, places)


def _add_optimizer(walk: _Walk, node: Any, path: Path, steps: Steps) -> None:
    # an optimizer that was saved twice has one state for each parameter
    may_repeat = walk.repeats_left >= 0
    inner = _Tensors(walk.storages, seen=set() if may_repeat else walk.seen)
    inner.find_inside(node, (), steps)
    if may_repeat:
        _charge_repeat(walk, path, len(inner.seen & walk.seen))
        walk.seen |= inner.seen
    mapping = mapping_of(node, inner.entries, walk.storages)
    section = Section("", "optimizer", tuple(inner.entries), mapping=mapping)
    _add_section(walk, section, path, steps, node, inner.steps)


_PLAIN_DEPTH = 16


def _plain(walk: _Walk, node: Any) -> object:
    """Return the Python value of a node of numbers, strings, lists and dicts; None for any
    other.
    """

    def convert(node: Any, depth: int) -> object:
        walk.plain_left -= 1
        if depth > _PLAIN_DEPTH or walk.plain_left < 0:
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


def unreached_storages(
    root: Any, storages: Storages, sizes: Mapping[str, int]
) -> tuple[Unreached, ...]:
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
        parts = _all_parts(node)
        storages.look(len(parts))
        for name, part in reversed(parts):
            todo.append((dotted(path, name), part))
    return places


def _all_parts(node: Any) -> list[tuple[str, Any]]:
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
    notes: tuple[str, ...] = (),
    **fields: Any,
) -> Checkpoint:
    """Return the checkpoint that a pickle describes; `sizes` are the bytes of all storages by key.

    `container` makes the container, `fields` are other fields of the checkpoint. Raises `CkptError`
    on bad tensors.
    """

    @many_objects()  # also when it reads again
    def read(state_dicts: Collection[str]) -> Checkpoint:
        """Return the checkpoint; the dicts at these dotted paths are read as state dicts."""
        storages.looked_at = 0  # each reading looks at all nodes
        tree = find_sections(pickle.root, storages, state_dicts)
        tree.unreached = unreached_storages(pickle.root, storages, sizes)
        sections = tuple(place.section for place in tree.places.values())
        # separate objects, then objects around sections and tensors
        objects = []
        for path, (_, node) in tree.others.items():
            objects.append(ExtraEntry(path, Carried(node, storages)))
        for path, node in tree.objects.items():
            objects.append(ExtraEntry(path, _Around(node, tree)))
        readings = None
        if tree.dicts:
            readings = Readings(tree.dicts, sections, lambda paths: read({*state_dicts, *paths}))
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

    return read(())


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
