"""Modules whose hooks compute outside torch (numpy, lists, bytes, numbers): one factory each, in
`ZOO`.

A factory takes no arguments and builds on the default device, as in `hook_zoo`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

ZOO: dict[str, Callable[[], nn.Module]] = {}
State = dict[str, Any]


def pattern(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    ZOO[build.__name__] = build
    return build


class Coded(nn.Module):
    """A module that saves its tensors through `encode` and loads them through `decode`."""

    def __init__(self) -> None:
        super().__init__()
        self._register_state_dict_hook(self._saving)
        self._register_load_state_dict_pre_hook(self._loading)

    @staticmethod
    def _saving(module: Coded, state: State, prefix: str, _: Any) -> None:
        tensors = {name: state.pop(prefix + name).detach() for name in module.names}
        state.update({prefix + name: value for name, value in module.encode(tensors).items()})

    def _loading(self, state: State, prefix: str, *_: Any) -> None:
        tensors = {name: state.pop(prefix + name) for name in self.coded if prefix + name in state}
        if tensors.keys() == set(self.coded):
            state.update({prefix + name: value for name, value in self.decode(tensors).items()})

    names: tuple[str, ...] = ("weight",)
    coded: tuple[str, ...] = ("weight",)

    def encode(self, tensors: State) -> State:
        raise NotImplementedError

    def decode(self, tensors: State) -> State:
        raise NotImplementedError


class Quantized(Coded):
    """The file has int8 values and a scale; saving and loading use numpy, and lose bits."""

    coded = ("weight_q", "scale")

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.zeros(6))

    def encode(self, tensors: State) -> State:
        weight = tensors["weight"].numpy()
        scale = np.maximum(np.abs(weight).max(1), 1e-8).astype(np.float32) / 127
        q = np.round(weight / scale[:, None]).astype(np.int8)
        return {"weight_q": torch.from_numpy(q), "scale": torch.from_numpy(scale)}

    def decode(self, tensors: State) -> State:
        q = tensors["weight_q"].numpy().astype(np.float32)
        return {"weight": torch.from_numpy(q * tensors["scale"].numpy()[:, None])}


class HalfOutside(Quantized):
    """Like `Quantized`, but only part of the loading is outside torch."""

    def decode(self, tensors: State) -> State:
        return {
            "weight": torch.from_numpy(tensors["weight_q"].numpy().astype(np.float32))
            * tensors["scale"][:, None]
        }


class Listed(Coded):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def encode(self, tensors: State) -> State:
        return {"weight": torch.tensor(tensors["weight"].tolist()[::-1])}

    decode = encode


class PackedBits(Coded):
    """Booleans at run time, packed bytes in the file; all are 0 when the module is built."""

    names, coded = ("mask",), ("packed",)

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.zeros(4, 8, dtype=torch.uint8))

    def encode(self, tensors: State) -> State:
        return {"packed": torch.from_numpy(np.packbits(tensors["mask"].numpy()))}

    def decode(self, tensors: State) -> State:
        return {"mask": torch.from_numpy(np.unpackbits(tensors["packed"].numpy()).reshape(4, 8))}


class ByNumber(Coded):
    """One number is read with ``item()``; everything else is torch."""

    names, coded = ("weight", "scale"), ("weight", "scale")

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.randn(3, 3)), nn.Parameter(torch.tensor(2.0))

    def encode(self, tensors: State) -> State:
        return {
            "weight": tensors["weight"] * 2.0 ** round(tensors["scale"].item()),
            "scale": tensors["scale"],
        }

    def decode(self, tensors: State) -> State:
        return {
            "weight": tensors["weight"] / 2.0 ** round(tensors["scale"].item()),
            "scale": tensors["scale"],
        }


class Bytes(Coded):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5))

    def encode(self, tensors: State) -> State:
        return {
            "weight": torch.tensor(
                list(struct.pack("<5f", *tensors["weight"].tolist())), dtype=torch.uint8
            )
        }

    def decode(self, tensors: State) -> State:
        return {"weight": torch.tensor(struct.unpack("<5f", bytes(tensors["weight"].tolist())))}


class Transposed(nn.Module):
    """Override both methods instead of using hooks; shapes and names do not show it."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state, prefix = super().state_dict(*args, **kwargs), kwargs.get("prefix", "")
        state[prefix + "fc.weight"] = torch.from_numpy(
            state[prefix + "fc.weight"].detach().numpy().T.copy()
        )
        return state

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        state = dict(state_dict)
        state["fc.weight"] = torch.from_numpy(np.ascontiguousarray(state["fc.weight"].numpy().T))
        return super().load_state_dict(state, strict=strict, assign=assign)


class Cached(nn.Module):
    """A tensor that is computed after loading, and not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("q", torch.zeros(4, 4, dtype=torch.int8))
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("cache", torch.zeros(4, 4), persistent=False)
        self.register_load_state_dict_post_hook(self._fill)

    @staticmethod
    def _fill(module: Cached, _: Any) -> None:
        whole = module.q.numpy().astype(np.float32) * module.scale.detach().numpy()[:, None]
        module.cache.copy_(torch.from_numpy(whole))


class Net(nn.Module):
    """Coded modules among others; `head` is tied to a plain one."""

    def __init__(self, *coded: type[nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.layers = nn.ModuleList([kind() for kind in coded])
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight


@pattern
def quantized() -> nn.Module:
    return Net(Quantized, Quantized)


@pattern
def half_outside() -> nn.Module:
    return Net(HalfOutside)


@pattern
def lists_and_bytes() -> nn.Module:
    return Net(Listed, Bytes)


@pattern
def packed_bits() -> nn.Module:
    return Net(PackedBits)


@pattern
def by_number() -> nn.Module:
    return Net(ByNumber)


@pattern
def transposed() -> nn.Module:
    return Transposed()


@pattern
def cached() -> nn.Module:
    return Cached()


class Noisy(Listed):
    """Loading the same file twice gives different models."""

    def decode(self, tensors: State) -> State:
        return {
            "weight": tensors["weight"]
            + torch.from_numpy(np.random.default_rng().random((4, 4), dtype=np.float32))
        }


class Blended(Listed):
    """The loaded value depends on the previous one."""

    def decode(self, tensors: State) -> State:
        return {
            "weight": torch.from_numpy(tensors["weight"].numpy() + self.weight.detach().numpy())
        }


def noisy() -> nn.Module:
    return Net(Noisy)


def blended() -> nn.Module:
    return Net(Blended)
