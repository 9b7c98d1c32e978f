"""`DTensor` and `ShardedTensor` in a rank's file: which part of the tensor the file holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from typing import Any

from ckpttool.core import dtypes
from ckpttool.core.checkpoint import ExtraEntry, Storage, TensorEntry, contiguous_stride
from ckpttool.core.errors import CkptError
from ckpttool.core.values import dataclass
from ckpttool.evaluate.compare import same_values
from ckpttool.formats.pickle_read import Call, Global, Persistent
from ckpttool.formats.torch.tensors import (
    MOST,
    Carried,
    Storages,
    bare,
    entry_of,
    is_tensor,
    malformed,
    sizes_of,
    unnamed,
)


def attributes_of(node: Any) -> Any:
    """The attributes of an object; one with slots has them as the second of two states."""
    return node.state[1] if type(node.state) is tuple else node.state


def counts_of(node: Any) -> tuple[int, ...]:
    """The numbers of a list or a tuple, however many. Raises `ValueError` or `TypeError` for anything else."""
    if not all(type(count) is int and 0 <= count < MOST for count in node):
        raise ValueError("no counts")
    return tuple(node)


@contextmanager
def checked(what: str) -> Iterator[None]:
    """Whatever reading `what` raises for nodes of other kinds than expected is the error of a damaged file."""
    try:
        yield
    except (IndexError, TypeError, ValueError, AttributeError, KeyError) as error:
        raise malformed(f"{what}: {error!r}") from None


ALL_RANKS = "name the files of all ranks and no others, as in 'rank_*.pt'"  # a hint
OF_ONE_STEP = "name the files that the ranks of one run saved at one step, and no others"  # another


@dataclass(frozen=True, slots=True, eq=False)
class RankParts:
    """The payload of an entry: what each rank holds under its key, by rank.

    `whole`: the parts together are the entry. Else it is the first of them, and they may be copies of one tensor or
    parts of one. `copies` are parts that must hold the same, since the mesh of a DTensor says that they are replicas.
    """

    parts: tuple[TensorEntry | None, ...]
    whole: bool
    copies: tuple[tuple[TensorEntry, ...], ...] = ()
    of_dtensors: bool = False


def parts_of(entry: TensorEntry) -> tuple[TensorEntry | None, ...]:
    """What each rank holds of the entry, by rank; an entry of a single file is all of it."""
    return entry.payload.parts if isinstance(entry.payload, RankParts) else (entry,)


def copies_of(entry: TensorEntry) -> list[tuple[TensorEntry, TensorEntry]]:
    """Pairs of what ranks hold that must be the same: replicas of one box of a DTensor, or one tensor on every rank."""
    if not isinstance(entry.payload, RankParts):
        return []
    parts = tuple(part for part in entry.payload.parts if part is not None)
    groups = entry.payload.copies if entry.payload.whole else (parts,)
    return [(group[0], copy) for group in groups for copy in group[1:]]


def is_held_alike(entry: TensorEntry) -> bool:
    """Whether all ranks that have a copy of the entry, or of a part of it, have the same."""
    return all(same_values(one, other) for one, other in copies_of(entry))


def is_of_ranks(entry: TensorEntry) -> bool:
    """Whether the entry comes from the files of several ranks."""
    return isinstance(entry.payload, RankParts)


def is_whole(entry: TensorEntry) -> bool:
    """Whether the parts that ranks hold are the entry together."""
    return isinstance(entry.payload, RankParts) and entry.payload.whole


def is_of_dtensors(entry: TensorEntry) -> bool:
    """Whether the entry is made of the parts of a DTensor."""
    return isinstance(entry.payload, RankParts) and entry.payload.of_dtensors


def must_be_alike(left: TensorEntry, right: TensorEntry) -> Sequence[tuple[TensorEntry | None, TensorEntry | None]]:
    """What else has to be alike where the two are compared: what each rank holds, and the copies of one box.

    Of what may be parts or copies, and is held by as many ranks on both sides, rank by rank; else all on one side.
    """
    if type(left.payload) is not RankParts and type(right.payload) is not RankParts:
        return ()  # as most are, of which there may be very many
    ranks = [entry.payload for entry in (left, right) if isinstance(entry.payload, RankParts)]
    if [(one.whole, len(one.parts)) for one in ranks] == [(False, len(ranks[0].parts))] * 2:
        return [pair for pair in zip(*(one.parts for one in ranks)) if pair != (None, None)]
    return [*copies_of(left), *copies_of(right)]


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


_SHARD = "torch.distributed._shard"
_SHARDED_TENSOR_CLASS = Global(f"{_SHARD}.sharded_tensor.api", "ShardedTensor")


@dataclass(frozen=True, slots=True, eq=False)
class LocalPart:
    """What one rank holds of a sharded tensor of `shape`: `local` from element `offset` on, or nothing.

    `rank` and `world_size` are those of the process group that the tensor is sharded over. `offset` is None where the
    parts do not lie one after another: only a tensor that is cut along its first dimension is a row of parts.
    """

    shape: tuple[int, ...]
    dtype: str
    rank: int
    world_size: int
    local: TensorEntry | None
    offset: int | None


def is_sharded(entry: TensorEntry | ExtraEntry) -> bool:
    """Whether the entry is a ``ShardedTensor``."""
    return _state_sharded_tensor(entry) is not None


def _state_sharded_tensor(entry: TensorEntry | ExtraEntry) -> Any:
    """The state of a ``ShardedTensor``: as a tensor subclass (torch 2.0 and later), or as the plain object it was."""
    node = entry.payload.node if isinstance(entry.payload, Carried) else None
    if type(node) is not Call:
        return None
    if type(node.func) is Global and node.func.name == "_rebuild_from_type_v2" and len(node.args) == 4:
        return node.args[3] if node.args[1] == _SHARDED_TENSOR_CLASS else None
    return node.state if node.func == _SHARDED_TENSOR_CLASS else None


def local_part(entry: TensorEntry | ExtraEntry) -> LocalPart:
    """What the file of `entry`, a ``ShardedTensor``, holds of it. Raises `CkptError` where it is damaged."""
    assert isinstance(entry.payload, Carried)
    with checked(f"the sharded tensor {entry.key}"):
        return _local_part(entry.key, _state_sharded_tensor(entry), entry.payload.storages)


def _local_part(key: str, state: Any, storages: Storages) -> LocalPart:
    shards, metadata, group = state[0], attributes_of(state[1]), attributes_of(state[2])
    shape, dtype = sizes_of(metadata["size"]), str(metadata["tensor_properties"].state[0].name)  # of a tuple
    if dtype not in dtypes.BY_NAME:
        raise ValueError("no dtype")
    rank, world_size = counts_of((group["local_rank"], group["local_world_size"]))
    if rank >= world_size:
        raise ValueError("no rank of a process group")
    if len(shards) > 1:
        raise CkptError(
            f"rank {rank} holds {len(shards)} shards of {key}, and only one a rank can be put together",
            hint="save it with StateDictType.FULL_STATE_DICT, or with torch.distributed.checkpoint",
        )
    if not shards:
        return LocalPart(shape, dtype, rank, world_size, None, None)
    shard = attributes_of(shards[0])
    if not is_tensor(shard["tensor"]):
        raise ValueError("a shard without a tensor")
    local = entry_of(key, shard["tensor"], storages)
    offsets = sizes_of(attributes_of(shard["metadata"])["shard_offsets"])
    in_rows = len(offsets) == len(shape) > 0 and not any(offsets[1:]) and local.shape[1:] == shape[1:]
    inside = in_rows and offsets[0] + local.shape[0] <= shape[0] and local.dtype == dtype
    return LocalPart(shape, dtype, rank, world_size, local, offsets[0] * prod(shape[1:]) if inside else None)


# Writing


def sharded(
    key: str, storage: Storage, dtype: str, shape: tuple[int, ...], rows: Sequence[int], rank: int
) -> TensorEntry:
    """The entry of a ``ShardedTensor`` of which every rank holds `rows` along its first dimension, and this `rank` has
    `storage`.

    It can be written to a torch file only. A rank without rows holds no shard.
    """
    storages, stride = Storages(_none_else, {"0": storage}), contiguous_stride(shape)
    node = Call(
        Global("torch._tensor", "_rebuild_from_type_v2"),
        (
            Global("torch._utils", "_rebuild_wrapper_subclass"),
            _SHARDED_TENSOR_CLASS,
            (_SHARDED_TENSOR_CLASS, Global("torch", dtype), shape, stride, 0, _strided(), _cpu(), True),
            _new_state(dtype, shape, rows, rank),
        ),
    )
    rebuilt = unnamed(dtype, shape, stride, 0, None, "subclass", storage.nbytes)
    return replace(rebuilt, key=key, payload=Carried(node, storages, rebuilt))


def _none_else(key: str, nbytes: int) -> Storage:
    raise malformed(f"storage {key} was not made")


def _new_state(dtype: str, shape: tuple[int, ...], sizes: Sequence[int], rank: int) -> tuple[Any, ...]:
    placements = [_object(Global("torch.distributed.remote_device", "_remote_device"), _placed(r)) for r in _all(sizes)]
    shards = {r: _shard_metadata(shape, sizes, r, placements[r]) for r in _all(sizes) if sizes[r]}
    local = []
    if sizes[rank]:
        attributes = (None, {"tensor": _tensor(dtype, (sizes[rank], *shape[1:])), "metadata": shards[rank]})
        local.append(_object(Global(f"{_SHARD}.sharded_tensor.shard", "Shard"), attributes))
    home = f"{_SHARD}.sharded_tensor.metadata"
    encoding = Call(Global(home, "MEM_FORMAT_ENCODING"), (0,))
    properties = _object(Global(home, "TensorProperties"), (Global("torch", dtype), _strided(), True, encoding, False))
    size = Call(Global("torch", "Size"), (shape,))
    metadata = {"shards_metadata": list(shards.values()), "size": size, "tensor_properties": properties}
    ranks = dict.fromkeys(("local_rank", "global_rank"), rank) | dict.fromkeys(
        ("local_world_size", "global_world_size"), len(sizes)
    )
    group = Call(Global("__builtin__", "getattr"), (_SHARDED_TENSOR_CLASS, "ProcessGroupState"))
    spec = Global(f"{_SHARD}.sharding_spec.chunk_sharding_spec", "ChunkShardingSpec")
    return (
        local,
        _object(Global(home, "ShardedTensorMetadata"), metadata),
        _object(group, ranks),
        _object(spec, {"dim": 0, "placements": placements}),
        False,
    )


def _all(sizes: Sequence[int]) -> range:
    return range(len(sizes))


def _object(kind: Any, state: Any) -> Call:
    made = Call(kind, (), "NEWOBJ")
    made.state = state
    return made


def _placed(rank: int) -> dict[str, Any]:
    return {"_worker_name": None, "_rank": rank, "_device": _cpu()}


def _shard_metadata(shape: tuple[int, ...], rows: Sequence[int], rank: int, placement: Call) -> Call:
    offsets, sizes = [sum(rows[:rank]), *[0] * (len(shape) - 1)], [rows[rank], *shape[1:]]
    attributes = {"shard_offsets": offsets, "shard_sizes": sizes, "placement": placement}
    return _object(Global(f"{_SHARD}.metadata", "ShardMetadata"), (None, attributes))


def _tensor(dtype: str, shape: tuple[int, ...]) -> Call:
    numel = prod(shape)
    row = dtypes.BY_NAME[dtype]
    hooks = Call(Global("collections", "OrderedDict"), ())
    kind = Global("torch", row.storage) if row.storage else Global("torch.storage", "UntypedStorage")
    count = numel if row.storage else numel * row.itemsize
    args = (Persistent(("storage", kind, "0", "cpu", count)), 0, shape, contiguous_stride(shape), False, hooks)
    if row.storage:
        return Call(Global("torch._utils", "_rebuild_tensor_v2"), args)
    return Call(Global("torch._utils", "_rebuild_tensor_v3"), (*args, Global("torch", dtype)))


def _strided() -> Call:
    return Call(Global("torch.serialization", "_get_layout"), ("torch.strided",))


def _cpu() -> Call:
    return Call(Global("torch", "device"), ("cpu",))
