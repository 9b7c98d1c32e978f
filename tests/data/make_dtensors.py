"""Writes what six ranks hold of three DTensors with the torch that runs it: ``python
make_dtensors.py OUTDIR``.

Whole they are ``torch.arange(42.0).reshape(7, 6)``: replicas of three parts, cut by rows and by
columns, and rows that are cut for tensor parallelism first and for FSDP then. The mesh is two by
three, of ranks in another order.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore


def part(tensor: torch.Tensor, count: int, index: int, dim: int = 0) -> torch.Tensor:
    """One of `count` chunks; those that are too many are empty."""
    chunks = tensor.chunk(count, dim)
    return chunks[index] if index < len(chunks) else tensor.narrow(dim, 0, 0)


def main(out: Path) -> None:
    """A process group that sends nothing, of one rank after the other."""
    out.mkdir(parents=True, exist_ok=True)
    whole = torch.arange(42.0).reshape(7, 6)
    for rank in range(6):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=6)
        mesh, (column, row) = DeviceMesh("cpu", torch.arange(6).reshape(3, 2).t()), divmod(rank, 2)
        parts: dict[str, tuple[torch.Tensor, list[Placement]]] = {
            "replicated": (part(whole, 3, column), [Replicate(), Shard(0)]),
            "square": (part(part(whole, 2, row), 3, column, dim=1), [Shard(0), Shard(1)]),
            "strided": (
                part(part(whole, 3, column), 2, row),
                [_StridedShard(0, split_factor=3), Shard(0)],
            ),
        }
        made = {
            name: DTensor.from_local(
                own.clone().contiguous(),
                mesh,
                ways,
                run_check=False,
                shape=whole.shape,
                stride=(6, 1),
            )
            for name, (own, ways) in parts.items()
        }
        torch.save(made, out / f"rank_{rank}.pt")
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
