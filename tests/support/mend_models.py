"""Models that the tests of what mends a diff name as ``mend_models.py:NAME``."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.fc(x))


class Net(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.emb = nn.Embedding(10, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.emb(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def net(width: int = 4, layers: int = 2) -> nn.Module:
    return Net(width, layers)


def _hide(module: nn.Module, sd: dict[str, Any], prefix: str, meta: object) -> None:
    for key in [key for key in sd if key.startswith(f"{prefix}layer.")]:
        sd[prefix + key.removeprefix(f"{prefix}layer.")] = sd.pop(key)


def _show(module: nn.Module, sd: dict[str, Any], prefix: str, *_: object) -> None:
    for key in [key for key in sd if key.startswith(prefix) and not key.startswith(f"{prefix}layer.")]:
        sd[f"{prefix}layer.{key.removeprefix(prefix)}"] = sd.pop(key)


class Hidden(nn.Module):
    """Takes the segment `layer` out of its keys, as torchtune's fusion layers do."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self._register_state_dict_hook(_hide)
        self.register_load_state_dict_pre_hook(_show)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def hooked() -> nn.Module:
    model = Net(4, 2)
    model.layers[1] = Hidden(model.layers[1])
    return model


class Lifted(nn.Module):
    """Has a buffer that is not persistent, which a program holds among its constants."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x) * self.scale


def lifted() -> nn.Module:
    return Lifted()


def tied() -> nn.Module:
    model = Net(4, 1)
    model.head = nn.Linear(4, 10, bias=False)
    model.head.weight = model.emb.weight
    return model


class Fused(nn.Module):
    """Saves the three parts of its fused weight one by one."""

    def __init__(self) -> None:
        super().__init__()
        from hook_zoo import FusedQKV

        self.attn, self.head = FusedQKV(), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x) + self.attn.qkv.weight.sum()


def fused() -> nn.Module:
    return Fused()
