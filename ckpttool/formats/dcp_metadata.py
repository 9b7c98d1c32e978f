"""Read and write the ``.metadata`` of torch.distributed.checkpoint. Its pickle is never run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from operator import add
from typing import Any, Union

from ckpttool.containers import strict_json
from ckpttool.containers.chunks import Chunk, cover_problem
from ckpttool.containers.nodes import made_of
from ckpttool.containers.pickle_read import ABSENT, Call, Global, Origin, Pickle, loads
from ckpttool.containers.pickle_write import dumps
from ckpttool.containers.tensors import MAX_DIMS
from ckpttool.core import dtypes
from ckpttool.core.checkpoint import Span, TensorEntry
from ckpttool.core.errors import CkptError, Problem
from ckpttool.core.strides import Shape
from ckpttool.core.tables import by_key
from ckpttool.core.text import some
from ckpttool.core.values import dataclass
from ckpttool.evaluate.compare import same_values
from ckpttool.formats import safetensors
from ckpttool.io.files import look_ahead, opened
from ckpttool.io.paths import join

Path = tuple[Union[str, int], ...]


@dataclass(frozen=True, slots=True)
class FileRange:
    """The place of an item or chunk: `length` bytes from `offset` of the file `name` in the folder.

    `transforms` are the stream extensions (compression, encryption) that encoded the bytes. `raw`
    bytes are the elements themselves instead of a torch file; torch's own ``.metadata`` cannot say
    that.
    """

    name: str
    offset: int
    length: int
    transforms: tuple[str, ...] = ()
    raw: bool = False


@dataclass(frozen=True, slots=True)
class TensorItem:
    """A tensor: chunks that cover it, with their places.

    `more` are properties that later versions of torch added, copied unchanged: since 2.15 its
    strides, or None.
    """

    dtype: str
    shape: Shape
    chunks: tuple[tuple[Chunk, FileRange], ...]
    more: tuple[Shape | None, ...] = ()

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * dtypes.itemsize(self.dtype)

    @property
    def places(self) -> list[FileRange]:
        return [place for _, place in self.chunks]


@dataclass(frozen=True, slots=True)
class BytesItem:
    """Any other object, as torch.save wrote it."""

    place: FileRange

    @property
    def places(self) -> list[FileRange]:
        return [self.place]


Item = Union[TensorItem, BytesItem]


@dataclass(frozen=True, slots=True)
class Metadata:
    """All items by flat key, and for each key its path in the nested state dict."""

    items: Mapping[str, Item]
    paths: Mapping[str, Path]


_MAX_SIZE = 1 << 62  # bytes of a tensor; every later sum stays a plain number
# of all tensors: more do not fit into a pickle that is read, unless it repeats itself
_MAX_CHUNKS = 4_000_000
# what reading an unexpected node raises
_MISREAD = (KeyError, TypeError, ValueError, AttributeError, IndexError)


def parse(data: bytes, source: str) -> Metadata:
    """Read the pickle of a ``.metadata`` file.

    Raises `CkptError`, all problems at once, if torch did not write it.
    """
    pickle = loads(data, origin=Origin(source, len(data), end=len(data)))
    problems: list[Problem] = []
    items: dict[str, Item] = {}
    paths: dict[str, Path] = {}
    chunks_left = _MAX_CHUNKS
    try:
        root = _state(pickle.root, "Metadata")
        places = _places(root["storage_data"])
        for key, node in root["state_dict_metadata"].items():
            try:
                if type(key) is not str:
                    raise ValueError("its key is not a string")
                if _is(node, "BytesStorageMetadata"):
                    items[key] = BytesItem(places[key, None])
                    continue
                listed = _list(_state(node, "TensorStorageMetadata")["chunks"])
                chunks_left -= len(listed)
                if chunks_left < 0:
                    raise ValueError(f"more than {_MAX_CHUNKS:,} chunks")
                items[key] = _tensor(key, node.state, listed, places)
            except KeyError:
                problems.append(Problem("storage_data has no place for it", str(key)))
            except _MISREAD as error:
                problems.append(Problem(str(error), str(key)))
        paths = _paths(root.get("planner_data"), items)
    except _MISREAD as error:
        problems = [Problem(f"not as torch writes it: {error}", "Metadata")]
    if problems:
        raise CkptError(
            f"{source} does not describe a checkpoint that torch.distributed.checkpoint could load",
            hint="copy it again together with its .distcp files, or save it again",
            problems=problems,
        )
    return Metadata(items, paths)


def _tensor(
    key: str,
    state: Mapping[str, Any],
    listed: Sequence[Any],
    places: Mapping[tuple[str, Any], FileRange],
) -> TensorItem:
    properties = _state(state["properties"], "TensorProperties")
    dtype = properties[0]
    if type(dtype) is not Global or dtype.module != "torch" or dtype.name not in dtypes.BY_NAME:
        raise ValueError(f"unknown dtype {dtype}")
    shape = _sizes(state["size"])
    if prod(shape) * dtypes.itemsize(dtype.name) > _MAX_SIZE:
        raise ValueError(f"its shape {list(shape)} is too large")
    chunks: dict[Chunk, None] = {}  # replicas are listed once for each rank
    for node in listed:
        chunk = _state(node, "ChunkStorageMetadata")
        chunks[Chunk(_sizes(chunk["offsets"]), _sizes(chunk["sizes"]))] = None
    placed = tuple((chunk, places[key, chunk.offsets]) for chunk in chunks)
    problem = cover_problem(shape, chunks)
    if problem:
        raise ValueError(problem)
    # after dtype, layout, requires_grad, memory format, pinned: what every version of torch has
    more = properties[5:]
    if len(more) > 1:
        raise ValueError("a newer torch wrote its properties: pip install -U ckpttool")
    return TensorItem(dtype.name, shape, placed, tuple(map(_sizes_if_any, more)))


def _places(node: Any) -> dict[tuple[str, Any], FileRange]:
    """Return the place of each item by its key, and of a chunk by key and offsets."""
    places = {}
    for index_node, info_node in node.items():
        index = _state(index_node, "MetadataIndex")
        info = _state(info_node, "_StorageInfo")
        name, start, length = info["relative_path"], info["offset"], info["length"]
        has_types = type(name) is str and type(start) is int and type(length) is int
        if not has_types or start < 0 or length < 0:
            raise ValueError(f"{name!r}, byte {start!r}, {length!r} bytes")
        transforms = tuple(map(str, _list(info.get("transform_descriptors") or [])))
        offsets = index.get("offset")
        if offsets is not None:
            offsets = _sizes(offsets)
        places[index["fqn"], offsets] = FileRange(name, start, length, transforms)
    return places


def _paths(node: Any, items: Mapping[str, Item]) -> dict[str, Path]:
    """Return the paths of the flattened state dict. One that was saved flat
    (``flatten_state_dict=False``) has none.
    """
    paths: dict[str, Path] = {key: (key,) for key in items}
    if node is None:
        return paths
    for key, path in node.items():
        if not _is_flat_key(key, path):
            raise ValueError(f"{key!r:.80} is not the flat key of its path")
        if key in paths:
            paths[key] = path
    return paths


def _is_flat_key(key: str, path: Any) -> bool:
    """Return True if the steps of the path, joined by dots, are the key."""
    if type(path) is not tuple or not all(type(step) in (str, int) for step in path):
        return False
    # The length is compared first: joining a crafted path could take very long.
    least = len(path) - 1
    for step in path:
        least += len(step) if isinstance(step, str) else 1
    return least <= len(key) and ".".join(map(str, path)) == key


def _is(node: Any, name: str) -> bool:
    """Return True if the node makes an object of this class of torch, in whichever module the class
    was then.
    """
    return (
        type(node) is Call
        and type(node.func) is Global
        and node.func.name == name
        and node.func.module.startswith("torch.")
    )


def _state(node: Any, name: str) -> Any:
    if not _is(node, name):
        raise ValueError(
            f"{node.func if type(node) is Call else type(node).__name__} instead of a {name}"
        )
    return node.state


def _list(node: Any) -> Sequence[Any]:
    if isinstance(node, (list, tuple)):
        return node
    raise ValueError(f"{type(node).__name__} instead of a list")


def _sizes_if_any(node: Any) -> Shape | None:
    return None if node is None else _sizes(node)


def _sizes(node: Any) -> Shape:
    sizes = node
    if type(node) is Call and node.func == Global("torch", "Size"):
        sizes = node.args[0]
    if type(sizes) not in (tuple, list) or len(sizes) > MAX_DIMS:
        raise ValueError("its sizes are not a tuple")
    for size in sizes:
        if type(size) is not int or not 0 <= size <= _MAX_SIZE:
            raise ValueError(f"sizes {list(sizes)!r:.80}")
    return tuple(sizes)


_MODULE = "torch.distributed.checkpoint.metadata"
_STORAGE_MODULE = "torch.distributed.checkpoint.filesystem"


def spelled(metadata: Metadata) -> bytes:
    """Return the pickle of `metadata`, as torch reads it."""
    nodes = _TorchNodes()
    places = {}
    for key, item in metadata.items.items():
        chunks: list[tuple[Shape | None, FileRange]]
        if isinstance(item, BytesItem):
            chunks = [(None, item.place)]
        else:
            chunks = [(chunk.offsets, place) for chunk, place in item.chunks]
        for offsets, place in chunks:
            size = None if offsets is None else nodes.size(offsets)
            index = nodes.object(
                _MODULE, "MetadataIndex", {"fqn": key, "index": None, "offset": size}
            )
            info = {"relative_path": place.name, "offset": place.offset, "length": place.length}
            places[index] = nodes.object(_STORAGE_MODULE, "_StorageInfo", info)
    state = {
        "state_dict_metadata": {key: nodes.item(item) for key, item in metadata.items.items()},
        "planner_data": {key: metadata.paths[key] for key in metadata.items},
        "storage_data": places,
        "storage_meta": None,
        "version": "1.0.0",
    }
    return dumps(Pickle(nodes.object(_MODULE, "Metadata", state), 4))


class _TorchNodes:
    """Makes the nodes of torch's classes; every class is named once."""

    def __init__(self) -> None:
        self.globals: dict[tuple[str, str], Global] = {}
        self.layout = Call(self.name("torch.serialization", "_get_layout"), ("torch.strided",))
        self.format = Call(self.name(_MODULE, "_MEM_FORMAT_ENCODING"), (0,))

    def name(self, module: str, name: str) -> Global:
        return self.globals.setdefault((module, name), Global(module, name))

    def object(self, module: str, name: str, state: Any = ABSENT) -> Call:
        return made_of(self.name(module, name), state)

    def size(self, sizes: Shape) -> Call:
        return Call(self.name("torch", "Size"), (sizes,))

    def item(self, item: Item) -> Call:
        if isinstance(item, BytesItem):
            return self.object(_MODULE, "BytesStorageMetadata")
        properties = (
            self.name("torch", item.dtype),
            self.layout,
            False,
            self.format,
            False,
            *item.more,
        )
        chunks = []
        for chunk, _ in item.chunks:
            state = {"offsets": self.size(chunk.offsets), "sizes": self.size(chunk.sizes)}
            chunks.append(self.object(_MODULE, "ChunkStorageMetadata", state))
        tensor = {
            "properties": self.object(_MODULE, "TensorProperties", properties),
            "size": self.size(item.shape),
            "chunks": chunks,
        }
        return self.object(_MODULE, "TensorStorageMetadata", tensor)


# bytes that show a safetensors file: the length of its header, and the header's first character
_HEAD = 9
_OBJECTS = 1 << 17  # bytes of objects to fetch together with the head
_AHEAD = 64  # files whose heads are fetched concurrently


def locate_chunks(folder: str, metadata: Metadata) -> Metadata:
    """Return `metadata` with the places of chunks in safetensors files, which ``.metadata`` does
    not give.
    """
    files = _safetensors_files(folder, _heads(metadata))
    if not files:
        return metadata
    items = dict(metadata.items)
    for key, item in metadata.items.items():
        if isinstance(item, TensorItem):
            chunks = []
            for chunk, place in item.chunks:
                if place.name in files:
                    span = _span_of(files[place.name].get(key), item.dtype, chunk.sizes)
                    if span is None:
                        raise CkptError(
                            f"{join(folder, place.name)} has no chunk of {key} as .metadata"
                            " describes it",
                            hint="the folder holds files of two checkpoints, or is damaged: copy"
                            " it again",
                        )
                    place = _raw_place(place.name, span)
                chunks.append((chunk, place))
            items[key] = replace(item, chunks=tuple(chunks))
    return replace(metadata, items=items)


def _span_of(entry: TensorEntry | None, dtype: str, shape: Shape) -> Span | None:
    """Return the bytes of a tensor; None if it has another dtype or shape."""
    if entry is None or (entry.dtype, entry.shape) != (dtype, shape):
        return None
    return entry.span


def _heads(metadata: Metadata) -> dict[str, int]:
    """Return how many first bytes of each file with tensors to fetch: with the objects that precede
    the tensors, if they are small.
    """
    heads: dict[str, int] = {}
    for item in metadata.items.values():
        if isinstance(item, TensorItem):
            for place in item.places:
                heads[place.name] = _HEAD
    for item in metadata.items.values():
        if not isinstance(item, BytesItem) or item.place.name not in heads:
            continue
        name, end = item.place.name, item.place.offset + item.place.length
        if end <= _OBJECTS:
            heads[name] = max(heads[name], end)
    return heads


def _safetensors_files(folder: str, heads: Mapping[str, int]) -> dict[str, dict[str, TensorEntry]]:
    """Return the tensors of each file that is one of safetensors, by key."""
    names = list(heads)
    files: dict[str, dict[str, TensorEntry]] = {}
    for number, name in enumerate(names):
        if number % _AHEAD == 0:
            ahead = names[number : number + _AHEAD]
            look_ahead({join(folder, later): heads[later] for later in ahead})
        path = join(folder, name)
        with opened(path) as file:
            head = file.read(_HEAD)
        if head[8:] == b"{":
            (section,) = safetensors.read(path).sections
            files[name] = by_key(section.tensors)
    return files


def _raw_place(name: str, span: Span) -> FileRange:
    return FileRange(name, span.offset, span.length, raw=True)


def read_shards(folder: str, names: Sequence[str]) -> tuple[Metadata, str]:
    """Assemble these safetensors files by the offsets in their ``__metadata__``; also return a
    note.

    Raises `CkptError`, all problems at once, if the chunks do not cover the tensors.
    """
    # a chunk that several ranks saved is one chunk
    chunks: dict[str, dict[Chunk, TensorEntry]] = {}
    places: dict[str, dict[Chunk, FileRange]] = {}
    problems: list[Problem] = []
    for name in names:
        shard = safetensors.read(join(folder, name))
        offsets = _offsets(shard.metadata.get(safetensors.OFFSETS, "{}"))
        for entry in shard.sections[0].tensors:
            key, at = entry.key, offsets.get(entry.key)
            if at is None or len(at) != len(entry.shape) or entry.span is None:
                problems.append(Problem(f"{name} does not give the offsets of its chunk", key))
                continue
            chunk = Chunk(at, entry.shape)
            first = chunks.setdefault(key, {}).setdefault(chunk, entry)
            if not same_values(first, entry):
                text = f"{name} has other values at {list(at)} than another rank's shard"
                problems.append(Problem(text, key))
            places.setdefault(key, {})[chunk] = _raw_place(name, entry.span)
    items = {}
    for key, entries in chunks.items():
        dtypes = sorted({entry.dtype for entry in entries.values()})
        if len(dtypes) > 1:
            problems.append(Problem(f"chunks of {' and '.join(dtypes)}", key))
        ends = zip(*map(_ends, entries))  # of all chunks, in each dimension
        shape = tuple(map(max, ends))
        problem = cover_problem(shape, entries)
        if problem is not None:
            problems.append(Problem(problem, key))
        items[key] = TensorItem(dtypes[0], shape, tuple(places[key].items()))
    if problems:
        raise CkptError(
            f"{folder}: its shards do not cover the tensors",
            hint="copy the shards of all ranks into one folder",
            problems=problems,
        )
    ranks = {int(name.split("-")[1]) for name in names}
    missing = [str(rank) for rank in range(1, max(ranks)) if rank not in ranks]
    gap = f", without {some(missing, 8)}" if missing else ""
    note = (
        f"assembled from the shards up to rank {max(ranks)}{gap}: no file says how many ranks"
        " there were"
    )
    return Metadata(items, {key: (key,) for key in items}), note


def _ends(chunk: Chunk) -> list[int]:
    return list(map(add, chunk.offsets, chunk.sizes))


def _offsets(text: str) -> dict[str, tuple[int, ...]]:
    """Return the offsets of each tensor's chunk; offsets that are not numbers are left out."""
    try:
        info: Any = strict_json.loads(text)
    except ValueError:
        return {}
    offsets = {}
    for key, value in info.items() if isinstance(info, dict) else ():
        saved = value.get("saved_offsets") if isinstance(value, dict) else None
        if isinstance(saved, list) and all(map(_is_offset, saved)):
            offsets[key] = tuple(saved)
    return offsets


def _is_offset(value: object) -> bool:
    return type(value) is int and 0 <= value < _MAX_SIZE
