"""`swap_weights` on modules in FSDP, DDP or tensor parallelism: they compute with the new
weights.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

import sharded_live
from ckpttool import CkptError, Refused, diff, swap_weights, trace
from torch_version import needs_torch


def test_sharded_modules_compute_with_the_new_weights_in_any_state(tmp_path: Path) -> None:
    """Run every kind of module on one and two ranks: after a forward pass, after a step, or during
    an unshard.
    """
    needs_torch("2.7", "fully_shard without a GPU")
    command = [sys.executable, "-W", "ignore", sharded_live.__file__, str(tmp_path)]
    subprocess.run(command, check=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"})
    results = [json.loads(path.read_text()) for path in tmp_path.glob("found-*.json")]
    assert [len(result) for result in results] == [
        52 if "CKPTTOOL_SEEDS" not in os.environ else 91
    ] * 3
    assert [{case: text for case, text in result.items() if text} for result in results] == [{}] * 3


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_a_model_in_fsdp1_is_not_said_to_fail_in_torch(use_orig_params: bool) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = FullyShardedDataParallel(
            nn.Sequential(nn.Linear(2, 2)),
            use_orig_params=use_orig_params,
            device_id=torch.device("cpu"),
        )
        state = model.state_dict()
        for ask in (lambda: trace(model), lambda: diff(state, model=model)):
            with pytest.raises(CkptError) as failed:
                ask()
            assert failed.value.hint.endswith("pass the model before it is wrapped")
        assert diff(state, model=nn.Sequential(nn.Linear(2, 2))).identical
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_a_value_may_be_in_the_shard_of_another_weight(order: str) -> None:
    """Both get the values of the state_dict in either order of writing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        shard = DTensor.from_local(torch.zeros(4), init_device_mesh("cpu", (1,)), [Shard(0)])
        weights, live = {"a": torch.ones(4), "b": shard}, nn.Module()
        for name in order:
            live.register_parameter(name, nn.Parameter(weights[name]))
        swap_weights(live, {"a": shard.to_local(), "b": torch.full((4,), 2.0)})
        assert live.get_parameter("a").tolist() == [0] * 4
        assert shard.to_local().tolist() == [2] * 4
    finally:
        dist.destroy_process_group()


LOCAL: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dense": torch.clone,
    "subclass": lambda value: TwoTensor(value.clone(), value + 1),
}


@pytest.mark.parametrize("kind", LOCAL)
def test_the_local_part_of_a_shard_gets_the_new_values(kind: str) -> None:
    """A dense one in its own memory."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        mesh, old, new = init_device_mesh("cpu", (1,)), torch.zeros(2, 2), torch.eye(2)
        meta = TensorMeta(old.shape, old.stride(), old.dtype)
        spec = DTensorSpec(mesh, (Shard(0),), meta)
        sharded = [DTensor(LOCAL[kind](value), spec, requires_grad=False) for value in (old, new)]
        live: Any = nn.Module()
        live.weight = nn.Parameter(sharded[0], requires_grad=False)
        memory = live.weight.to_local().data_ptr()
        swap_weights(live, {"weight": sharded[1]})
        local = live.weight.to_local()
        assert repr(local.detach()) == repr(LOCAL[kind](new))
        assert kind == "subclass" or local.data_ptr() == memory
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "compile_module", [torch.jit.script, lambda module: torch.jit.trace(module, torch.ones(1, 2))]
)
def test_torchscript_accepts_weights_only_in_place(compile_module: Any) -> None:
    module, other = (
        nn.Sequential(nn.Linear(2, 2), nn.ReLU()),
        nn.Sequential(nn.Linear(2, 2), nn.ReLU()),
    )
    scripted = compile_module(module)
    with pytest.raises(Refused) as refused:
        swap_weights(
            nn.Sequential(scripted),
            {f"0.{key}": value for key, value in other.state_dict().items()},
            in_place=False,
        )
    assert str(refused.value.problems[0]) == (
        "TorchScript keeps its parameters where Python cannot replace them @ 0"
    )
    assert "pass in_place=True" in refused.value.hint
    swap_weights(scripted, other.state_dict())
    assert torch.equal(scripted(torch.ones(1, 2)), other(torch.ones(1, 2)))


class CountAllocations(TorchDispatchMode):
    """Count the bytes of the dense tensors that operators allocate."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        allocates = str(func).startswith(("aten._to_copy", "aten.empty", "aten.clone"))
        self.nbytes += (
            result.untyped_storage().nbytes() if allocates and result.device.type == "cpu" else 0
        )
        return result


def test_new_tensors_of_another_dtype_are_created_once() -> None:
    live, other = nn.Linear(50, 40), nn.Linear(50, 40).double()
    with CountAllocations() as allocations:
        swap_weights(live, other.state_dict(), cast=True, in_place=False)
    assert torch.equal(live.weight, other.weight.float())
    assert allocations.nbytes == live.weight.nbytes + live.bias.nbytes
