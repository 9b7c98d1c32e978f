"""``DTensor`` and ``ShardedTensor`` in a rank's file: which chunk of the tensor does the file
hold?
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from math import prod
from operator import lt
from typing import Any

from ckpttool.containers.chunks import Chunk
from ckpttool.containers.pickle_read import Call, Global
from ckpttool.containers.tensors import (
    MOST,
    Carried,
    Storages,
    bare,
    entry_of,
    is_tensor,
    malformed,
    sizes_of,
)
from ckpttool.core import dtypes
from ckpttool.core.checkpoint import AnyEntry, TensorEntry
from ckpttool.core.errors import CkptError
from ckpttool.core.strides import Shape
from ckpttool.core.tables import present
from ckpttool.core.values import dataclass
from ckpttool.evaluate.compare import is_constant, same_values

# Hints
ALL_RANKS = "name the files of all ranks and no others, as in 'rank_*.pt'"
ONE_STEP = "name the files that the ranks of one run saved at one step, and no others"


@dataclass(frozen=True, slots=True, eq=False)
class RankParts:
    """The payload of an entry: what each rank holds under its key, by rank.

    `whole`: the parts together are the entry. Otherwise the entry is the first of them, and they
    may be copies of one tensor or parts of one. `copies` are groups of parts that should be equal:
    the replicas of a DTensor's chunk, or all parts that may be copies.
    """

    parts: tuple[TensorEntry | None, ...]
    whole: bool
    copies: tuple[tuple[TensorEntry, ...], ...] = ()
    of_dtensors: bool = False


def parts_of(entry: TensorEntry) -> tuple[TensorEntry | None, ...]:
    """Return what each rank holds of the entry, by rank. An entry of a single file is its only
    part.
    """
    return entry.payload.parts if isinstance(entry.payload, RankParts) else (entry,)


def is_of_ranks(entry: TensorEntry) -> bool:
    return isinstance(entry.payload, RankParts)


def is_whole(entry: TensorEntry) -> bool:
    """Return True if the parts that ranks hold are the entry together."""
    return isinstance(entry.payload, RankParts) and entry.payload.whole


def _copies(entry: TensorEntry) -> list[tuple[TensorEntry, TensorEntry]]:
    """Return each further copy of a chunk, with the first one."""
    if not isinstance(entry.payload, RankParts):
        return []
    pairs = []
    for first, *others in entry.payload.copies:
        for copy in others:
            pairs.append((first, copy))
    return pairs


def ranks_agree(entry: TensorEntry) -> bool:
    """Return True if all ranks that hold a copy of the entry, or of one of its chunks, hold the
    same values.
    """
    return all(same_values(first, copy) for first, copy in _copies(entry))


def are_copies(entry: TensorEntry) -> bool:
    """Return whether all ranks hold the same values, and not one value only: they have copies of a
    tensor, not parts of one. Reads the values until they differ.
    """
    if not is_of_ranks(entry) or is_whole(entry):
        return False
    first, *others = present(parts_of(entry))
    if not others or first.storage is None or not first.numel:
        return False
    return all(same_values(first, part) for part in others) and not is_constant(first)


def rank_pairs(
    left: TensorEntry, right: TensorEntry
) -> Sequence[tuple[TensorEntry | None, TensorEntry | None]]:
    """Return the pairs of parts that must be equal if the two entries are.

    If both come from the same number of ranks and may be copies or parts, compare rank by rank.
    Otherwise compare the copies on each side.
    """
    if type(left.payload) is not RankParts and type(right.payload) is not RankParts:
        return ()  # almost all entries, and there may be very many
    left_parts, right_parts = parts_of(left), parts_of(right)
    is_by_rank = is_of_ranks(left) and is_of_ranks(right)
    is_by_rank = is_by_rank and not is_whole(left) and not is_whole(right)
    if is_by_rank and len(left_parts) == len(right_parts):
        return [pair for pair in zip(left_parts, right_parts) if pair != (None, None)]
    return [*_copies(left), *_copies(right)]


# Reading


@dataclass(frozen=True, slots=True, eq=False)
class LocalShard:
    """One rank's shard of a tensor of `shape`: the entry `local` is its `chunk`. A rank without a
    shard has None.

    `layout` is what all ranks have in common: the mesh's shape and the placements.
    """

    shape: Shape
    dtype: str
    layout: tuple[Any, ...]
    chunk: Chunk | None
    local: TensorEntry | None


class Unsupported(CkptError):
    """The file alone does not say which chunk of the tensor a rank holds."""

    def __init__(self, message: str) -> None:
        super().__init__(
            message, hint="save it with torch.distributed.checkpoint, or its full_tensor()"
        )


_SHARD = "torch.distributed._shard"
_SHARDED_TENSOR_CLASS = Global(f"{_SHARD}.sharded_tensor.api", "ShardedTensor")
DTENSOR, SHARDED_TENSOR = "DTensor", "sharded tensor"
# what reading an unexpected node raises
_MISREAD = (IndexError, TypeError, ValueError, AttributeError, KeyError)


def shard_kind(entry: AnyEntry) -> str | None:
    kind, _ = _shard_state(entry)
    return kind


def _shard_state(entry: AnyEntry) -> tuple[str | None, Any]:
    """Return the kind of a sharded entry, and the node of its state; None for any other entry."""
    if not isinstance(entry.payload, Carried):
        return None, None
    node = entry.payload.node
    rebuilt = bare(node)
    if type(rebuilt) is Call and len(rebuilt.args) == 4:
        _, kind, _, state = rebuilt.args
        if type(kind) is Global and kind.name == "DTensor":
            return DTENSOR, state
    if type(node) is not Call or type(node.func) is not Global:
        return None, None
    if node.func == _SHARDED_TENSOR_CLASS:  # up to torch 1.13
        return SHARDED_TENSOR, node.state
    if node.func.name == "_rebuild_from_type_v2" and len(node.args) == 4:
        _, kind, _, state = node.args
        if kind == _SHARDED_TENSOR_CLASS:
            return SHARDED_TENSOR, state
    return None, None


def rank_and_world_size(entry: AnyEntry) -> tuple[int, int]:
    """Return the rank that saved a sharded entry, and the number of ranks. Raises `CkptError` if it
    is damaged.
    """
    kind, state = _shard_state(entry)
    try:
        if kind == SHARDED_TENSOR:
            return _process_group(state)
        mesh = _attributes(_attributes(state[1]["_spec"])["mesh"])
        is_new = "_flatten_rank_map" in mesh
        ranks = _counts(mesh["_flatten_rank_map" if is_new else "_flatten_mesh_list"])
        rank = mesh.get("_rank")
        if rank is None:
            number = 0
            for size, at in zip(_mesh_shape(mesh), _counts(mesh["_coordinate_on_dim"])):
                number = number * size + at
            rank = ranks[number]
        if rank not in ranks:
            raise ValueError("its rank is not in the mesh")
        return rank, max(ranks) + 1
    except _MISREAD as error:
        raise malformed(f"the {kind} {entry.key}: {error!r}") from None


def local_shard(entry: AnyEntry) -> LocalShard:
    """Return what the file of a sharded entry holds of it.

    Raises `CkptError` if it is damaged, and `Unsupported` if its placements do not say which chunk
    the part is.
    """
    assert isinstance(entry.payload, Carried)
    kind, state = _shard_state(entry)
    try:
        read = _local_dtensor if kind == DTENSOR else _local_sharded_tensor
        return read(entry.key, state, entry.payload.storages)
    except _MISREAD as error:
        raise malformed(f"the {kind} {entry.key}: {error!r}") from None


def _local_dtensor(key: str, state: Any, storages: Storages) -> LocalShard:
    attributes = state[1]  # of a class with slots the state is a pair
    spec = _attributes(attributes["_spec"])
    mesh = _attributes(spec["mesh"])
    if not is_tensor(attributes["_local_tensor"]):
        raise ValueError("no local tensor")
    local = _dense_entry(key, attributes["_local_tensor"], storages)
    shape = sizes_of(_items(spec["tensor_meta"])[0])
    mesh_shape = _mesh_shape(mesh)
    at = _counts(mesh["_coordinate_on_dim"])
    if len(at) != len(mesh_shape) or not all(map(lt, at, mesh_shape)):
        raise ValueError("its coordinate is not in the mesh")
    placements = tuple(map(_placement, _items(spec["placements"])))
    order = _shard_order(placements, mesh_shape, spec)
    chunk = _chunk_at(at, mesh_shape, order, shape)
    is_empty = not local.numel and not prod(chunk.sizes)
    if local.shape != chunk.sizes and not is_empty:
        raise Unsupported(
            f"its part has the shape {list(local.shape)}, but its placements give"
            f" {list(chunk.sizes)}"
        )
    return LocalShard(shape, local.dtype, (mesh_shape, placements, order), chunk, local)


def _dense_entry(key: str, node: Any, storages: Storages) -> TensorEntry:
    local = entry_of(key, node, storages)
    if local.storage is None:
        raise Unsupported(f"its part is a {local.layout} tensor")
    return local


_Order = tuple[tuple[int, tuple[int, ...]], ...]


def _chunk_at(
    at: Sequence[int], mesh_shape: Sequence[int], order: _Order, shape: Sequence[int]
) -> Chunk:
    """Return the chunk of the rank at these coordinates of the mesh: each mesh dimension cuts what
    the one before it left::

        shape [7], cut by mesh dimensions of 2 and 2
        0 1 2 3 | 4 5 6      pieces of the rounded-up size, as torch.chunk makes them
        0 1|2 3 | 4 5|6
    """
    offsets, sizes = [0] * len(shape), list(shape)
    for dim, mesh_dims in order:
        if not 0 <= dim < len(shape):
            raise ValueError(f"cut along dimension {dim} of {len(shape)}")
        for mesh_dim in mesh_dims:
            piece = -(-sizes[dim] // mesh_shape[mesh_dim])
            start = min(piece * at[mesh_dim], sizes[dim])
            offsets[dim] += start
            sizes[dim] = min(piece, sizes[dim] - start)
    return Chunk(tuple(offsets), tuple(sizes))


def _mesh_shape(mesh: Mapping[str, Any]) -> Shape:
    """Read the shape from the tensor of ranks (up to torch 2.9), or from the layout (later
    versions).
    """
    if "mesh" in mesh:
        return _counts(mesh["mesh"].args[2])
    layout = _attributes(mesh["_layout"])
    if "axes" in layout:
        sizes = [_attributes(axis)["shape"] for axis in _items(layout["axes"])]
    else:
        shape = layout["shape"]
        sizes = list(sizes_of(shape) if type(shape) is Call else _items(shape))
    return tuple(map(_mesh_size, sizes))


def _mesh_size(node: Any) -> int:
    """Return the size of a dimension, or of several that were made one."""
    return node if type(node) is int else prod(_counts(node))


def _placement(node: Any) -> tuple[str, int, int]:
    """Return ``("Replicate", -1, 1)``, ``("Shard", dim, 1)`` or ``("_StridedShard", dim, split
    factor)``.
    """
    name = node.func.name
    if name == "Replicate":
        return name, -1, 1
    if name not in ("Shard", "_StridedShard"):
        raise Unsupported(f"is {name.lstrip('_')}: a part of a sum over ranks, not of a tensor")
    if node.args:
        dim, factor = (*node.args, 1)[:2]
    else:
        state = _attributes(node) if type(node.state) in (dict, tuple) else {}
        dim, factor = state["dim"], state.get("split_factor", 1)
    if factor < 1:
        raise ValueError(f"{factor} pieces")
    return name, dim, factor


def _shard_order(
    placements: tuple[tuple[str, int, int], ...],
    mesh_shape: Shape,
    spec: Mapping[str, Any],
) -> _Order:
    """Return each sharded dimension with the mesh dimensions that cut it, in the order of the
    cuts.
    """
    plain, strided = _cuts(placements, mesh_shape)
    listed: dict[int, list[int]] = {}
    for node in _items(spec.get("shard_order") or ()):
        dim, mesh_dims = _items(node)
        listed[dim] = list(_counts(mesh_dims))
    order = dict(plain)
    if not strided:
        for dim, mesh_dims in plain.items():
            order[dim] = listed.get(dim, mesh_dims)
            if sorted(order[dim]) != mesh_dims:
                raise ValueError("an order of shards that does not match the placements")
    for dim, index in strided.items():
        cuts = plain.get(dim, [])
        if cuts and min(cuts) < index:
            raise Unsupported("is cut in strides after other cuts, which the mesh does not explain")
        order[dim] = [*cuts, index]
    cuts_by_dim = []
    for dim, mesh_dims in sorted(order.items()):
        cuts_by_dim.append((dim, tuple(mesh_dims)))
    return tuple(cuts_by_dim)


def _cuts(
    placements: tuple[tuple[str, int, int], ...], mesh_shape: Shape
) -> tuple[dict[int, list[int]], dict[int, int]]:
    """Return for each dimension the mesh dimensions that cut it, and the mesh dimension that cuts
    it in strides.

    A strided shard is cut after the shards that follow it, which have as many pieces as its split
    factor: FSDP2 makes it from a tensor that tensor parallelism has sharded
    (torch/distributed/tensor/placement_types.py).
    """
    plain: dict[int, list[int]] = {}
    strided: dict[int, int] = {}
    for index, (name, dim, factor) in enumerate(placements):
        if name == "Replicate":
            continue
        if name == "Shard" or factor == 1:
            plain.setdefault(dim, []).append(index)
            continue
        pieces = 1  # that the cuts after it make
        for size, (_, other_dim, _) in islice(zip(mesh_shape, placements), index + 1, None):
            pieces *= size if other_dim == dim else 1
        if dim in strided or pieces != factor:
            raise Unsupported(f"is cut in strides ({factor} pieces) that the mesh does not explain")
        strided[dim] = index
    return plain, strided


def _process_group(state: Any) -> tuple[int, int]:
    group = _attributes(state[2])
    rank, world_size = _counts((group["local_rank"], group["local_world_size"]))
    if rank >= world_size:
        raise ValueError("its rank is not in the process group")
    return rank, world_size


def _local_sharded_tensor(key: str, state: Any, storages: Storages) -> LocalShard:
    _process_group(state)
    shards, metadata = state[0], _attributes(state[1])
    shape = sizes_of(metadata["size"])
    dtype = str(metadata["tensor_properties"].state[0].name)
    if dtype not in dtypes.BY_NAME:
        raise ValueError("no dtype")
    if len(shards) > 1:
        raise CkptError(
            f"a rank holds {len(shards)} shards of {key}: only one for each rank is supported",
            hint="save it with StateDictType.FULL_STATE_DICT, or with torch.distributed.checkpoint",
        )
    if not shards:
        return LocalShard(shape, dtype, (), None, None)
    shard = _attributes(shards[0])
    if not is_tensor(shard["tensor"]):
        raise ValueError("a shard without a tensor")
    local = _dense_entry(key, shard["tensor"], storages)
    if local.dtype != dtype:
        raise Unsupported(f"its part is {local.dtype}, the tensor {dtype}")
    offsets = sizes_of(_attributes(shard["metadata"])["shard_offsets"])
    return LocalShard(shape, dtype, (), Chunk(offsets, local.shape), local)


def _attributes(node: Any) -> Any:
    """Return the attributes of an object. One with slots has them as the second of two states."""
    return node.state[1] if type(node.state) is tuple else node.state


def _counts(node: Any) -> tuple[int, ...]:
    """Return the numbers of a list or tuple. Raises `ValueError` or `TypeError` for anything
    else.
    """
    for count in node:
        if type(count) is not int or not 0 <= count < MOST:
            raise ValueError("not counts")
    return tuple(node)


def _items(node: Any) -> tuple[Any, ...]:
    return tuple(node.args if type(node) is Call else node)
