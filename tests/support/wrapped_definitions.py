"""Several MODEL definitions of one model: plain, wrapped, with wrappers inside."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from optimizer_models import Split
from wrapped_ranks import Net, wrap


def plain() -> nn.Module:
    return Net()


def compiled() -> nn.Module:
    return wrap("compile", Net())


def data_parallel() -> nn.Module:
    return wrap("dp", Net())


def checkpointed() -> nn.Module:
    return wrap("ac(compile)", Net())


def blocks() -> nn.Module:
    return wrap("dp, block: compile(ac)", Net())


def hooked() -> nn.Module:
    """Its hooks save three weights as one."""
    return Split()


def hooked_and_wrapped() -> nn.Module:
    compiled: Any = torch.compile(Split())
    return checkpoint_wrapper(compiled)
