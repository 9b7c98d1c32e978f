"""Small models for tests of printed commands, named as ``small_models.py:NAME``."""

from __future__ import annotations

import pickle
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
    for key in [
        key for key in sd if key.startswith(prefix) and not key.startswith(f"{prefix}layer.")
    ]:
        sd[f"{prefix}layer.{key.removeprefix(prefix)}"] = sd.pop(key)


class Hidden(nn.Module):
    """Remove the segment `layer` from its keys, like torchtune's fusion layers."""

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
    """It has a non-persistent buffer, which an exported program holds as a constant."""

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
    """Save the three parts of its fused weight separately."""

    def __init__(self) -> None:
        super().__init__()
        from hook_zoo import FusedQKV

        self.attn, self.head = FusedQKV(), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x) + self.attn.qkv.weight.sum()


def fused() -> nn.Module:
    return Fused()


class Absolute(nn.Module):
    """torchtune#2291: the hook renames its key only at the root."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2, bias=False)
        self._register_state_dict_hook(self._save)
        self.register_load_state_dict_pre_hook(self._load)

    @staticmethod
    def _save(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        if "inner.weight" in state:
            state["weight"] = state.pop("inner.weight")

    @staticmethod
    def _load(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        if "weight" in state:
            state["inner.weight"] = state.pop("weight")


class Wide(nn.Module):
    """Weights that a compiled package keeps as constants: more than 8 elements in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(16, 64), nn.Linear(64, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.relu(self.fc(x)))


class Pickled(nn.Linear):
    """Its extra state is a pickle in a tensor of bytes, like Transformer Engine's."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("amax", torch.ones(3), persistent=False)

    def get_extra_state(self) -> torch.Tensor:
        return torch.frombuffer(bytearray(pickle.dumps({"amax": self.amax})), dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.amax = pickle.loads(state.numpy().tobytes())["amax"]


class Unread(Pickled):
    """Like `Pickled`, but the extra state is ignored on loading."""

    def set_extra_state(self, state: torch.Tensor) -> None:
        pass


class InADict(nn.Linear):
    """Its tensors are in dicts below one key."""

    def __init__(self) -> None:
        super().__init__(2, 2)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}params"] = {
            "weight": self.weight.detach(),
            "deep": {"bias": self.bias.detach()},
        }

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        params = state_dict.get(f"{prefix}params")
        if params is None:
            rest[2].append(f"{prefix}params")  # the missing keys
            return
        with torch.no_grad():
            self.weight.copy_(params["weight"])
            self.bias.copy_(params["deep"]["bias"])


def in_a_dict() -> nn.Module:
    return nn.Sequential(InADict(), nn.Linear(2, 2))
