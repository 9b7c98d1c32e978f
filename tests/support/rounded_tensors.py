"""Tensors that round values copied into them, as quantization libraries do, and models that use
them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import return_and_correct_aliasing

INNER = {"int8": torch.int8, "int16": torch.int16, "float32": torch.float32}


class Rounded(torch.Tensor):
    """A matrix stored as multiples of `step`, in another dtype."""

    @staticmethod
    def __new__(cls, values: torch.Tensor, step: float) -> Rounded:
        return torch.Tensor._make_wrapper_subclass(
            cls, values.shape, dtype=torch.float32, device=values.device
        )

    def __init__(self, values: torch.Tensor, step: float) -> None:
        self.values_, self.step = values, step

    def __tensor_flatten__(self) -> tuple[list[str], float]:
        return ["values_"], self.step

    @staticmethod
    def __tensor_unflatten__(inner: dict, step: float, size: object, stride: object) -> Rounded:
        return Rounded(inner["values_"], step)

    def __repr__(self) -> str:
        return f"Rounded({self.values_}, {self.step})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (
            torch.ops.aten.detach.default,
            torch.ops.aten.clone.default,
            torch.ops.aten.empty_like.default,
        ):
            result = Rounded(func(args[0].values_), args[0].step)
            return return_and_correct_aliasing(func, args, {}, result)
        if func is torch.ops.aten.copy_.default and isinstance(args[0], Rounded):
            args[0].values_.copy_((dense(args[1]) / args[0].step).round())
            return args[0]
        return func(*map(dense, args), **(kwargs or {}))


def dense(value: Any) -> Any:
    return value.values_.to(torch.float32) * value.step if isinstance(value, Rounded) else value


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(of_kind(torch.zeros(3, 2), kind), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(3))


def of_kind(values: torch.Tensor, kind: str) -> torch.Tensor:
    """Convert the values to a tensor of the kind: `plain`, or a dtype and a step."""
    if kind == "plain":
        return values
    dtype, step = kind.split()
    return Rounded((values / float(step)).round().to(INNER[dtype]), float(step))


def plain() -> nn.Module:
    return Net("plain")


def int8() -> nn.Module:
    return Net("int8 0.5")


def int8_fine() -> nn.Module:
    return Net("int8 0.25")


def int16() -> nn.Module:
    return Net("int16 0.5")


def exact() -> nn.Module:
    return Net("float32 1")


class Single(Rounded):
    """A tensor that cannot be copied."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return return_and_correct_aliasing(
                func, args, {}, Single(func(args[0].values_), args[0].step)
            )
        raise NotImplementedError(f"Single does not implement {func}")


def single() -> nn.Module:
    model = Net("plain")
    model.weight = nn.Parameter(Single(torch.zeros(3, 2), 1.0), requires_grad=False)
    return model
