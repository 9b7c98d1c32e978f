"""Random models whose modules have the names that wrappers use: ``tree_7`` is the model for seed
7.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

from torch import nn
from torch.optim.swa_utils import AveragedModel

SEGMENTS = ("module", "_orig_mod", "fc", "layer", "0", "_checkpoint_wrapped_module", "model")


def tree(draw: random.Random, depth: int = 0) -> nn.Module:
    """Build linear layers of one shape, which differ only by name."""
    module = nn.Module()
    for name in draw.sample(SEGMENTS, draw.choice([1, 1, 2, 3])):
        module.add_module(
            name, nn.Linear(2, 2) if depth == 2 or draw.random() < 0.5 else tree(draw, depth + 1)
        )
    if not depth and draw.random() < 0.4:  # repeat the same names below a segment
        setattr(module, draw.choice(("module", "_orig_mod")), copy.deepcopy(module))
    return AveragedModel(module) if not depth and draw.random() < 0.15 else module


def __getattr__(name: str) -> Callable[[], nn.Module]:
    kind, _, seed = name.partition("_")
    if kind != "tree" or not seed.isdigit():
        raise AttributeError(name)
    return lambda: tree(random.Random(int(seed)))
