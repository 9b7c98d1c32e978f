"""``.metadata`` of torch.distributed.checkpoint: from its pickle, which is never run, to items."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from ckpttool import dtypes
from ckpttool.errors import CkptError, Problem
from ckpttool.formats.containers.pickle_tree import Call, Global, Origin, loads
from ckpttool.formats.dcp.items import BoxOf, BytesItem, Chunk, Item, Metadata, Path, Place, TensorItem, cover_problem
from ckpttool.formats.torch.tensors import MAX_DIMS

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
