"""Modules whose loading depends on the version in a state dict's metadata: one factory each, in
`ZOO`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

ZOO: dict[str, Callable[[], nn.Module]] = {}


def pattern(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    ZOO[build.__name__] = build
    return build


class Transposed(nn.Module):
    """Version 1 had a transposed weight, with the same key and shape."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(4, 4)), nn.Parameter(torch.zeros(4))

    def _load_from_state_dict(
        self, sd: dict, prefix: str, local_metadata: dict, *args: Any
    ) -> None:
        if local_metadata.get("version", 1) < 2:
            sd[f"{prefix}weight"] = sd[f"{prefix}weight"].t()
        super()._load_from_state_dict(sd, prefix, local_metadata, *args)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias)


class Strict(nn.Linear):
    """Refuse state dicts of other versions."""

    _version = 2

    def _load_from_state_dict(
        self, sd: dict, prefix: str, local_metadata: dict, *args: Any
    ) -> None:
        if local_metadata.get("version") != 2:
            args[-1].append(f"saved by version {local_metadata.get('version')}")
        super()._load_from_state_dict(sd, prefix, local_metadata, *args)


class Halved(nn.Module):
    """A hook of the parent converts old versions of its child; newer versions are read
    unchanged.
    """

    _version = 3

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_load_state_dict_pre_hook(self._load)
        self._register_state_dict_hook(self._save)

    @staticmethod
    def _save(module: nn.Module, sd: dict, prefix: str, metadata: Any) -> None:
        for name in ("weight", "bias"):
            sd[f"{prefix}{name}"] = sd.pop(f"{prefix}inner.{name}")

    @staticmethod
    def _load(module: nn.Module, sd: dict, prefix: str, local_metadata: dict, *_: Any) -> None:
        for name in ("weight", "bias"):
            value = sd.pop(f"{prefix}{name}")
            sd[f"{prefix}inner.{name}"] = (
                value / 2 if local_metadata.get("version") in (1, 2) else value
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


@pattern
def transposed() -> nn.Module:
    return nn.Sequential(Transposed(), nn.ReLU(), Transposed())


@pattern
def strict() -> nn.Module:
    return nn.Sequential(Strict(4, 4), nn.Linear(4, 2))


@pattern
def halved() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), Halved())


@pattern
def asks_in_vain() -> nn.Module:
    """BatchNorm checks the version, but reads all versions alike if the counter is present."""
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
