"""Two gloo ranks that save and load parts of a tensor subclass: `python subclass_ranks.py JOB
FOLDER`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.two_tensor import TwoTensor

import dcp_ranks


def two(rows: int = 4, add: float = 0.0) -> Any:
    values = torch.arange(rows * 3.0).reshape(rows, 3) + add
    return TwoTensor(values, -values)


def _on_a_rank(job: str, folder: Path) -> None:
    rank = int(os.environ["RANK"])
    meeting = os.environ["MEETING"]
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=dcp_ranks.RANKS)
    mesh = init_device_mesh("cpu", (dcp_ranks.RANKS,))
    value = DTensor.from_local(two(4, float(rank)), mesh, [Shard(0)])
    if job == "save":
        dcp.save({"t": value, "w": torch.ones(3)}, checkpoint_id=folder / "ranks")
    else:
        empty = DTensor.from_local(two(4, 9.0), mesh, [Shard(0)])
        target: dict[str, Any] = {"u": empty, "w": torch.zeros(3)}
        with torch.serialization.safe_globals([TwoTensor]):
            dcp.load(target, checkpoint_id=folder / "renamed.dcp")
        local: Any = target["u"].to_local()
        assert torch.equal(local.a, two(4, float(rank)).a)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    _on_a_rank(sys.argv[1], Path(sys.argv[2]))
