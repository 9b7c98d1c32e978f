"""The pickle and the records that a changed checkpoint is written as."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from itertools import islice
from operator import is_
from typing import Any

from ckpttool.containers.nodes import Step, Steps, metadata_of, pairs_of, text_of
from ckpttool.containers.pickle_read import ABSENT, Call, Global, Persistent, Pickle
from ckpttool.containers.pickle_write import dumps
from ckpttool.containers.tensors import (
    Carried,
    Rebuilder,
    Storages,
    malformed,
    renumbered,
    storage_key,
)
from ckpttool.containers.tree import Place, Tree, node_of
from ckpttool.containers.zip_read import Archive
from ckpttool.containers.zip_write import Entry, NewRecord
from ckpttool.core.checkpoint import AnyEntry, Checkpoint, Section, TensorEntry
from ckpttool.core.errors import Problem, Refused, same_problem
from ckpttool.core.optimizer_state import kept
from ckpttool.core.tables import by_key, by_path
from ckpttool.core.text import dotted, title_of
from ckpttool.core.values import dataclass

_HINT = "keep the format of the source; `ckpttool inspect` shows what the entry is"
_ORDERED_DICT = Global("collections", "OrderedDict")
_PLAIN = (type(None), bool, int, float, str, list, dict)
REMOVE = object()  # an edit that leaves a node out


def changed_root(checkpoint: Checkpoint, root: Any, tree: Tree, rebuilder: Rebuilder) -> Any:
    """Return `root` with the changes that `checkpoint` makes to its `tree`; `root` itself if there
    are none.

    Raises `Refused` for sections that the tree has no place for, and for keys that cannot be
    renamed there.
    """
    nodes = _Nodes(checkpoint, rebuilder, tree.storages)
    now = by_path(checkpoint.sections)
    new = [path for path in now if path not in tree.places]
    if new:
        raise Refused(
            "sections cannot be added to this file",
            hint="write them to a new file",
            problems=[Problem("the file has no such section", title_of(path)) for path in new],
        )
    _check_storages(checkpoint, tree)
    edits: dict[Steps, Any] = {}
    first_nodes: dict[int, Any] = {}
    replaced: list[Steps] = []  # places of modules whose state dict is written instead
    for path, place in tree.places.items():
        section, before = now.get(path), place.section
        if section is None:
            edits.update(_removals(place))
        elif section.mapping is not before.mapping:
            edits[place.steps] = node_of(section.mapping, nodes.of)
        elif section.packed_as != before.packed_as:  # a state dict replaces a module, a list ...
            state = {place.steps: _fresh_state_dict(section, nodes)}
            edits.update(_shared(state, place, first_nodes))
            replaced.append(place.steps)
        elif section is not before:
            is_plain = section.kind == "state_dict" and not place.tensors
            if is_plain:
                changes = _state_dict_edits(section, place, nodes)
            else:
                alone = state_dict_alone(checkpoint.source, section)
                changes = _tensor_edits(section, place, nodes, alone)
            edits.update(_shared(changes, place, first_nodes))
    edits = _outside(edits, replaced)
    kept = set(checkpoint.others)
    for path, (steps, _) in tree.others.items():
        if path not in kept:
            edits[steps] = REMOVE
    _check_arguments(edits)
    _check_rings(edits, tree)
    return _edited(root, edits) if edits else root


def _removals(place: Place) -> dict[Steps, Any]:
    """Return the edits that leave the section out."""
    if place.section.kind == "other":
        return dict.fromkeys(place.tensors.values(), REMOVE)
    if not place.steps:
        raise Refused(
            "the file is this one state dict: nothing would be left", hint="keep some of it"
        )
    return {place.steps: REMOVE}


def _is_inside(steps: Steps, container: Steps) -> bool:
    """Return whether the node at `steps` is inside of the node at `container`."""
    return steps != container and steps[: len(container)] == container


def _outside(edits: Mapping[Steps, Any], replaced: Sequence[Steps]) -> dict[Steps, Any]:
    """Return the edits, without removals inside of nodes that are replaced.

    Raise `Refused` for any other change there: it would be lost.
    """
    kept: dict[Steps, Any] = {}
    lost: list[Problem] = []
    for steps, node in edits.items():
        is_inside = any(_is_inside(steps, at) for at in replaced)
        if not is_inside:
            kept[steps] = node
        elif node is not REMOVE:
            lost.append(Problem("inside of a pickled module", _path_of(steps)))
    if lost:
        raise Refused(
            "only the state dict of a pickled module is written", hint=_HINT, problems=lost
        )
    return kept


def _path_of(steps: Steps) -> str:
    return ".".join(str(name) for _, name in steps if name is not None)


def _check_arguments(edits: Mapping[Steps, Any]) -> None:
    """Raise `Refused` if an object would be made without an argument or its state: it would be
    another object.
    """
    problems = []
    for steps, node in edits.items():
        if node is REMOVE and steps[-1][0] in ("arg", "kwarg", "state"):
            problems.append(Problem("an argument or the state of an object", _path_of(steps)))
    if problems:
        raise Refused(
            "an object cannot be made without its arguments and its state",
            hint="drop the whole object, or nothing of it",
            problems=problems,
        )


def _check_rings(edits: Mapping[Steps, Any], tree: Tree) -> None:
    """Raise `Refused` for a change in a container that holds itself: its copy would hold the
    unchanged container.
    """
    removed = {steps for steps, node in edits.items() if node is REMOVE}
    problems = []
    for path, (at, container) in tree.rings.items():
        is_changed = any(_is_inside(steps, container) for steps in edits)
        around = (at[:length] for length in range(len(at) + 1))
        if is_changed and removed.isdisjoint(around):
            problems.append(Problem("refers back to a container around it", path))
    if problems:
        raise Refused(
            "a container that holds itself cannot be changed", hint=_HINT, problems=problems
        )


def _is_part_of(path: str, name: str) -> bool:
    """Return whether the dotted path is `name`, or below it."""
    return path == name or path.startswith(f"{name}.")


def _check_storages(checkpoint: Checkpoint, tree: Tree) -> None:
    """Raise `Refused` if a storage would be left out that the tree still refers to."""
    referred = {storage.path for storage in tree.unreached if storage.is_referred}
    missing = referred.difference(storage.path for storage in checkpoint.unreached)
    if not missing:
        return
    removed = _object_paths((place.section for place in tree.places.values()), tree.others)
    removed -= _object_paths(checkpoint.sections, checkpoint.others)
    problems = []
    for storage in tree.unreached:
        path = storage.path
        if path not in missing:
            continue
        if not any(_is_part_of(path, name) for name in removed):
            text = "the object around it is kept, and cannot be written without it"
            problems.append(Problem(text, path))
    if problems:
        raise Refused(
            "a storage cannot be left out of an object that is kept", hint=_HINT, problems=problems
        )


def _object_paths(sections: Iterable[Section], others: Iterable[str]) -> set[str]:
    """Return the paths of the other objects, the sections and their extras."""
    paths = set(others)
    for section in sections:
        if section.kind != "other":
            paths.add(section.path)
            paths.update(dotted(section.path, extra.key) for extra in section.extras)
    return paths


def fresh_root(checkpoint: Checkpoint, rebuilder: Rebuilder) -> Any:
    """Return the object to save: the state dict itself, or a dict of the sections.

    Raises `Refused` for entries that have no place in a new file.
    """
    text = "belongs to the file that it was read from"
    problems = same_problem(text, checkpoint.others)
    for section in checkpoint.optimizers:
        if section.mapping is None:
            text = "an optimizer's state cannot be written to a new file"
            problems.append(Problem(text, section.title))
    if problems:
        raise Refused("not everything fits into a new file", hint=_HINT, problems=problems)
    nodes = _Nodes(checkpoint, rebuilder, None)
    if len(checkpoint.sections) == 1 and not checkpoint.sections[0].path:
        return _fresh_state_dict(checkpoint.sections[0], nodes)
    root: dict[Any, Any] = {}
    for section in checkpoint.sections:
        if section.path:
            root[section.path] = _fresh_state_dict(section, nodes)
        else:
            for entry in section.entries:
                root[entry.key] = nodes.of(entry)
    return root


def _fresh_state_dict(section: Section, nodes: _Nodes) -> Any:
    if section.mapping is not None:
        keys = set(section.tensor_keys)
        return node_of(kept(section.mapping, keys), nodes.of)
    state_dict = nodes.mapping({entry.key: nodes.of(entry) for entry in section.entries})
    if section.modules is not None:
        state_dict.state = {"_metadata": nodes.mapping(_modules(section.modules))}
    return state_dict


def _modules(modules: Mapping[str, object]) -> dict[Any, Any]:
    nodes: dict[Any, Any] = {}
    for path, payload in modules.items():
        nodes[path] = {} if payload is None else payload
    return nodes


class _Nodes:
    """The nodes of a checkpoint's entries: a node that was read if it still describes the entry,
    else a new one.
    """

    def __init__(
        self, checkpoint: Checkpoint, rebuilder: Rebuilder, storages: Storages | None
    ) -> None:
        self.rebuilder = rebuilder
        # of the file whose tree is changed: its own nodes stay as they are
        self.storages = storages
        self.ordered_dict = rebuilder.globals.setdefault(str(_ORDERED_DICT), _ORDERED_DICT)
        self.mixed: set[int] = set()  # ids of storages that tensors of several dtypes look at
        first: dict[int, str] = {}
        of_files: dict[int, Storages] = {}
        for section in checkpoint.sections:
            for entry in section.tensors:
                storage = id(entry.storage)
                if first.setdefault(storage, entry.dtype) != entry.dtype:
                    self.mixed.add(storage)
            for payload in (entry.payload for entry in section.entries):
                if isinstance(payload, Carried):
                    of_files[id(payload.storages)] = payload.storages
        for of_file in of_files.values():
            rebuilder.keep(of_file)
        if storages is not None:
            rebuilder.keep(storages)

    def mapping(self, pairs: dict[Any, Any], like: Any = None) -> Call:
        """Return a copy of the mapping `like` with other pairs; if that is not an object, an
        ``OrderedDict``.
        """
        node = copy(like) if type(like) is Call else Call(self.ordered_dict, ())
        node.pairs = pairs
        return node

    def of(self, entry: AnyEntry) -> Any:
        payload = entry.payload
        if isinstance(entry, TensorEntry):
            if isinstance(payload, Carried) and payload.describes(entry):
                return self._carried(payload)
            if entry.storage is None:
                raise Refused(
                    f"a {entry.layout} tensor of another format cannot be written @ {entry.key}",
                    hint=_HINT,
                )
            return self.rebuilder.node(entry, id(entry.storage) in self.mixed)
        if isinstance(payload, Carried):
            return self._carried(payload)
        if payload is not None or not isinstance(entry.value, _PLAIN):
            raise Refused(
                f"an object of another format cannot be written @ {entry.key}", hint=_HINT
            )
        return entry.value

    def _carried(self, payload: Carried) -> Any:
        if payload.storages is self.storages:
            return payload.node
        return self.rebuilder.transplant(payload)


# Changes of what was read


def state_dict_alone(source: str, section: Section) -> str:
    """Return the hint that names the state dict inside of a module or a list; empty for others."""
    if section.kind != "state_dict" or not section.packed_as:
        return ""
    return f"name the state dict alone as the source: {shlex.quote(f'{source}::{section.path}')}"


def _tensor_edits(section: Section, place: Place, nodes: _Nodes, alone: str) -> dict[Steps, Any]:
    """Return the edits for an optimizer, a module or loose tensors: each tensor keeps its place.
    `alone` says how to name the state dict in it.
    """
    now = by_key(section.tensors)
    renamed = [entry.key for entry in section.tensors if entry.key not in place.tensors]
    if renamed:
        raise Refused(
            "only the keys of state dicts can be renamed",
            hint=alone or _HINT,
            problems=same_problem("cannot be renamed here", renamed),
        )
    edits: dict[Steps, Any] = {}
    for entry in place.section.tensors:
        steps = place.tensors[entry.key]
        if entry.key not in now:
            edits[steps] = REMOVE
        elif now[entry.key] is not entry:
            node = nodes.of(now[entry.key])
            if not isinstance(entry.payload, Carried) or node is not entry.payload.node:
                edits[steps] = node
    return edits


def _state_dict_edits(section: Section, place: Place, nodes: _Nodes) -> dict[Steps, Any]:
    pairs_before = pairs_of(place.node) or {}
    entries = _in_place_order(section, place, pairs_before)
    pairs = {entry.key: nodes.of(entry) for entry in entries}
    same_modules = _same_modules(section.modules, metadata_of(place.node))
    if same_modules and _same_items(pairs, pairs_before):
        return {}
    if same_modules and type(place.node) is dict:
        return {place.steps: pairs}
    state_dict = nodes.mapping(pairs, place.node)
    if not same_modules:
        state_dict.state = _state_with(state_dict.state, section.modules, nodes)
    return {place.steps: state_dict}


def _shared(edits: dict[Steps, Any], place: Place, first_nodes: dict[int, Any]) -> dict[Steps, Any]:
    """Return the edits; a state dict at several places stays one object if it becomes the same at
    all of them.

    `first_nodes` holds the new node of the first place, by the id of the old one.
    """
    node = edits.get(place.steps)
    if node is None:
        return edits
    first = first_nodes.setdefault(id(place.node), node)
    same_pairs = _same_items(pairs_of(node) or {}, pairs_of(first) or {})
    if same_pairs and _same_modules(metadata_of(node), metadata_of(first)):
        return {place.steps: first}
    return edits


def _same_modules(left: Mapping[str, object] | None, right: Mapping[str, object] | None) -> bool:
    if left is None or right is None:
        return left is right
    return _same_items(left, right)


def _same_items(left: Mapping[Any, object], right: Mapping[Any, object]) -> bool:
    """Return whether both have the same keys in the same order, and the same objects there."""
    if list(left) != list(right):
        return False
    return all(map(is_, left.values(), right.values()))


def _state_with(state: Any, modules: Mapping[str, object] | None, nodes: _Nodes) -> Any:
    """Return the attributes of a state dict with other ``_metadata``, in their order."""
    attributes = {} if state is ABSENT else dict(state)
    if modules is None:
        attributes.pop("_metadata", None)
        return attributes or ABSENT
    metadata = attributes.get("_metadata")
    attributes["_metadata"] = nodes.mapping(_modules(modules), metadata)
    return attributes


def _in_place_order(
    section: Section, place: Place, before: Mapping[str, Any]
) -> Sequence[AnyEntry]:
    """Return the entries in order, with extras between the tensors that they were between."""
    if not section.extras:
        return section.tensors
    tensor_keys = set(place.section.tensor_keys)
    tensors: Iterator[AnyEntry] = iter(section.tensors)
    extras: Iterator[AnyEntry] = iter(section.extras)
    ordered: list[AnyEntry] = []
    for key in before:
        queue = tensors if text_of(key) in tensor_keys else extras
        ordered += islice(queue, 1)
    return [*ordered, *tensors, *extras]


# Edits of nodes: those on the path to an edit are copied, all others shared


def _edited(root: Any, edits: Mapping[Steps, Any]) -> Any:
    """Return the tree with the node at each of the steps replaced, or removed (`REMOVE`).

    The edits of ``model.a``, ``model.b`` and ``epoch`` become a trie::

        {model: {a: edit, b: edit}, epoch: edit}
    """
    trie: dict[Any, Any] = {}
    leaves: dict[int, _Edit] = {}
    for steps, node in edits.items():
        if not steps:
            return node
        level = trie
        for step in steps[:-1]:
            level = level.setdefault(step, {})
        level[steps[-1]] = leaves.setdefault(id(node), _Edit(node))
    return _edit(root, trie, {})


@dataclass(frozen=True, slots=True, eq=False)
class _Edit:
    node: Any


# by id of a node: the first edits of it, and its result
_Done = dict[int, tuple[Mapping[Step, Any], Any]]


def _edit(node: Any, trie: Mapping[Step, Any], done: _Done) -> Any:
    """Return the node with the edits; a node at several places stays one if they are the same at
    all of them.
    """
    if id(node) not in done:
        done[id(node)] = trie, _edited_node(node, trie, done)
    first_trie, edited = done[id(node)]
    return edited if first_trie == trie else _edited_node(node, trie, done)


def _edited_node(node: Any, trie: Mapping[Step, Any], done: _Done) -> Any:
    def changed(step: Step, child: Any) -> Any:
        edit = trie.get(step)
        if edit is None:
            return child
        return edit.node if isinstance(edit, _Edit) else _edit(child, edit, done)

    def sequence(kind: str, parts: Iterable[Any]) -> list[Any]:
        changes = [changed((kind, index), part) for index, part in enumerate(parts)]
        return [part for part in changes if part is not REMOVE]

    def mapping(kind: str, pairs: Mapping[Any, Any]) -> dict[Any, Any]:
        changes = {key: changed((kind, key), value) for key, value in pairs.items()}
        return {key: value for key, value in changes.items() if value is not REMOVE}

    if type(node) in (list, tuple):
        return type(node)(sequence("item", node))
    if type(node) is dict:
        return mapping("item", node)
    edited = copy(node)
    edited.args = tuple(sequence("arg", node.args))
    edited.kwargs = node.kwargs and mapping("kwarg", node.kwargs)
    edited.items = node.items and sequence("element", node.items)
    edited.pairs = node.pairs and mapping("item", node.pairs)
    edited.state = changed(("state", None), node.state)
    return edited


Records = list[Entry]


def dumped(root: Any, protocol: int) -> tuple[bytes, dict[str, None]]:
    """Return the pickle, and the keys of the storages in the order in which a reader meets them."""
    references: list[Persistent] = []
    data = dumps(Pickle(root, protocol), references)
    return data, dict.fromkeys(storage_key(reference) for reference in references)


def changed_records(
    archive: Archive,
    folder: str,
    root: Any,
    protocol: int,
    rebuilder: Rebuilder,
    orphans: Sequence[str] = (),
    *,
    keep_numbers: bool = False,
) -> tuple[Records, dict[str, None]]:
    """Return the records of `archive` with another pickle, and the keys of its storages in the
    order of that pickle.

    A change and its inverse give the same file: if storages are new, or would no longer be in the
    order of their numbers, all are numbered again (with `keep_numbers` only if some are new).
    `orphans` are the keys of storages to keep that no pickle refers to.
    """
    data, keys = dumped(root, protocol)
    missing = [key for key in keys if key not in rebuilder.taken]
    if missing:
        raise malformed(f"storage {missing[0]} is missing")
    old = [key for record in archive.records if (key := key_of(record, folder)) is not None]
    is_numbered = old == _first_numbers(len(old)) and not keep_numbers
    in_order = list(keys) == _first_numbers(len(keys))
    if keys.keys() <= set(old) and (in_order or not is_numbered):
        return _kept(archive, folder, data, {*keys, *orphans}), keys
    new = [*keys, *orphans]
    numbers = dict(zip(new, _first_numbers(len(new))))
    data, _ = dumped(renumbered(root, numbers), protocol)
    entries = _kept(archive, folder, data, ())
    at = _place_of_storages(archive, folder)
    entries[at:at] = _numbered(archive, folder, numbers, rebuilder)
    return entries, dict.fromkeys(numbers[key] for key in keys)


def _numbered(
    archive: Archive, folder: str, numbers: Mapping[str, str], rebuilder: Rebuilder
) -> Records:
    """Return the records of the storages, each under its number."""
    entries: Records = []
    for key, number in numbers.items():
        record = archive.by_name.get(f"{folder}data/{key}")
        name = f"{folder}data/{number}"
        if record is None:
            entries.append(NewRecord(name, rebuilder.storages[key].data))
        elif key == number:
            entries.append(record)
        else:
            entries.append(NewRecord(name, archive.span(record), record.crc))
    return entries


def _place_of_storages(archive: Archive, folder: str) -> int:
    """Return how many other records come before the storages: those before the first one, or before
    ``version`` if there are none.
    """
    for index, record in enumerate(archive.records):
        if key_of(record, folder) is not None:
            return index
    for index, record in enumerate(archive.records):
        if record.name == f"{folder}version":
            return index
    return len(archive.records)


def key_of(record: Entry, folder: str) -> str | None:
    """Return the key of the storage that a record holds; None for any other record."""
    prefix = folder + "data/"
    return record.name.removeprefix(prefix) if record.name.startswith(prefix) else None


def _first_numbers(count: int) -> list[str]:
    return [str(number) for number in range(count)]


def _kept(archive: Archive, folder: str, data: bytes, keys: Collection[str]) -> Records:
    """The records with another pickle, and without the storages that are not among `keys`."""
    entries: Records = []
    for record in archive.records:
        key = key_of(record, folder)
        if record.name == folder + "data.pkl":
            entries.append(NewRecord(record.name, data))
        elif key is None or key in keys:
            entries.append(record)
    return entries
