"""Read and write folders of torch.distributed.checkpoint (DCP): ``.metadata`` describes what
``*.distcp`` files hold.

A folder is read to the tree that torch.save would have written. Its chunks are assembled when they
are needed. A rename writes ``.metadata`` only: items that do not change stay in their files.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import field, replace
from functools import partial
from heapq import heapreplace
from itertools import chain, pairwise
from math import prod
from typing import Any

from ckpttool.containers.chunks import Chunk, Data, assemble, row_major_data
from ckpttool.containers.nodes import pairs_of
from ckpttool.containers.pickle_read import Persistent, Pickle
from ckpttool.containers.pickle_write import dumps
from ckpttool.containers.tensors import (
    Carried,
    Rebuilder,
    Storages,
    entry_of,
    is_tensor,
    resized,
    typed_storage,
)
from ckpttool.containers.tree import Container, read_tree
from ckpttool.containers.write_tree import changed_root, fresh_root, state_dict_alone
from ckpttool.containers.zip_read import read_archive
from ckpttool.core import dtypes
from ckpttool.core.checkpoint import Checkpoint, Lazy, Part, Payload, Span, Storage, in_row_major
from ckpttool.core.errors import CkptError, Problem, Refused
from ckpttool.core.limits import Memory, limits
from ckpttool.core.pickle_imports import Import
from ckpttool.core.values import dataclass, many_objects
from ckpttool.distributed.job import current
from ckpttool.formats import torch_zip
from ckpttool.formats.dcp_metadata import (
    BytesItem,
    FileRange,
    Item,
    Metadata,
    Path,
    TensorItem,
    locate_chunks,
    parse,
    read_shards,
    spelled,
)
from ckpttool.formats.folders import DCP_METADATA, HF_SHARD, other_files
from ckpttool.io.files import exists, is_file, names_in, opened, size
from ckpttool.io.paths import join, safe_path
from ckpttool.io.pieces import Edited, Files, Link, Piece, Pieces, literal, nbytes_of, read_span

_MAX_DEPTH = 200
_MAX_HOLES = 10_000  # missing items of a list


class _Branch(dict[Any, Any]):
    """A container: a dict or a list, which its steps will show."""


def nested(leaves: Mapping[Path, Any]) -> dict[Any, Any]:
    """Return the state dict with these leaves. In a path, a string is a key of a dict and a number
    an index of a list::

        {("model", "w"): W, ("steps", 0): 5}  ->  {"model": {"w": W}, "steps": [5]}

    Raises `CkptError`, all problems at once, if paths contradict each other.
    """
    root, problems = _Branch(), []
    for path, leaf in leaves.items():
        branch = root
        for step in path[:-1]:
            if type(branch) is not _Branch:
                break
            branch = branch.setdefault(step, _Branch())
        if type(branch) is not _Branch or branch.setdefault(path[-1], leaf) is not leaf:
            problems.append(Problem("its path leads through another entry", _key(path)))
    state_dict = {} if problems else _to_dicts_and_lists(root, (), problems)
    if problems or not isinstance(state_dict, dict):
        raise CkptError(
            "the keys of this checkpoint do not form a nested state dict",
            hint="save it again with torch.distributed.checkpoint",
            problems=problems,
        )
    return state_dict


def _to_dicts_and_lists(branch: Any, path: Path, problems: list[Problem]) -> Any:
    """Return the dict or list of a branch, and the state dict of an optimizer as it was saved."""
    if type(branch) is not _Branch:
        return branch
    if len(path) > _MAX_DEPTH:
        problems.append(Problem("nested too deep", _key(path[:10])))
        return {}
    inside: dict[Any, Any] = {}
    for step, child in branch.items():
        inside[step] = _to_dicts_and_lists(child, (*path, step), problems)
    types = set(map(type, inside))
    if types <= {str}:
        return _optimizer(inside) if type(inside.get("param_groups")) is list else inside
    if types == {int} and min(inside) >= 0:
        length = max(inside) + 1
        if length <= len(inside) + _MAX_HOLES:
            return [inside.get(index) for index in range(length)]
    problems.append(Problem("neither a dict nor a list", _key(path)))
    return {}


def _optimizer(mapping: dict[Any, Any]) -> dict[Any, Any]:
    """Restore what flattening loses of an optimizer's state dict: an empty state, and ids that are
    numbers.
    """
    mapping = {"state": {}, **mapping}
    ids: dict[str, int] = {}
    for group in mapping["param_groups"]:
        params = group.get("params") if type(group) is dict else None
        for param in params if type(params) is list else ():
            if type(param) is int:
                ids[str(param)] = param
    state = mapping["state"]
    if ids and type(state) is dict:
        mapping["state"] = {ids.get(key, key): value for key, value in state.items()}
    return mapping


def flattened(root: Any, nbytes: int = 0, alone: str = "") -> dict[str, tuple[Path, Any]]:
    """Return flat key -> the path and the node of each leaf of the state dict at the node `root`.

    `nbytes` is the size of the file. A pickle can share a node, and each place of it takes memory.
    `alone` is the hint for a root that is not a dict.
    Raises `Refused`, all problems at once, if torch cannot flatten it: other keys than text, or a
    key of two leaves.
    """
    leaves: dict[str, tuple[Path, Any]] = {}
    problems: list[Problem] = []
    for path, node in _leaves(root, (), {}, problems, Memory(nbytes)):
        key = _key(path)
        if key in leaves:
            problems.append(Problem("two entries have this flat key", key))
        leaves[key] = (path, node)
    if pairs_of(root) is None:
        problem = Problem("the file does not hold a dict", "(root)")
        if alone:
            raise Refused(
                "torch.distributed.checkpoint cannot hold this", hint=alone, problems=[problem]
            )
        problems.append(problem)
    if problems:
        raise Refused(
            "torch.distributed.checkpoint cannot hold this",
            hint="rename the keys with --rule 'FROM => TO', or write a torch file (OUT ending in"
            " .pt)",
            problems=problems,
        )
    return leaves


def _leaves(
    node: Any, path: Path, terminal: dict[int, bool], problems: list[Problem], memory: Memory
) -> Iterator[tuple[Path, Any]]:
    memory.take(_PLACE + 2 * sum(len(name) for name in path if type(name) is str))
    if len(path) > _MAX_DEPTH:
        problems.append(Problem("nested too deep", _key(path[:10])))
        return
    pairs = pairs_of(node)
    if pairs is not None:
        for name, value in pairs.items():
            if type(name) not in (str, int, float, bool, type(None)):
                problems.append(Problem("a dict key that is neither text nor a number", _key(path)))
            yield from _leaves(value, (*path, str(name)), terminal, problems, memory)
    elif _is_terminal(node, terminal, 0):
        yield path, node
    else:
        for index, value in enumerate(node):
            yield from _leaves(value, (*path, index), terminal, problems, memory)


def _is_terminal(node: Any, terminal: dict[int, bool], depth: int) -> bool:
    """Return True if the node is one leaf: not a dict, nor a list that holds dicts or tensors.

    `terminal` are the answers for lists, by id.
    """
    if pairs_of(node) is not None:
        return False
    if type(node) is not list or depth > _MAX_DEPTH:
        return True
    if id(node) not in terminal:
        terminal[id(node)] = True  # a list inside itself
        for part in node:
            if is_tensor(part) or not _is_terminal(part, terminal, depth + 1):
                terminal[id(node)] = False
                break
    return terminal[id(node)]


def _key(path: Path) -> str:
    return ".".join(map(str, path))


FORMAT = "dcp"

_MAX_VALUE = 1 << 24  # bytes of an item that is not a tensor
_PICKLED = 100  # bytes of the pickle of a tensor, about
# bytes of a torch file around a dense tensor: 1,000 to 1,700, by version; 1,900 around the smallest
# tensor subclass of torchao
_AROUND = 1_850
_SMALL = 1 << 13  # bytes of a tensor; the parts of a larger subclass are much shorter, or longer
_PLACE = 200  # bytes of memory for a place in the state dict, from above


@dataclass(frozen=True, slots=True, eq=False)
class Folder(Container):
    """The tree of the folder, as of a torch file, and the parts of the folder that its writer uses
    again.

    `items` are the tensors, and the objects that hold tensors, by the id of their node in the tree.
    `values` are the places of all other objects by their pickle and flat key, and by their pickle
    alone (flat key ``""``). `names` are the data files in the folder `home`.
    """

    home: str = ""
    items: Mapping[int, Item] = field(default_factory=dict)
    values: Mapping[tuple[bytes, str], FileRange] = field(default_factory=dict)
    names: tuple[str, ...] = ()


# Reading


@many_objects()
def read(path: str) -> Checkpoint:
    """Read the index of the folder at `path`: ``.metadata``, and the objects that are not tensors.

    Raises `CkptError`, all problems at once, if ``.metadata`` and the data files do not fit.
    """
    source = join(path, DCP_METADATA)
    shards = sorted(name for name in names_in(path) if HF_SHARD.fullmatch(name))
    notes: tuple[str, ...] = ()
    data = b""
    if shards and not exists(source):  # `HuggingFaceStorageWriter` writes no .metadata
        metadata, note = read_shards(path, shards)
        notes = (note,)
    else:
        with opened(source) as file:
            data = file.read(limits().pickle_bytes + 1)
        if len(data) > limits().pickle_bytes:
            raise CkptError(
                f"{source} is too long: {limits().named('pickle_bytes')}",
                hint="copy it again: it is damaged",
            )
        metadata = parse(data, source)
    sizes = _check_files(path, metadata)
    metadata = locate_chunks(path, metadata)
    _check_overlaps(path, _places(metadata))
    reader = _ItemReader(path, _unlike_torch_files(metadata))
    leaves = {}
    values = 0  # bytes of pickled objects
    for key, item in metadata.items.items():
        leaves[metadata.paths[key]] = reader.node(key, item)
        values += item.place.length if isinstance(item, BytesItem) else 0
    root = nested(leaves)
    nbytes = len(data) + sum(sizes.values())
    pickled = max(len(data), _PICKLED * len(metadata.items)) + values
    storages = Storages(
        lambda key, nbytes: reader.rebuilder.storages[key], memory=Memory(nbytes), pickled=pickled
    )
    return read_tree(
        path,
        FORMAT,
        nbytes,
        Pickle(root, 2),
        storages,
        {key: storage.nbytes for key, storage in reader.rebuilder.storages.items()},
        container=partial(
            Folder, home=path, items=reader.items, values=reader.values, names=tuple(sizes)
        ),
        notes=notes,
        other_files=other_files(path),
    )


def holds_each_option(checkpoint: Checkpoint, path: str) -> bool:
    """Return True if the folder holds each entry of the param groups of the optimizer at `path`
    under its own key.

    Then `dcp.load` needs a key for each of them. Until torch 2.3 all groups were one value.
    """
    folder = checkpoint.container
    key = f"{path}.param_groups".lstrip(".")
    if not isinstance(folder, Folder):
        return True
    single_values = (value_key for _, value_key in folder.values)
    return key not in single_values


def _refuse(folder: str, problems: list[Problem]) -> None:
    if problems:
        raise CkptError(
            f"{folder}: {DCP_METADATA} and the data files do not fit",
            hint="copy the folder again; if an extension encoded the data, save it again without"
            " the extension",
            problems=problems,
        )


def _check_files(folder: str, metadata: Metadata) -> dict[str, int]:
    """Return the data files with their sizes in bytes. Raises `CkptError`, all problems at once,
    for bad items.
    """
    places = _places(metadata)
    sizes: dict[str, int] = {}
    problems = []
    for name in dict.fromkeys(place.name for place in places):
        path = safe_path(folder, name)
        if path is None:
            problems.append(Problem("leads out of the folder", name))
        elif name == DCP_METADATA:
            problems.append(Problem("describes the folder, and holds no data", name))
        elif not is_file(path):
            problems.append(Problem("the data file is missing", name))
        else:
            sizes[name] = size(path)
    for place, key in places.items():
        if place.name in sizes and place.offset + place.length > sizes[place.name]:
            problems.append(
                Problem(f"{place.name} ends at byte {sizes[place.name]:,}, before its data", key)
            )
        if not place.length and not place.raw:
            problems.append(Problem("it has no bytes: torch.save writes some for every item", key))
        if place.transforms:
            problems.append(Problem(f"an extension encoded it: {', '.join(place.transforms)}", key))
    _refuse(folder, problems)
    return sizes


def _places(metadata: Metadata) -> dict[FileRange, str]:
    """Return the key of the item at each place."""
    places: dict[FileRange, str] = {}
    for key, item in metadata.items.items():
        places.update(dict.fromkeys(item.places, key))
    return places


def _unlike_torch_files(metadata: Metadata) -> frozenset[TensorItem]:
    """Return the tensors whose places are shorter or longer than a torch file of a dense tensor:
    they may be of a subclass. If there are any, small tensors may be too.
    """
    unlike: set[TensorItem] = set()
    small: set[TensorItem] = set()
    for item in metadata.items.values():
        if not isinstance(item, TensorItem):
            continue
        size = dtypes.itemsize(item.dtype)
        for chunk, place in item.chunks:
            nbytes = prod(chunk.sizes) * size
            if place.raw:
                continue
            if item.dtype in dtypes.QUANTIZED or not 0 <= place.length - nbytes <= _AROUND:
                unlike.add(item)
            elif nbytes <= _SMALL:
                small.add(item)
    return frozenset(unlike | small if unlike else ())


def _check_overlaps(folder: str, places: Mapping[FileRange, str]) -> None:
    """Raise `CkptError`, all problems at once, if two items share bytes."""
    in_order = sorted(places, key=lambda place: (place.name, place.offset, place.length))
    problems = []
    for place, following in pairwise(in_order):
        if place.name == following.name and place.offset + place.length > following.offset:
            text = f"it shares bytes in {place.name} with {places[place]}"
            problems.append(Problem(text, places[following]))
    _refuse(folder, problems)


def tensor_data(folder: str, key: str, item: TensorItem) -> Lazy:
    """Return the bytes of the tensor in row-major order.

    Producing them raises `CkptError` if a chunk is not as ``.metadata`` describes it.
    """

    def produce() -> Iterator[Part]:
        chunks = []
        for chunk, place in item.chunks:
            if prod(chunk.sizes):
                chunks.append((chunk, _chunk_data(folder, key, item.dtype, chunk, place)))
        return assemble(item.shape, dtypes.itemsize(item.dtype), chunks)

    return Lazy(item.nbytes, produce)


def _chunk_data(folder: str, key: str, dtype: str, chunk: Chunk, place: FileRange) -> Data:
    if place.raw:
        return Span(join(folder, place.name), place.offset, place.length)
    saved = _saved(folder, place)
    entries = list(chain(*(section.tensors for section in saved.sections)))
    actual = "not one tensor"
    if len(entries) == 1:
        entry = entries[0]
        is_as_described = (entry.dtype, entry.shape) == (dtype, chunk.sizes)
        if isinstance(entry.payload, Payload):
            entry = entry.payload.resolved(entry)  # a lazily conjugated tensor
        if is_as_described and entry.storage is not None:
            return row_major_data(entry)
        actual = f"{entry.layout} {entry.dtype} {list(entry.shape)}"
    raise CkptError(
        f"{saved.source}: {actual} instead of a chunk of {key} ({dtype} {list(chunk.sizes)}), "
        "which .metadata describes",
        hint="the folder holds files of two checkpoints, or is damaged: copy it again",
    )


def _saved(folder: str, place: FileRange) -> Checkpoint:
    """Read the index of what torch.save wrote at `place`."""
    path = join(folder, place.name)
    return torch_zip.read_from(read_archive(path, place.offset, place.length), path)


def _without_data(message: str) -> Storages:
    """Return storages whose bytes raise `CkptError` with this message."""

    def produce() -> Iterator[Part]:
        raise CkptError(
            message,
            hint="load it with torch.distributed.checkpoint where its class is known, save plain"
            " tensors",
        )

    return Storages(lambda key, nbytes: Storage(Lazy(nbytes, produce)))


@dataclass(slots=True, eq=False)
class _ItemReader:
    """Makes the nodes of a folder's items. Items at the same place in a file share a storage or a
    node.
    """

    folder: str
    unlike_torch_files: Collection[TensorItem] = ()
    rebuilder: Rebuilder = field(default_factory=Rebuilder)
    items: dict[int, Item] = field(default_factory=dict)
    values: dict[tuple[bytes, str], FileRange] = field(default_factory=dict)
    storages: dict[TensorItem, Storage] = field(default_factory=dict)
    subclasses: dict[TensorItem, Any] = field(default_factory=dict)
    # by the digest of what torch.save wrote: the node of the object, and its pickle
    objects: dict[bytes, tuple[Any, bytes]] = field(default_factory=dict)

    def node(self, key: str, item: Item) -> Any:
        if isinstance(item, BytesItem):
            return self._value(key, item.place)
        if item in self.unlike_torch_files:
            node = self._subclass(key, item)
            if node is not None:
                return node
        storage = self.storages.get(item)
        if storage is None:
            storage = self.storages[item] = Storage(tensor_data(self.folder, key, item))
        node = self.rebuilder.node(in_row_major(key, item.dtype, item.shape, storage))
        if not any(place.raw for place in item.places):
            self.items[id(node)] = item
        return node

    def _subclass(self, key: str, item: TensorItem) -> Any:
        """Return the node of a tensor that torch.save wrote with other data than its elements; None
        for a dense one, and for damaged data, which reading the values reports.
        """
        if item in self.subclasses:
            return self.subclasses[item]
        node = None
        chunk, place = item.chunks[0]
        try:
            saved = _saved(self.folder, place)
        except CkptError:
            return None
        entries = list(chain(*(section.tensors for section in saved.sections)))
        is_one = len(entries) == 1 and (entries[0].dtype, entries[0].shape) == (
            item.dtype,
            chunk.sizes,
        )
        if is_one and entries[0].storage is None:
            container = saved.container
            assert isinstance(container, Container)
            root, storages = container.pickle.root, container.tree.storages
            if len(item.chunks) > 1:
                kind = f"{len(item.chunks)} parts that are {entries[0].layout} tensors"
                root = resized(root, item.shape)
                storages = _without_data(f"{self.folder}: {key} is in {kind}")
            if root is not None:
                node = self.rebuilder.transplant(Carried(root, storages))
                self.items[id(node)] = item
        self.subclasses[item] = node
        return node

    def _value(self, key: str, place: FileRange) -> Any:
        """Return the root of the object that torch.save wrote at `place`. Equal bytes are read
        once.
        """
        if place.length > _MAX_VALUE:
            raise CkptError(
                f"{self.folder}: {key} is {place.length:,} bytes and not a tensor",
                hint="it is damaged",
            )
        raw = bytes(read_span(Span(join(self.folder, place.name), place.offset, place.length)))
        import hashlib  # loads OpenSSL

        digest = hashlib.sha256(raw).digest()
        if digest not in self.objects:
            try:
                self.objects[digest] = self._read_value(place)
            except CkptError as error:
                problem = Problem(error.message, key)
                raise CkptError(
                    f"{self.folder}: {key} is not as torch.save writes it",
                    hint=error.hint,
                    problems=[problem],
                ) from error
        node, pickled = self.objects[digest]
        if pickled:
            self.values[pickled, key] = place
            self.values.setdefault((pickled, ""), place)
        else:
            self.items[id(node)] = BytesItem(place)
        return node

    def _read_value(self, place: FileRange) -> tuple[Any, bytes]:
        """Return the object's node and its pickle, which is empty for an object that holds
        tensors.
        """
        container = _saved(self.folder, place).container
        assert isinstance(container, Container)
        node = container.pickle.root
        references: list[Persistent] = []
        pickled = dumps(Pickle(node, 2), references)
        if references:
            return self.rebuilder.transplant(Carried(node, container.tree.storages)), b""
        return node, pickled


# Writing


@many_objects()
def layout_files(
    checkpoint: Checkpoint, kind: str = FORMAT, name: str = "", max_shard_size: int | None = None
) -> Files:
    """Return the files of the folder, ``.metadata`` last. Items of the source's folder stay in
    their files.

    Each of several ranks gets a file of about the same size, as if it had saved its part. Raises
    `Refused`, all problems at once, for what torch.distributed.checkpoint cannot hold. `kind`,
    `name` and `max_shard_size` are for other formats.
    """
    rebuilder = Rebuilder()
    container = checkpoint.container
    source = container if isinstance(container, Folder) else None
    if isinstance(container, Container):
        rebuilder.learn(container.tree.storages)
        root = changed_root(checkpoint, container.pickle.root, container.tree, rebuilder)
    else:
        root = fresh_root(checkpoint, rebuilder)
    alone = ""
    for section in checkpoint.sections:
        if not section.path:
            alone = state_dict_alone(checkpoint.source, section)
    nbytes = max(checkpoint.nbytes, sum(section.nbytes for section in checkpoint.sections))
    leaves = flattened(root, nbytes, alone)

    def storage(key: str, nbytes: int) -> Storage:
        if key not in rebuilder.storages and isinstance(container, Container):
            # one that only other objects hold
            rebuilder.adopt(container.tree.storages.get(key, nbytes), key)
        return rebuilder.storages[key]

    job = current()
    names = [_free_name(source, rank) for rank in range(1 if job is None else job.size)]
    ends = [(0, rank, name) for rank, name in enumerate(names)]
    new_files: dict[str, list[Piece]] = {name: [] for name in names}
    writer = _ItemWriter(rebuilder, Storages(storage), source, new_files, ends)
    items: dict[str, Item] = {}
    paths: dict[str, Path] = {}
    for key, (path, node) in leaves.items():
        items[key] = writer.item(key, node)
        paths[key] = path
    if writer.problems:
        raise Refused(
            "torch.distributed.checkpoint cannot hold these entries",
            hint="write a torch file (OUT ending in .pt)",
            problems=writer.problems,
        )
    metadata = Metadata(items, paths)
    home = source.home if source is not None else ""
    files: dict[str, Pieces | Link] = {}
    for place in _places(metadata):
        files[place.name] = new_files.get(place.name) or Link(join(home, place.name))
    files[DCP_METADATA] = [Piece(spelled(metadata))]
    return files


def linked_imports(imports: Iterable[Import], files: Files, linked: Mapping[str, str]) -> set[str]:
    """Return the names of those imports that are in a linked data file (name -> real path) and are
    read.

    The bytes of dropped entries stay in such a file, and ``.metadata`` does not list them. Equal
    objects are read once, so an object's own bytes tell what it imports.
    """
    content = files[DCP_METADATA]
    assert not isinstance(content, Link)
    pickles: list[tuple[Import, bytes]] = []  # each import of a real file, with its bytes there
    for imported in imports:
        span = Span(imported.file, imported.start, imported.end - imported.start)
        real = replace(imported, file=os.path.realpath(imported.file))
        pickles.append((real, bytes(read_span(span))))
    names: set[str] = set()
    for item in parse(literal(content), DCP_METADATA).items.values():
        for place in item.places:
            if place.name not in linked:
                continue
            span = Span(linked[place.name], place.offset, place.length)
            raw = bytes(read_span(span)) if isinstance(item, BytesItem) else b""
            for real, pickle in pickles:
                if pickle in raw or real.is_in(span.path, span.offset, span.length):
                    names.add(real.name)
    return names


def layout_in_place(checkpoint: Checkpoint) -> dict[str, Edited] | None:
    """Return the edit of ``.metadata``; None if the data files would change too. Raises as
    `layout_files`.
    """
    folder = checkpoint.container
    if not isinstance(folder, Folder):
        return None
    files = dict(layout_files(checkpoint))
    content = files.pop(DCP_METADATA)
    if isinstance(content, Link) or not all(isinstance(data, Link) for data in files.values()):
        return None
    path = join(folder.home, DCP_METADATA)
    before = bytes(read_span(Span(path, 0, size(path))))
    after = literal(content)
    return {DCP_METADATA: Edited([Piece(after)], before, after)}


def _free_name(source: Folder | None, rank: int) -> str:
    used = set(source.names) if source is not None else set()
    number = 0
    while f"__{rank}_{number}.distcp" in used:
        number += 1
    return f"__{rank}_{number}.distcp"


@dataclass(slots=True, eq=False)
class _ItemWriter:
    """Returns the item of each leaf: the item that was read, or a new item at the end of the
    smallest of `files`.
    """

    rebuilder: Rebuilder
    storages: Storages
    source: Folder | None
    files: dict[str, list[Piece]]
    ends: list[tuple[int, int, str]]  # a heap: bytes, rank, name
    tensors: dict[object, TensorItem] = field(default_factory=dict)
    values: dict[bytes, FileRange] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def item(self, key: str, node: Any) -> Item:
        unchanged = self.source.items.get(id(node)) if self.source is not None else None
        if unchanged is not None:
            return unchanged
        if is_tensor(node):
            return self._tensor(key, node)
        references: list[Persistent] = []
        pickled = dumps(Pickle(node, 2), references)
        saved = self.source.values if self.source is not None else {}
        place = saved.get((pickled, key)) or saved.get((pickled, "")) or self.values.get(pickled)
        if place is None:
            for reference in references:
                typed_storage(reference, self.storages)
            place = self.values[pickled] = self._append(
                torch_zip.new_archive(node, 2, self.rebuilder)
            )
        return BytesItem(place)

    def _tensor(self, key: str, node: Any) -> Item:
        entry = entry_of(key, node, self.storages)
        if entry.storage is None:
            text = f"a {entry.layout} tensor has no place in the format"
            self.problems.append(Problem(text, key))
            return BytesItem(FileRange("", 0, 0))
        identity = entry.identity
        if identity not in self.tensors:
            data = entry.storage.data
            if isinstance(data, Span):  # write only the part of the storage that the tensor spans
                itemsize = dtypes.itemsize(entry.dtype)
                count = entry.end - entry.offset if entry.numel else 0
                span = Span(data.path, data.offset + entry.offset * itemsize, count * itemsize)
                entry = replace(entry, offset=0, storage=Storage(span))
            alone = Rebuilder()
            place = self._append(torch_zip.new_archive(alone.node(entry), 2, alone))
            chunk = Chunk((0,) * len(entry.shape), entry.shape)
            self.tensors[identity] = TensorItem(entry.dtype, entry.shape, ((chunk, place),))
        return self.tensors[identity]

    def _append(self, pieces: Pieces) -> FileRange:
        end, rank, name = self.ends[0]
        place = FileRange(name, end, nbytes_of(pieces))
        self.files[name] += pieces
        heapreplace(self.ends, (end + place.length, rank, name))
        return place
