"""Operands of the models that the property tests of strict loading draw from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import hook_zoo
import loading_zoo
import real_models

REAL = [name for name in real_models.ALL if name != "wav2vec2"]
MODELS: dict[str, Callable[[], nn.Module]] = {
    **{f"hook_zoo:{name}": build for name, build in hook_zoo.ZOO.items() if name != "lazy"},
    **{f"loading_zoo:{name}": build for name, build in loading_zoo.ZOO.items()},
    **{f"real_models:{name}": getattr(real_models, name) for name in REAL},
}


def build(operand: str, seed: int) -> nn.Module:
    """Build the model on a real device, with random weights."""
    torch.manual_seed(seed)
    model = MODELS[operand]()
    with torch.no_grad():
        for parameter in model.parameters():
            if type(parameter) is nn.Parameter and parameter.layout == torch.strided:
                parameter.normal_()
    return model


def is_safe(path: Path) -> bool:
    """Return whether torch loads the file with ``weights_only=True``."""
    try:
        torch.load(path, weights_only=True)
    except Exception:
        return False
    return True
