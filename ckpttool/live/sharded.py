"""Modules that FSDP or DDP wraps: they read their parameters by views of their own, which a swap must not miss."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from ckpttool.errors import CkptError, Problem, Refused
from ckpttool.words import first_line

_FSDP1 = "torch.distributed.fsdp", "FullyShardedDataParallel"
_FSDP2 = "torch.distributed.fsdp", "FSDPModule"
_DDP = "torch.nn.parallel", "DistributedDataParallel"
_SCRIPT = "torch.jit", "ScriptModule"
# What reads its parameters through something that does not follow when other tensors take their names.
_HOLDERS = {
    _FSDP1: "FSDP computes with its flat parameters, of which the module's are views",
    _FSDP2: "fully_shard computes with the shards that it has",
    _DDP: "DDP averages the gradients of the parameters that it has",
    _SCRIPT: "TorchScript keeps its parameters where Python cannot replace them",
}


@contextmanager
def at_rest(module: nn.Module) -> Iterator[None]:
    """The module while its parameters are those that every later forward pass reads.

    Under `fully_shard` these are the shards: what was gathered for a pass is given back first, as torch's own loading
    does. Under FSDP1 they are whole for as long as this lasts, and are cut again after it, changed or not: all ranks
    must come here, and each needs memory for the whole model. Raises `CkptError` where a pass is under way.
    """
    with ExitStack() as held:
        try:
            for part in _instances(module, _FSDP2):
                _reshard(part)
            if _instances(module, _FSDP1):
                whole = torch.distributed.fsdp.FullyShardedDataParallel.summon_full_params(module, writeback=True)
                whole.__enter__()
                held.callback(whole.__exit__, None, None, None)  # also where the block raises: none of it is FSDP's
        except (AssertionError, RuntimeError, AttributeError) as error:
            reason = first_line(error)
            raise CkptError(
                f"FSDP does not give its parameters: {reason}",
                hint="swap between steps, outside of forward and backward",
            ) from error
        yield


def check_replaceable(module: nn.Module) -> None:
    """Raises `Refused`, naming every wrapper, where new tensors in the module's place would not be what it uses."""
    reasons = {id(part): reason for kind, reason in _HOLDERS.items() for part in _instances(module, kind)}
    problems = [
        Problem(reasons[id(part)], name or "(root)") for name, part in module.named_modules() if id(part) in reasons
    ]
    if problems:
        raise Refused(
            "in_place=False cannot replace the parameters of this module",
            hint="pass in_place=True, which works here: it writes into the parameters (under fully_shard the shards)",
            problems=problems,
        )


def local_part(tensor: torch.Tensor) -> torch.Tensor | None:
    """The memory in which a DTensor has this rank's part, where that is dense; None for any other tensor."""
    if not _is_dtensor(tensor):
        return None
    local: torch.Tensor = tensor._local_tensor  # type: ignore[attr-defined]
    return local if type(local) is torch.Tensor and local.layout == torch.strided else None


def placed(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A whole tensor cut as the DTensor `like` is. Each rank takes its part of what it was given."""
    if not _is_dtensor(like) or _is_dtensor(value):
        return value
    from torch.distributed.tensor import DTensor, Replicate

    mesh: Any = like.device_mesh  # type: ignore[attr-defined]
    whole = DTensor.from_local(value.to(like.device), mesh, [Replicate()] * mesh.ndim, run_check=False)
    return whole.redistribute(placements=like.placements)  # type: ignore[attr-defined]


def _is_dtensor(tensor: torch.Tensor) -> bool:
    known = sys.modules.get("torch.distributed.tensor")  # where nothing has imported it, there is none
    return known is not None and isinstance(tensor, known.DTensor)


def _instances(module: nn.Module, kind: tuple[str, str]) -> list[nn.Module]:
    known = getattr(sys.modules.get(kind[0]), kind[1], None)
    return [] if known is None else [part for part in module.modules() if isinstance(part, known)]


def _reshard(part: Any) -> None:
    """Brings the parameters of one `fully_shard`ed module back to its shards, and its view of them up to date.

    What is still being gathered (`unshard(async_op=True)`, a prefetch) is waited for: it would be used later as if it
    were new.
    """
    state = part._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # one until torch 2.12
    groups = [group for group in groups if group is not None]
    if any(group._all_gather_result is not None for group in groups):
        part.unshard()
    part.reshard()
    with torch.no_grad():
        for group in groups:
            for parameter in group.fsdp_params:
                parameter.reset_sharded_param()
