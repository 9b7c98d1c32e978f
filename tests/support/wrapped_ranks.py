"""Two gloo ranks with real wrappers: save checkpoints, collect torch's tensor names, and resume
training.

`python wrapped_ranks.py JOB FOLDER`; the jobs are ``save`` and ``load``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import dcp_ranks
from ckpttool.naming.wrappers import COUNTER, parse
from ckpttool.tracing.instances import listed, runtime_tensors

Wrap = Callable[[nn.Module], nn.Module]
FULL = StateDictOptions(full_state_dict=True)
TRAINED = ("plain", "ddp", "compile", "ac", "fsdp", "fully_shard")
SHARDED = ("fsdp", "fully_shard")
STEPS = 3


class Net(nn.Module):
    """Two layers, a block between them, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 6)
        self.block = nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4))
        self.head = nn.Linear(4, 2)
        self.register_buffer("scale", torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.block(torch.tanh(self.embed(x))))) * self.scale


PLAIN = list(Net().state_dict())


def tensors(names: Iterable[str]) -> list[str]:
    return sorted(name for name in names if name != COUNTER)


@dataclass(frozen=True)
class Wrapped:
    """`names` are the names in each form; `failures` are the errors of loading the remapped file
    strictly.
    """

    folder: Path
    names: dict[str, dict[str, Any]]
    failures: dict[str, str]


def sharded(model: nn.Module) -> nn.Module:
    fully_shard(model, mesh=init_device_mesh("cpu", (dcp_ranks.RANKS,)))
    return model


def fsdp(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


WRAPS: dict[str, Wrap] = {
    "ddp": DistributedDataParallel,
    "dp": nn.DataParallel,
    "compile": compiled,
    "ac": checkpoint_wrapper,
    "fsdp": fsdp,
    "fully_shard": sharded,
    "averaged": AveragedModel,
}
CHAINS = (
    *WRAPS,
    *(
        "compile(ac)",
        "ac(compile)",
        "ddp(compile)",
        "compile(ddp)",
        "ddp(compile(ac))",
        "dp(compile)",
    ),
    *(
        "fsdp(compile)",
        "compile(fsdp)",
        "fsdp(ac)",
        "ac(fsdp)",
        "fully_shard(compile)",
        "compile(fully_shard)",
    ),
    *("averaged(ddp)", "ddp(averaged)", "compile(averaged)"),
)
BLOCKS = (
    *(f"block: {form}" for form in ("compile", "ac", "compile(ac)", "ac(compile)", "fully_shard")),
    "fsdp, block: fsdp",
    "ddp, block: compile",
    "compile, block: compile(ac)",
)


def wrap(form: str, model: nn.Module) -> nn.Module:
    """Wrap the model in a chain such as ``ddp(compile)``; ``ddp, block: ac`` wraps the block too,
    ``plain`` nothing.
    """
    outside, _, block = form.rpartition("block: ") if "block: " in form else (form, "", "plain")
    if block != "plain":
        model.block = wrap(block, model.get_submodule("block"))
    for word in reversed(
        parse(outside.strip(", ")).words if outside.strip(", ") not in ("", "plain") else ()
    ):
        model = WRAPS[word](model)
    return model


def filename(form: str) -> str:
    return form.replace(", ", "+").replace(": ", "=")


def net(seed: int) -> Net:
    torch.manual_seed(seed)
    return Net()


def whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor().detach() if isinstance(value, DTensor) else value


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int) -> None:
    """Take `STEPS` steps; every rank sees the same batch, so that averaging over ranks changes no
    bit.
    """
    for number in range(first, first + STEPS):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(number))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def started(form: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = wrap(form, net(seed))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def result(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the model's full weights and moments by torch's names."""
    weights, state = get_state_dict(model, optimizer, options=FULL)
    return {"model": weights, "optimizer": state}


def _save(folder: Path) -> None:
    names = {form: _named(form, folder / f"{filename(form)}.pt") for form in (*CHAINS, *BLOCKS)}
    for form in TRAINED:
        model, optimizer = started(form, 0)
        train(model, optimizer, 0)
        own = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        _write(result(model, optimizer) if form in SHARDED else own, folder / f"trained-{form}.pt")
        train(model, optimizer, STEPS)
        _write(result(model, optimizer), folder / f"finished-{form}.pt")
    _write(net(0).state_dict(), folder / "plain.pt")
    if torch.distributed.get_rank() == 0:
        (folder / "names.json").write_text(json.dumps(names))


def _named(form: str, path: Path) -> dict[str, Any]:
    """Save the wrapped model; return its keys, parameter names, our canonical names and torch's
    names.
    """
    model = wrap(form, net(0))
    state = {key: whole(value) for key, value in model.state_dict().items()}
    _write(state, path)
    canonical = [tensor.canonical for tensor in runtime_tensors(model, listed(model))]
    # some wrappers hide their own segment
    runtime = [path for path, _ in nn.Module.named_parameters(model)]
    return {
        "keys": list(state),
        "runtime": runtime,
        "canonical": canonical,
        "torch": _torch_names(model),
    }


def _torch_names(model: nn.Module) -> list[str]:
    return list(get_model_state_dict(model, options=FULL))


def _load(folder: Path) -> None:
    """Load the files of ``loads/`` strictly and write the errors; resume from the files of
    ``resumes/``.
    """
    failures = {}
    for form in CHAINS + BLOCKS:
        failures[form] = _failure(form, folder / "loads" / f"{filename(form)}.pt")
    for path in sorted((folder / "resumes").iterdir()):
        _resume(path, folder / "results" / path.name)
    if torch.distributed.get_rank() == 0:
        (folder / "failures.json").write_text(json.dumps(failures))


def _failure(form: str, path: Path) -> str:
    """Load the file into a model in these wrappers with other weights; return the error, or an
    empty string.
    """
    model = wrap(form, net(1))
    state = torch.load(path)
    for key, own in model.state_dict().items():
        if isinstance(own, DTensor) and key in state:
            state[key] = distribute_tensor(state[key], own.device_mesh, own.placements)
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        return str(error)
    loaded = [
        whole(value) for key, value in model.state_dict().items() if not key.endswith("n_averaged")
    ]
    same = [
        torch.equal(value, own)
        for value, own in zip(loaded, net(0).state_dict().values(), strict=True)
    ]
    return "" if all(same) else "other values"


def _resume(path: Path, out: Path) -> None:
    form = path.stem.partition(" to ")[2]
    model, optimizer = started(form, 1)
    state = torch.load(path)
    if form in SHARDED:
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=FULL,
        )
    else:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    train(model, optimizer, STEPS)
    _write(result(model, optimizer), out)


def _write(state: Any, path: Path) -> None:
    if torch.distributed.get_rank() == 0:
        torch.save(state, path)


if __name__ == "__main__":
    dcp_ranks.main({"save": _save, "load": _load})
