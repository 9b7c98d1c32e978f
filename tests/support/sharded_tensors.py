"""Files of FSDP1 ranks without a run: the ShardedTensors of torch, made in a fake process group."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def as_rank(rank: int, ranks: int) -> Iterator[None]:
    """Initialize a fake process group in which this process has that rank."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def row_sharded(tensor: torch.Tensor, rank: int, ranks: int) -> ShardedTensor:
    """Return the shard of the rank, of a tensor that FSDP1 cuts along dimension 0; the last ranks
    may have none.
    """
    chunks = tensor.chunk(ranks)
    shards = []
    begin = 0
    for number, chunk in enumerate(chunks):
        offsets = [begin, *[0] * (tensor.dim() - 1)]
        shards.append(ShardMetadata(offsets, list(chunk.shape), f"rank:{number}/cpu"))
        begin += len(chunk)
    local = [Shard(chunks[rank].clone(), shards[rank])] if rank < len(chunks) else []
    metadata = ShardedTensorMetadata(shards, tensor.size(), TensorProperties(dtype=tensor.dtype))
    return ShardedTensor._init_from_local_shards_and_global_metadata(local, metadata)


def save_sharded(
    folder: Path, name: str, state: Mapping[str, torch.Tensor], ranks: int, section: str = ""
) -> None:
    """Save the file ``NAME_RANK.pt`` of each rank, with every tensor of the state cut along
    dimension 0.
    """
    for rank in range(ranks):
        with as_rank(rank, ranks), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Please use DTensor", FutureWarning)
            parts = {key: row_sharded(tensor, rank, ranks) for key, tensor in state.items()}
            torch.save({section: parts} if section else parts, folder / f"{name}_{rank}.pt")


def flat_parameters(state: Mapping[str, torch.Tensor], *units: str) -> dict[str, torch.Tensor]:
    """Return the flat parameter of each unit: all its tensors, end to end."""
    flat = {}
    for unit in units:
        tensors = [tensor.flatten() for key, tensor in state.items() if key.startswith(f"{unit}.")]
        flat[f"{unit}._flat_param"] = torch.cat(tensors)
    return flat
