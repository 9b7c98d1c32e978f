"""A ``DTensor`` in a rank's torch file: which box of the whole tensor the file holds.

The class needs a process group to be unpickled; here it stays a node. Its state is the local tensor and a spec: the
device mesh, with the rank's own place in it, and a placement for each dimension of the mesh
(``torch/distributed/tensor/_dtensor_spec.py``, ``torch/distributed/device_mesh.py``; torch 2.5 to 2.15).
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from ckpttool.checkpoint import ExtraEntry, TensorEntry
from ckpttool.errors import CkptError
from ckpttool.formats.containers.pickle_tree import Call, Global
from ckpttool.formats.ranks.nodes import attributes_of, checked, counts_of
from ckpttool.formats.torch.tensors import Carried, Storages, bare, entry_of, is_tensor, sizes_of
from ckpttool.values import dataclass

_CLASS = "DTensor"


class Unplaced(CkptError):
    """Placements of which a rank's part is no box of the tensor that the file alone tells."""

    def __init__(self, message: str) -> None:
        super().__init__(message, hint="save it with torch.distributed.checkpoint, or its full_tensor()")


@dataclass(frozen=True, slots=True, eq=False)
class LocalBox:
    """What one rank holds of a tensor of `shape`: `local`, a box from the corner `offsets` on.

    `layout` is what all ranks have in common: the mesh's shape and the placements.
    """

    shape: tuple[int, ...]
    dtype: str
    layout: tuple[Any, ...]
    offsets: tuple[int, ...]
    local: TensorEntry


def is_dtensor(entry: TensorEntry | ExtraEntry) -> bool:
    """Whether the entry is a ``DTensor``."""
    return _state(entry) is not None


def _state(entry: TensorEntry | ExtraEntry) -> Any:
    node = bare(entry.payload.node) if isinstance(entry.payload, Carried) else None
    args: tuple[Any, ...] = node.args if type(node) is Call else ()
    is_one = len(args) == 4 and type(args[1]) is Global and args[1].name == _CLASS
    return args[3] if is_one else None


def rank_and_world_size(entry: TensorEntry | ExtraEntry) -> tuple[int, int]:
    """The rank that saved a ``DTensor``, and how many ranks its mesh is a part of. `CkptError` where it is damaged."""
    with checked(f"the DTensor {entry.key}"):
        mesh = attributes_of(attributes_of(_state(entry)[1]["_spec"])["mesh"])
        rank, ranks = _rank(mesh, _mesh_shape(mesh), counts_of(mesh["_coordinate_on_dim"]))
        return rank, max(ranks) + 1


def local_box(entry: TensorEntry | ExtraEntry) -> LocalBox:
    """What the file of `entry`, a ``DTensor``, holds of it.

    Raises `CkptError` where it is damaged, `Unplaced` where its placements do not say where the part belongs.
    """
    assert isinstance(entry.payload, Carried)
    with checked(f"the DTensor {entry.key}"):
        return _local_box(entry.key, _state(entry), entry.payload.storages)


def _local_box(key: str, state: Any, storages: Storages) -> LocalBox:
    attributes = state[1]  # of a class with slots the state is a pair
    spec = attributes_of(attributes["_spec"])
    mesh = attributes_of(spec["mesh"])
    if not is_tensor(attributes["_local_tensor"]):
        raise ValueError("no local tensor")
    local = entry_of(key, attributes["_local_tensor"], storages)
    if local.storage is None:
        raise Unplaced(f"its part is a {local.layout} tensor")
    shape = sizes_of(_items(spec["tensor_meta"])[0])
    mesh_shape, at = _mesh_shape(mesh), counts_of(mesh["_coordinate_on_dim"])
    if len(at) != len(mesh_shape) or any(place >= size for place, size in zip(at, mesh_shape)):
        raise ValueError("no place in the mesh")
    placements = tuple(_placement(node) for node in _items(spec["placements"]))
    order = _orders(placements, mesh_shape, spec)
    offsets, sizes = _box(shape, mesh_shape, at, order)
    if local.shape != sizes and (local.numel or prod(sizes)):
        raise Unplaced(f"its part has the shape {list(local.shape)}, where its placements give {list(sizes)}")
    return LocalBox(shape, local.dtype, (mesh_shape, placements, order), offsets, local)


def _mesh_shape(mesh: Mapping[str, Any]) -> tuple[int, ...]:
    """Of the tensor of ranks (up to torch 2.9), or of the layout that came after it."""
    if "mesh" in mesh:
        return counts_of(mesh["mesh"].args[2])
    layout = attributes_of(mesh["_layout"])
    if "axes" in layout:
        return tuple(prod(counts_of(attributes_of(axis)["shape"])) for axis in _items(layout["axes"]))
    return tuple(size if type(size) is int else prod(counts_of(size)) for size in _items(layout["shape"]))


def _rank(mesh: Mapping[str, Any], shape: tuple[int, ...], at: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    """The global rank that saved the file, and all that its mesh names."""
    ranks = counts_of(mesh["_flatten_rank_map" if "_flatten_rank_map" in mesh else "_flatten_mesh_list"])
    number = mesh.get("_rank")
    if number is None:
        number = 0
        for size, place in zip(shape, at):
            number = number * size + place
        number = ranks[number]
    if number not in ranks:
        raise ValueError("no rank of the mesh")
    return number, ranks


def _placement(node: Any) -> tuple[str, int, int]:
    """``("Replicate", -1, 1)``, ``("Shard", dimension, 1)`` or ``("_StridedShard", dimension, split factor)``."""
    name, state = node.func.name, attributes_of(node) if type(node.state) in (dict, tuple) else {}
    if name == "Replicate":
        return name, -1, 1
    if name not in ("Shard", "_StridedShard"):
        raise Unplaced(f"is {name.lstrip('_')}: a part of a sum over ranks, not of a tensor")
    dim, factor, *_ = (*node.args, 1, 1) if node.args else (state["dim"], state.get("split_factor", 1))
    if factor < 1:
        raise ValueError(f"{factor} pieces")
    return name, dim, factor


def _orders(
    placements: tuple[tuple[str, int, int], ...], mesh_shape: tuple[int, ...], spec: Mapping[str, Any]
) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Of each dimension that is cut the dimensions of the mesh that cut it, in the order in which they do.

    A strided shard is cut after those that follow it, which are as many pieces as its split factor: what FSDP2 makes
    of a tensor that tensor parallelism has cut (torch/distributed/tensor/placement_types.py).
    """
    found: dict[int, list[int]] = {}
    strided: dict[int, int] = {}
    for index, (name, dim, factor) in enumerate(placements):
        if name == "_StridedShard" and factor > 1:
            after = [i for i, (_, d, _) in enumerate(placements) if i > index and d == dim]
            if dim in strided or prod(mesh_shape[i] for i in after) != factor:
                raise Unplaced(f"is cut in strides ({factor} pieces) that the mesh does not explain")
            strided[dim] = index
        elif name != "Replicate":
            found.setdefault(dim, []).append(index)
    given = dict(map(_order, _items(spec.get("shard_order") or ())))
    if not strided and any(sorted(given.get(dim, dims)) != dims for dim, dims in found.items()):
        raise ValueError("an order of shards that is not that of the placements")
    orders = found if strided else {dim: given.get(dim, dims) for dim, dims in found.items()}
    for dim, index in strided.items():
        before = [i for i in orders.get(dim, []) if i < index]
        if before:
            raise Unplaced("is cut in strides after other cuts, which the mesh does not explain")
        orders[dim] = [*orders.get(dim, []), index]
    return tuple((dim, tuple(dims)) for dim, dims in sorted(orders.items()))


def _order(node: Any) -> tuple[int, list[int]]:
    dim, dims = _items(node)
    return dim, list(counts_of(dims))


def _box(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    at: tuple[int, ...],
    orders: tuple[tuple[int, tuple[int, ...]], ...],
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Corner and sizes of the part at `at`: each cut gives pieces of the rounded-up size, as ``torch.chunk`` does."""
    offsets, sizes = [0] * len(shape), list(shape)
    for dim, dims in orders:
        if not 0 <= dim < len(shape):
            raise ValueError(f"cut along dimension {dim} of {len(shape)}")
        for index in dims:
            piece = -(-sizes[dim] // mesh_shape[index])
            start = min(piece * at[index], sizes[dim])
            offsets[dim] += start
            sizes[dim] = min(piece, sizes[dim] - start)
    return tuple(offsets), tuple(sizes)


def _items(node: Any) -> tuple[Any, ...]:
    """The items of a tuple, a list or a named tuple."""
    return tuple(node.args if type(node) is Call else node)
