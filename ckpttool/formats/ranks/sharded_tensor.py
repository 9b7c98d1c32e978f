"""A ``ShardedTensor`` in a rank's torch file: which part of the whole tensor the file holds, and such a part anew.

The class needs a process group to be unpickled; here it stays a node. Its state is the local shards, the metadata of
all shards, the process group's ranks and the sharding spec (``torch/distributed/_shard/sharded_tensor/api.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

from ckpttool import dtypes
from ckpttool.checkpoint import ExtraEntry, Storage, TensorEntry, contiguous_stride
from ckpttool.errors import CkptError
from ckpttool.formats.containers.pickle_tree import Call, Global, Persistent
from ckpttool.formats.ranks.nodes import attributes_of, checked, counts_of
from ckpttool.formats.torch.tensors import Carried, Storages, entry_of, is_tensor, malformed, sizes_of, unnamed
from ckpttool.values import dataclass

_SHARD = "torch.distributed._shard"
_CLASS = Global(f"{_SHARD}.sharded_tensor.api", "ShardedTensor")


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
    return _state(entry) is not None


def _state(entry: TensorEntry | ExtraEntry) -> Any:
    """The state of a ``ShardedTensor``: as a tensor subclass (torch 2.0 and later), or as the plain object it was."""
    node = entry.payload.node if isinstance(entry.payload, Carried) else None
    if type(node) is not Call:
        return None
    if type(node.func) is Global and node.func.name == "_rebuild_from_type_v2" and len(node.args) == 4:
        return node.args[3] if node.args[1] == _CLASS else None
    return node.state if node.func == _CLASS else None


def local_part(entry: TensorEntry | ExtraEntry) -> LocalPart:
    """What the file of `entry`, a ``ShardedTensor``, holds of it. Raises `CkptError` where it is damaged."""
    assert isinstance(entry.payload, Carried)
    with checked(f"the sharded tensor {entry.key}"):
        return _local_part(entry.key, _state(entry), entry.payload.storages)


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
            _CLASS,
            (_CLASS, Global("torch", dtype), shape, stride, 0, _strided(), _cpu(), True),
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
    group = Call(Global("__builtin__", "getattr"), (_CLASS, "ProcessGroupState"))
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
