"""`.metadata` of torch.distributed.checkpoint: read from its pickle, which is never run, and written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, Union

from ckpttool.core import dtypes
from ckpttool.core.errors import CkptError, Problem
from ckpttool.core.values import dataclass
from ckpttool.formats.pickle_read import Call, Global, Origin, Pickle, loads
from ckpttool.formats.pickle_write import dumps
from ckpttool.formats.torch.tensors import MAX_DIMS

Path = tuple[Union[str, int], ...]
BoxOf = tuple[tuple[int, ...], tuple[int, ...]]  # corner and sizes, in elements


@dataclass(frozen=True, slots=True)
class Place:
    """Where the bytes of an item or chunk lie: `length` bytes of the file `name` in the folder, from `offset` on.

    `transforms` are the stream extensions (compression, encryption) that the bytes went through. `raw` bytes are the
    elements themselves, not a torch file with them in it; torch's own ``.metadata`` cannot say that.
    """

    name: str
    offset: int
    length: int
    transforms: tuple[str, ...] = ()
    raw: bool = False


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor, its corner and sizes in elements, and where it lies."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: Place


@dataclass(frozen=True, slots=True)
class TensorItem:
    """A tensor in one or more chunks that cover it without overlapping.

    `more` are the properties that torch has added in later versions, kept as they are: since 2.15 its strides, or None.
    """

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    more: tuple[tuple[int, ...] | None, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor, of all its chunks."""
        return prod(self.shape) * dtypes.itemsize(self.dtype)


@dataclass(frozen=True, slots=True)
class BytesItem:
    """Any other object, as torch.save wrote it."""

    place: Place


Item = Union[TensorItem, BytesItem]


@dataclass(frozen=True, slots=True)
class Metadata:
    """All items by flat key, and for each the way to it through the nested state dict that was saved."""

    items: Mapping[str, Item]
    paths: Mapping[str, Path]


def cover_problem(shape: tuple[int, ...], boxes: list[BoxOf]) -> str | None:
    """Why the boxes do not cover the tensor, each element once; None where they do."""
    for offsets, sizes in boxes:
        inside = len(offsets) == len(sizes) == len(shape)
        if not inside or any(at + size > whole for at, size, whole in zip(offsets, sizes, shape)):
            return f"a chunk at {list(offsets)} of {list(sizes)} elements is not inside {list(shape)}"
    boxes = [box for box in boxes if 0 not in box[1]]
    covered = sum(prod(sizes) for _, sizes in boxes)
    if covered != prod(shape):
        return f"its chunks hold {covered:,} elements, it has {prod(shape):,}"
    return "two of its chunks overlap" if _overlap(boxes, len(shape)) else None


def _overlap(boxes: list[BoxOf], dims: int) -> bool:
    """Whether two boxes share an element: swept along the dimension in which most of them differ."""
    if len(boxes) < 2:
        return False
    along = max(range(dims), key=lambda dim: len({offsets[dim] for offsets, _ in boxes}))
    active: list[BoxOf] = []
    for offsets, sizes in sorted(boxes, key=lambda box: box[0][along]):
        active = [other for other in active if other[0][along] + other[1][along] > offsets[along]]
        for start, extent in active:
            if all(a < s + e and s < a + b for a, b, s, e in zip(offsets, sizes, start, extent)):
                return True
        active.append((offsets, sizes))
    return False


_MAX_SIZE = 1 << 62  # bytes of a tensor; every later sum stays a plain number
_MAX_CHUNKS = 4_000_000  # of all tensors: more do not fit into a pickle that is read, unless it repeats itself


def parse(data: bytes, source: str) -> Metadata:
    """What the pickle `data` describes. Raises `CkptError`, all problems at once, for what torch did not write."""
    pickle = loads(data, origin=Origin(source, len(data), end=len(data)))
    problems: list[Problem] = []
    budget = [_MAX_CHUNKS]
    try:
        root = _state(pickle.root, "Metadata")
        places = _places(root["storage_data"])
        items = {
            key: item
            for key, node in root["state_dict_metadata"].items()
            if (item := _checked(key, node, places, budget, problems)) is not None
        }
        paths = _paths(root.get("planner_data"), items)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise _foreign(source, [Problem(f"not as torch writes it: {error}", "Metadata")]) from error
    if problems:
        raise _foreign(source, problems)
    return Metadata(items, paths)


def _foreign(source: str, problems: list[Problem]) -> CkptError:
    return CkptError(
        f"{source} does not describe a checkpoint that torch.distributed.checkpoint could load",
        hint="copy it again together with its .distcp files, or save it again",
        problems=problems,
    )


def _checked(
    key: str, node: Any, places: Mapping[tuple[str, Any], Place], budget: list[int], problems: list[Problem]
) -> Item | None:
    try:
        if type(key) is not str:
            raise ValueError("a key that is no string")
        if _is(node, "BytesStorageMetadata"):
            return BytesItem(places[key, None])
        return _tensor(key, node, places, budget)
    except KeyError:
        problems.append(Problem("nothing says where its bytes lie", str(key)))
    except (TypeError, ValueError, AttributeError, IndexError) as error:
        problems.append(Problem(str(error), str(key)))
    return None


def _tensor(key: str, node: Any, places: Mapping[tuple[str, Any], Place], budget: list[int]) -> TensorItem:
    state = _state(node, "TensorStorageMetadata")
    dtype, shape = _dtype(state["properties"]), _sizes(state["size"])
    if prod(shape) * dtypes.itemsize(dtype) > _MAX_SIZE:
        raise ValueError(f"its shape {list(shape)} is too large")
    listed = _list(state["chunks"])
    budget[0] -= len(listed)
    if budget[0] < 0:
        raise ValueError(f"more than {_MAX_CHUNKS:,} chunks")
    boxes = dict.fromkeys(map(_box, listed))  # replicas are listed once for each rank
    chunks = tuple(Chunk(offsets, sizes, places[key, offsets]) for offsets, sizes in boxes)
    problem = cover_problem(shape, list(boxes))
    if problem:
        raise ValueError(problem)
    return TensorItem(dtype, shape, chunks, _more(state["properties"].state))


def _box(node: Any) -> BoxOf:
    state = _state(node, "ChunkStorageMetadata")
    return _sizes(state["offsets"]), _sizes(state["sizes"])


def _places(node: Any) -> dict[tuple[str, Any], Place]:
    found = {}
    for index, info in node.items():
        where = _state(index, "MetadataIndex")
        offset = where.get("offset")
        place = _state(info, "_StorageInfo")
        name, start, length = place["relative_path"], place["offset"], place["length"]
        if type(name) is not str or type(start) is not int or type(length) is not int or start < 0 or length < 0:
            raise ValueError(f"{name!r}, byte {start!r}, {length!r} bytes")
        transforms = tuple(str(text) for text in _list(place.get("transform_descriptors") or []))
        key = (where["fqn"], None if offset is None else _sizes(offset))
        found[key] = Place(name, start, length, transforms)
    return found


def _paths(node: Any, items: Mapping[str, Item]) -> dict[str, Path]:
    """The paths of the flattened state dict. One that was saved flat (``flatten_state_dict=False``) has none."""
    paths: dict[str, Path] = {key: (key,) for key in items}
    for key, path in node.items() if node is not None else ():
        if type(path) is not tuple or not all(type(step) in (str, int) for step in path) or not _spells(path, key):
            raise ValueError(f"{key!r:.80} is not the flat key of its path")
        if key in paths:
            paths[key] = path
    return paths


def _spells(path: Path, key: Any) -> bool:
    """Whether the steps of the path, joined by dots, are the key."""
    length = sum(len(step) if isinstance(step, str) else 1 for step in path) + len(path) - 1
    return length <= len(key) and ".".join(map(str, path)) == key


def _is(node: Any, name: str) -> bool:
    """True for a node that makes one of torch's own objects, by the name of its class: modules moved in the past."""
    return (
        type(node) is Call
        and type(node.func) is Global
        and node.func.name == name
        and node.func.module.startswith("torch.")
    )


def _state(node: Any, name: str) -> Any:
    if not _is(node, name):
        found = node.func if type(node) is Call else type(node).__name__
        raise ValueError(f"{found} where a {name} has to be")
    return node.state


def _list(node: Any) -> Sequence[Any]:
    if isinstance(node, (list, tuple)):
        return node
    raise ValueError(f"{type(node).__name__} where a list has to be")


def _dtype(properties: Any) -> str:
    dtype = _state(properties, "TensorProperties")[0]
    if type(dtype) is not Global or dtype.module != "torch" or dtype.name not in dtypes.BY_NAME:
        raise ValueError(f"unknown dtype {dtype}")
    return dtype.name


_PROPERTIES = 5  # dtype, layout, requires_grad, memory format, pinned: what every version of torch keeps


def _more(state: Any) -> tuple[tuple[int, ...] | None, ...]:
    """The properties behind those that every version of torch keeps."""
    found = state[_PROPERTIES:]
    if len(found) > 1:
        raise ValueError("its properties are those of a newer torch: pip install -U ckpttool")
    return tuple(None if sizes is None else _sizes(sizes) for sizes in found)


def _sizes(node: Any) -> tuple[int, ...]:
    sizes = node.args[0] if type(node) is Call and node.func == Global("torch", "Size") else node
    if type(sizes) not in (tuple, list) or len(sizes) > MAX_DIMS:
        raise ValueError("sizes that are no tuple")
    if not all(type(size) is int and 0 <= size <= _MAX_SIZE for size in sizes):
        raise ValueError(f"sizes {list(sizes)!r:.80}")
    return tuple(sizes)


VERSION = "1.0.0"

_MODULE = "torch.distributed.checkpoint.metadata"
_STORAGE_MODULE = "torch.distributed.checkpoint.filesystem"


def spelled(metadata: Metadata) -> bytes:
    """The pickle of `metadata`, as torch reads it."""
    writer = _Nodes()
    places = {}
    described = {}
    for key, item in metadata.items.items():
        described[key] = writer.item(item)
        if isinstance(item, BytesItem):
            places[writer.index(key, None)] = writer.place(item.place)
        else:
            places.update((writer.index(key, chunk.offsets), writer.place(chunk.place)) for chunk in item.chunks)
    state = {
        "state_dict_metadata": described,
        "planner_data": {key: metadata.paths[key] for key in described},
        "storage_data": places,
        "storage_meta": None,
        "version": VERSION,
    }
    return dumps(Pickle(writer.made(_MODULE, "Metadata", state), 4))


class _Nodes:
    """Makes the nodes of torch's classes; every class is named once."""

    def __init__(self) -> None:
        self.globals: dict[tuple[str, str], Global] = {}
        self.layout = Call(self.name("torch.serialization", "_get_layout"), ("torch.strided",))
        self.format = Call(self.name(_MODULE, "_MEM_FORMAT_ENCODING"), (0,))

    def name(self, module: str, name: str) -> Global:
        return self.globals.setdefault((module, name), Global(module, name))

    def made(self, module: str, name: str, state: Any) -> Call:
        made = Call(self.name(module, name), (), "NEWOBJ")
        made.state = state
        return made

    def size(self, sizes: tuple[int, ...]) -> Call:
        return Call(self.name("torch", "Size"), (sizes,))

    def item(self, item: Item) -> Call:
        if isinstance(item, BytesItem):
            return Call(self.name(_MODULE, "BytesStorageMetadata"), (), "NEWOBJ")
        properties = (self.name("torch", item.dtype), self.layout, False, self.format, False, *item.more)
        return self.made(
            _MODULE,
            "TensorStorageMetadata",
            {
                "properties": self.made(_MODULE, "TensorProperties", properties),
                "size": self.size(item.shape),
                "chunks": [
                    self.made(
                        _MODULE,
                        "ChunkStorageMetadata",
                        {"offsets": self.size(chunk.offsets), "sizes": self.size(chunk.sizes)},
                    )
                    for chunk in item.chunks
                ],
            },
        )

    def index(self, key: str, offsets: tuple[int, ...] | None) -> Call:
        place = None if offsets is None else self.size(offsets)
        return self.made(_MODULE, "MetadataIndex", {"fqn": key, "index": None, "offset": place})

    def place(self, place: Place) -> Call:
        state = {"relative_path": place.name, "offset": place.offset, "length": place.length}
        return self.made(_STORAGE_MODULE, "_StorageInfo", state)
