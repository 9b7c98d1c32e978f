"""Folders of torch.distributed.checkpoint (DCP): ``.metadata`` describes the items, ``*.distcp`` files hold them.

Read to the tree that torch.save would have written, with the chunks of each tensor put together when they are needed. A
rename writes ``.metadata`` alone: every item that is still the same stays in its file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import field, replace
from heapq import heapreplace
from itertools import pairwise
from typing import Any

from ckpttool.core import dtypes
from ckpttool.core.checkpoint import Checkpoint, Lazy, Span, Storage, TensorEntry, in_row_major
from ckpttool.core.errors import CkptError, Problem, Refused
from ckpttool.core.limits import Memory, limits
from ckpttool.core.values import dataclass, many_objects
from ckpttool.distributed.job import current
from ckpttool.formats.dcp.chunks import located, ranks_remark, read_shards, saved, tensor_data
from ckpttool.formats.dcp.flat_keys import flattened, nested
from ckpttool.formats.dcp.metadata import BytesItem, Chunk, Item, Metadata, Place, TensorItem, parse, spelled
from ckpttool.formats.detect_folder import DCP_METADATA, HF_SHARD, beside
from ckpttool.formats.pickle_read import Persistent, Pickle
from ckpttool.formats.pickle_write import dumps
from ckpttool.formats.torch import zip_file as torch_zip
from ckpttool.formats.torch.tensors import Carried, Rebuilder, Storages, entry_of, is_tensor, typed_storage
from ckpttool.formats.torch.tree import Tree, read_tree, unreached
from ckpttool.formats.torch.write_tree import changed_root, fresh_root
from ckpttool.io.files import exists, is_file, names_in, opened, size
from ckpttool.io.paths import join, safe_path
from ckpttool.io.pieces import Files, Link, Piece, Pieces, nbytes_of
from ckpttool.io.ranges import read_span

FORMAT = "dcp"

_MAX_VALUE = 1 << 24  # bytes of an item that is no tensor


@dataclass(frozen=True, slots=True, eq=False)
class Container(torch_zip.Container):
    """What the writer needs of the folder that was read, as the tree of a torch file.

    `items` are the tensors, and the objects that hold some, by the id of their node in the tree. `values` are the
    places of all other objects by their pickle and flat key, and once more without the key. `names` are the data files
    in the folder `home`.
    """

    home: str = ""
    items: Mapping[int, Item] = field(default_factory=dict)
    values: Mapping[tuple[bytes, str], Place] = field(default_factory=dict)
    names: tuple[str, ...] = ()


# Reading


@many_objects()
def read(path: str) -> Checkpoint:
    """The index of the folder at `path`. Reads ``.metadata`` and the objects that are no tensors; runs no pickle.

    Raises `CkptError`, all problems at once, where ``.metadata`` and the data files do not fit.
    """
    metadata, nbytes, notes = _read_metadata(path)
    sizes = _check_files(path, metadata)
    metadata = located(path, metadata)
    _check_apart(path, metadata)
    reader = _Reader(path)
    leaves = {metadata.paths[key]: reader.node(key, item) for key, item in metadata.items.items()}
    root = nested(leaves)
    memory = Memory(nbytes + sum(sizes.values()))
    storages = Storages(lambda key, nbytes: reader.rebuilder.storages[key], memory=memory, pickled=nbytes)
    for key, storage in reader.rebuilder.storages.items():
        storages.get(key, storage.nbytes)  # also those that no tensor looks at: the writer needs them all

    def made(tree: Tree) -> Checkpoint:
        tree.unreached = unreached(root, storages, storages.found, storages.found.__getitem__)
        return Checkpoint(
            source=path,
            format=FORMAT,
            nbytes=nbytes + sum(sizes.values()),
            sections=tuple(place.section for place in tree.places.values()),
            others=tuple(tree.others),
            container=Container(None, "", Pickle(root, 2), tree, path, reader.items, reader.values, tuple(sizes)),
            notes=(*notes, *tree.notes),
            unreached=tree.unreached,
            beside=beside(path),
        )

    return read_tree(root, storages, made)


def _read_metadata(path: str) -> tuple[Metadata, int, tuple[str, ...]]:
    """The folder's metadata, the size of its file in bytes, and notes.

    `HuggingFaceStorageWriter` writes no such file.
    """
    source = join(path, DCP_METADATA)
    shards = sorted(name for name in names_in(path) if HF_SHARD.fullmatch(name))
    if shards and not exists(source):
        return read_shards(path, shards), 0, (ranks_remark(shards),)
    with opened(source) as file:
        data = file.read(limits().pickle_bytes + 1)
    if len(data) > limits().pickle_bytes:
        raise CkptError(f"{source} is too long: {limits().named('pickle_bytes')}", hint="copy it again: it is damaged")
    return parse(data, source), len(data), ()


def _places(item: Item) -> list[Place]:
    return [item.place] if isinstance(item, BytesItem) else [chunk.place for chunk in item.chunks]


def _check_apart(folder: str, metadata: Metadata) -> None:
    """Raises `CkptError` where two items have bytes in common and are not the same bytes."""
    places = {place: key for key, item in metadata.items.items() for place in _places(item)}
    in_order = sorted(places, key=lambda place: (place.name, place.offset, place.length))
    problems = [
        Problem(f"its bytes in {one.name} are also those of {places[one]}", places[other])
        for one, other in pairwise(in_order)
        if one.name == other.name and one.offset + one.length > other.offset
    ]
    _raise_if(problems, folder)


def _raise_if(problems: list[Problem], folder: str) -> None:
    if problems:
        raise CkptError(
            f"{folder}: {DCP_METADATA} and the data files do not fit",
            hint="copy the folder again; what went through an extension has to be saved again without it",
            problems=problems,
        )


def _check_files(folder: str, metadata: Metadata) -> dict[str, int]:
    """The data files and their sizes in bytes. Raises `CkptError`, all problems at once, where items do not fit."""
    places = {place: key for key, item in metadata.items.items() for place in _places(item)}
    sizes, problems = _sizes(folder, dict.fromkeys(place.name for place in places))
    for place, key in places.items():
        if place.name in sizes and place.offset + place.length > sizes[place.name]:
            problems.append(Problem(f"{place.name} ends at byte {sizes[place.name]:,}, before its data", key))
        if not place.length and not place.raw:
            problems.append(Problem("it has no bytes: torch.save writes some for every item", key))
        if place.transforms:
            problems.append(Problem(f"went through an extension: {', '.join(place.transforms)}", key))
    _raise_if(problems, folder)
    return sizes


def _sizes(folder: str, names: Iterable[str]) -> tuple[dict[str, int], list[Problem]]:
    sizes, problems = {}, []
    for name in names:
        path = safe_path(folder, name)
        if path is None:
            problems.append(Problem("leads out of the folder", name))
        elif name == DCP_METADATA:
            problems.append(Problem("describes the folder, and holds no data", name))
        elif not is_file(path):
            problems.append(Problem("the data file is missing", name))
        else:
            sizes[name] = size(path)
    return sizes, problems


@dataclass(slots=True, eq=False)
class _Reader:
    """Makes the nodes of a folder's items; what several items share, also the same place in a file, is one."""

    folder: str
    rebuilder: Rebuilder = field(default_factory=Rebuilder)
    items: dict[int, Item] = field(default_factory=dict)
    values: dict[tuple[bytes, str], Place] = field(default_factory=dict)
    storages: dict[TensorItem, Storage] = field(default_factory=dict)
    known: dict[bytes, tuple[Any, bytes]] = field(default_factory=dict)

    def node(self, key: str, item: Item) -> Any:
        if isinstance(item, BytesItem):
            return self._value(key, item.place)
        storage = self.storages.get(item)
        if storage is None:
            storage = self.storages[item] = Storage(tensor_data(self.folder, key, item))
        entry = in_row_major(key, item.dtype, item.shape, storage)
        node = self.rebuilder.node(entry)
        if not any(chunk.place.raw for chunk in item.chunks):
            self.items[id(node)] = item
        return node

    def _value(self, key: str, place: Place) -> Any:
        """The root of the object that torch.save wrote at `place`. Equal bytes are read once."""
        if place.length > _MAX_VALUE:
            raise CkptError(f"{self.folder}: {key} is {place.length:,} bytes and no tensor", hint="it is damaged")
        raw = bytes(read_span(Span(join(self.folder, place.name), place.offset, place.length)))
        digest = hashlib.sha256(raw).digest()
        if digest not in self.known:
            try:
                self.known[digest] = self._read_value(place)
            except CkptError as error:
                problem = Problem(error.message, key)
                raise CkptError(
                    f"{self.folder}: {key} is not as torch.save writes it", hint=error.hint, problems=[problem]
                ) from error
        node, spelling = self.known[digest]
        if spelling:
            self.values[spelling, key] = place
            self.values.setdefault((spelling, ""), place)
        else:
            self.items[id(node)] = BytesItem(place)
        return node

    def _read_value(self, place: Place) -> tuple[Any, bytes]:
        """The object's node, and its pickle; the latter is empty for an object that holds tensors."""
        container = saved(self.folder, place).container
        assert isinstance(container, torch_zip.Container)
        node = container.pickle.root
        references: list[Persistent] = []
        spelling = dumps(Pickle(node, 2), references)
        if references:
            return self.rebuilder.transplant(Carried(node, container.tree.storages)), b""
        return node, spelling


# Writing


@many_objects()
def layout_files(
    checkpoint: Checkpoint, kind: str = FORMAT, name: str = "", max_shard_size: int | None = None
) -> Files:
    """The files of the folder, ``.metadata`` last. Items that the source's folder holds are taken over in their files.

    Of several ranks each has a file of about as many bytes, as if each had saved its part. Raises `Refused`, all
    problems at once, for what torch.distributed.checkpoint cannot hold.
    """
    rebuilder = Rebuilder()
    source = checkpoint.container if isinstance(checkpoint.container, Container) else None
    leaves = flattened(_root(checkpoint, rebuilder))
    job = current()
    names = [_free_name(source, rank) for rank in range(1 if job is None else job.size)]
    ends = [(0, rank, name) for rank, name in enumerate(names)]
    writer = _Writer(rebuilder, _storages(checkpoint, rebuilder), source, {name: [] for name in names}, ends)
    items = {key: writer.item(key, node) for key, (_, node) in leaves.items()}
    if writer.problems:
        raise Refused(
            "torch.distributed.checkpoint cannot hold these entries",
            hint="write a torch file (OUT ending in .pt)",
            problems=writer.problems,
        )
    used = dict.fromkeys(place.name for item in items.values() for place in _places(item))
    files: dict[str, Pieces | Link] = {}
    for data in used:
        files[data] = writer.files.get(data) or Link(join(source.home, data) if source else "")
    files[DCP_METADATA] = [Piece(spelled(Metadata(items, {key: path for key, (path, _) in leaves.items()})))]
    return files


def _root(checkpoint: Checkpoint, rebuilder: Rebuilder) -> Any:
    """The tree that torch.save would write."""
    container = checkpoint.container
    if not isinstance(container, torch_zip.Container):
        return fresh_root(checkpoint, rebuilder)
    rebuilder.learn(container.tree.storages)
    return changed_root(checkpoint, container.pickle.root, container.tree, rebuilder)


def _storages(checkpoint: Checkpoint, rebuilder: Rebuilder) -> Storages:
    """Every storage that the tree refers to: those of its tensors, and those that only other objects hold."""
    container = checkpoint.container

    def find(key: str, nbytes: int) -> Storage:
        if key not in rebuilder.storages and isinstance(container, torch_zip.Container):
            rebuilder.adopt(container.tree.storages.get(key, nbytes), key)
        return rebuilder.storages[key]

    return Storages(find)


def _free_name(source: Container | None, rank: int) -> str:
    taken = set(source.names) if source is not None else set()
    number = 0
    while f"__{rank}_{number}.distcp" in taken:
        number += 1
    return f"__{rank}_{number}.distcp"


@dataclass(slots=True, eq=False)
class _Writer:
    """Finds or makes the item of each leaf; what is new goes to the end of the one of `files` with the fewest bytes."""

    rebuilder: Rebuilder
    storages: Storages
    source: Container | None
    files: dict[str, list[Piece]]
    ends: list[tuple[int, int, str]]  # a heap: bytes, rank, name
    tensors: dict[object, TensorItem] = field(default_factory=dict)
    values: dict[tuple[bytes, str], Place] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def item(self, key: str, node: Any) -> Item:
        known = self.source.items.get(id(node)) if self.source is not None else None
        if known is not None:
            return known
        if is_tensor(node):
            return self._tensor(key, node)
        references: list[Persistent] = []
        spelling = dumps(Pickle(node, 2), references)
        place = self._known(spelling, key)
        if place is None:
            for reference in references:
                typed_storage(reference, self.storages)
            place = self.values[spelling, ""] = self._append(torch_zip.new_archive(node, 2, self.rebuilder))
        return BytesItem(place)

    def _tensor(self, key: str, node: Any) -> Item:
        entry = entry_of(key, node, self.storages)
        if entry.storage is None:
            self.problems.append(Problem(f"a {entry.layout} tensor has no place in the format", key))
            return BytesItem(Place("", 0, 0))
        item = self.tensors.get(entry.identity)
        if item is None:
            alone = Rebuilder()
            place = self._append(torch_zip.new_archive(alone.node(_trimmed(entry)), 2, alone))
            chunk = Chunk((0,) * len(entry.shape), entry.shape, place)
            item = self.tensors[entry.identity] = TensorItem(entry.dtype, entry.shape, (chunk,))
        return item

    def _known(self, spelling: bytes, key: str) -> Place | None:
        """A place that holds this object: the one it was read from, or any other."""
        source = self.source.values if self.source is not None else {}
        return source.get((spelling, key)) or source.get((spelling, "")) or self.values.get((spelling, ""))

    def _append(self, pieces: Pieces) -> Place:
        end, rank, name = self.ends[0]
        place = Place(name, end, nbytes_of(pieces))
        self.files[name] += pieces
        heapreplace(self.ends, (end + place.length, rank, name))
        return place


def _trimmed(entry: TensorEntry) -> TensorEntry:
    """The same tensor on a storage of its own that holds no more than it spans."""
    assert entry.storage is not None
    data = entry.storage.data
    if isinstance(data, Lazy):
        return entry
    size = dtypes.itemsize(entry.dtype)
    last = entry.end - entry.offset if entry.numel else 0
    span = Span(data.path, data.offset + entry.offset * size, last * size)
    return replace(entry, offset=0, storage=Storage(span))
