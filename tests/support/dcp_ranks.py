"""Two gloo ranks that save and load checkpoints with torch.distributed.checkpoint: `python
dcp_ranks.py JOB FOLDER`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

RANKS = 2


def run(job: str, folder: Path, script: str = __file__) -> None:
    """Run the script's job in `RANKS` processes. Raise CalledProcessError if one of them fails."""
    with TemporaryDirectory() as meeting:
        environment = {**os.environ, "MEETING": f"file://{meeting}/ranks", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-W", "ignore", script, job, str(folder)]
        ranks = [
            subprocess.Popen(command, env={**environment, "RANK": str(rank)})
            for rank in range(RANKS)
        ]
        for rank in ranks:
            if rank.wait(120):
                raise subprocess.CalledProcessError(rank.returncode, command)


def tensors() -> dict[str, Any]:
    """Return what the ranks save: name -> full tensor, the same on every rank."""
    import torch

    names = ("rows", "uneven", "columns", "blocks", "replicated", "deep", "empty", "bf16")
    shapes = ((8, 3), (5, 3), (3, 8), (6, 6), (4, 2), (4, 3, 6), (0, 4), (6, 2))
    result = {
        name: torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape) + index
        for index, (name, shape) in enumerate(zip(names, shapes))
    }
    result["bf16"] = result["bf16"].bfloat16()
    return result


def _state() -> dict[str, Any]:
    import torch
    from torch.distributed._shard import sharded_tensor
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (RANKS,))
    placements = {"columns": Shard(1), "replicated": Replicate(), "deep": Shard(2)}
    state: dict[str, Any] = {
        name: distribute_tensor(value, mesh, [placements.get(name, Shard(0))])
        for name, value in tensors().items()
    }
    spec = ChunkShardingSpec(dim=1, placements=["rank:0/cpu", "rank:1/cpu"])
    sharded = sharded_tensor.empty(spec, 4, 6)
    for shard in sharded.local_shards():
        rows, columns = shard.metadata.shard_sizes
        first = shard.metadata.shard_offsets[1]
        shard.tensor.copy_((torch.arange(24.0).reshape(4, 6))[:rows, first : first + columns])
    state["old"] = sharded
    return state


def model() -> Any:
    import torch
    from torch import nn

    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2))


def _save(folder: Path) -> None:
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.fsdp import fully_shard

    state: dict[str, Any] = {
        "model": _state(),
        "step": 7,
        "names": ["a", "b"],
        "plain": torch.ones(3),
    }
    dcp.save(state, checkpoint_id=folder / "tensors")
    dcp.save(
        state, storage_writer=dcp.FileSystemWriter(folder / "files", single_file_per_rank=False)
    )
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder / "threads", thread_count=2))
    del state["model"]["old"]  # torch cannot stage a ShardedTensor
    dcp.async_save(state, checkpoint_id=folder / "async").result()
    if torch.__version__ >= "2.8":
        _save_safetensors(state["model"], folder)
    whole = model()
    for layer in whole:
        fully_shard(layer)
    fully_shard(whole)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=0.1)
    whole(torch.ones(3, 6)).sum().backward()
    optimizer.step()
    weights, state_of_optimizer = get_state_dict(whole, optimizer)
    dcp.save({"model": weights, "optimizer": state_of_optimizer}, checkpoint_id=folder / "fsdp")


def _save_safetensors(state: dict[str, Any], folder: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.filesystem import SerializationFormat

    del state["empty"]  # its shards cannot be stored in safetensors
    files = {name: 1 + index % 2 for index, name in enumerate(state)}
    writer = dcp.FileSystemWriter(
        folder / "distcp", serialization_format=SerializationFormat.SAFETENSORS
    )
    dcp.save(state, storage_writer=writer)
    writer = dcp.HuggingFaceStorageWriter(str(folder / "shards"), files, save_distributed=True)
    dcp.save(state, storage_writer=writer)
    writer = dcp.HuggingFaceStorageWriter(
        str(folder / "consolidated"), files, save_distributed=True, enable_consolidation=True
    )
    dcp.save(state, storage_writer=writer)


def _load(folder: Path) -> None:
    """Load the renamed FSDP model and its optimizer, and compare every value with `want.json`."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch import nn
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.fsdp import fully_shard

    def trained() -> tuple[dict[str, Any], dict[str, Any]]:
        torch.manual_seed(1)
        inner = model()
        whole = nn.Sequential(OrderedDict(net=inner))
        for layer in inner:
            fully_shard(layer)
        fully_shard(whole)
        optimizer = torch.optim.AdamW(whole.parameters(), lr=0.3)
        whole(torch.zeros(3, 6)).sum().backward()
        optimizer.step()
        return get_state_dict(whole, optimizer)

    weights, state = trained()
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder / "renamed")
    expected = json.loads((folder / "want.json").read_text())
    for name, value in weights.items():
        assert value.full_tensor().tolist() == expected["model"][name], name
    for name, own in state["state"].items():
        assert own["exp_avg"].full_tensor().tolist() == expected["exp_avg"][name], name
    assert state["param_groups"][0]["lr"] == 0.1


def _whole(folder: Path) -> None:
    """Load ``three.dcp`` into shards on two ranks, and compare them with ``full.pt``."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (RANKS,))
    expected = torch.load(folder / "full.pt")["model"]
    loaded = {
        key: distribute_tensor(torch.zeros_like(value), mesh, [Shard(0)])
        for key, value in expected.items()
    }
    dcp.load({"model": loaded}, checkpoint_id=folder / "three.dcp")
    for key, value in expected.items():
        assert torch.equal(loaded[key].full_tensor(), value), key


def main(jobs: Mapping[str, Callable[[Path], None]]) -> None:
    """Run the job that the command line names; every rank calls this."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", os.environ["MEETING"], rank=int(os.environ["RANK"]), world_size=RANKS
    )
    jobs[sys.argv[1]](Path(sys.argv[2]))
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # torch's own threads sometimes abort a process that ends while the machine is busy


if __name__ == "__main__":
    main({"save": _save, "load": _load, "whole": _whole})
