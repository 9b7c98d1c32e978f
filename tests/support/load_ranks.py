"""Two gloo ranks that load a checkpoint of one process into sharded models: `python load_ranks.py
FOLDER`.

FOLDER gets ``same-RANK`` if weights and moments equal the file's, bit for bit.
"""

from __future__ import annotations

import os
import re
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn


def build() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 7), nn.ReLU(), nn.Linear(7, 3))


def trained() -> dict[str, Any]:
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.3)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def in_fsdp1(path: str, expected: dict[str, Any], original: bool) -> None:
    """Load into FSDP1, with flat parameters or the original ones, as the errors say."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    import ckpttool

    device = torch.device("cpu")
    model = FullyShardedDataParallel(build(), device_id=device, use_orig_params=original)
    for ask in (ckpttool.trace, lambda module: ckpttool.diff(path, model=module)):
        with pytest.raises(ckpttool.CkptError) as failed:
            ask(model)
        assert failed.value.hint == "pass the model before it is wrapped"
    with pytest.raises(ckpttool.CkptError, match="a sharded module cannot be copied"):
        ckpttool.load(path, model)
    ckpttool.load(path, model, definition=build)
    with FullyShardedDataParallel.summon_full_params(model):
        for name, value in expected["model"].items():
            assert torch.equal(model.module.get_parameter(name), value), name
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with pytest.raises(ckpttool.CkptError, match="under FSDP1") as failed:
        ckpttool.load(path, model, optimizer, definition=build)
    named = f"{path}.named.pt"
    text = failed.value.hint.replace("CKPT", repr(path)).replace("'named.pt'", repr(named))
    names = {"torch": torch, "ckpttool": ckpttool, "build": build}
    convert, load = re.findall("`(.*?)`", text)
    if dist.get_rank() == 0:
        eval(convert.replace("'fqn'", "'fqn', force=True"), names)
    dist.barrier()
    exec(load, {**names, "model": model, "optimizer": optimizer})
    assert optimizer.param_groups[0]["lr"] == 0.3
    plain = build()
    plain.load_state_dict(expected["model"])
    whole = torch.optim.AdamW(plain.parameters())
    whole.load_state_dict(deepcopy(expected["optimizer"]))
    for module, its_optimizer in ((model, optimizer), (plain, whole)):
        its_optimizer.zero_grad()
        module(torch.ones(2, 3)).sum().backward()
        its_optimizer.step()
    with FullyShardedDataParallel.summon_full_params(model):
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(model.module.get_parameter(name).data, value)


def main(rank: int, folder: str) -> None:
    import ckpttool

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    path, expected = f"{folder}/run.pt", trained()
    torch.manual_seed(rank + 1)
    model = build()
    mesh = init_device_mesh("cpu", (2,))
    for part in (model[0], model):
        fully_shard(part, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with pytest.raises(ckpttool.CkptError, match="a sharded module cannot be copied"):
        ckpttool.load(path, model, optimizer)
    ckpttool.load(path, model, optimizer, definition=build)
    for index, (name, parameter) in enumerate(model.named_parameters()):
        whole: Any = parameter
        assert torch.equal(whole.full_tensor(), expected["model"][name]), name
        moments = optimizer.state[parameter]
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(
                moments[key].full_tensor(), expected["optimizer"]["state"][index][key]
            ), (name, key)
    assert optimizer.param_groups[0]["lr"] == 0.3
    optimizer.zero_grad()
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()  # moments and parameters have the same shards

    for original in (False, True):
        in_fsdp1(path, expected, original)
    averaged = nn.parallel.DistributedDataParallel(build())
    ckpttool.load(path, averaged, torch.optim.AdamW(averaged.parameters()))
    assert all(
        torch.equal(value, expected["model"][name])
        for name, value in averaged.module.state_dict().items()
    )
    Path(folder, f"same-{rank}").touch()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.save(trained(), f"{sys.argv[1]}/run.pt")
    mp.start_processes(main, (sys.argv[1],), nprocs=2, start_method="fork")
