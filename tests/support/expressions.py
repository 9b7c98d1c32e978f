"""How a tensor is computed, as `Names` and `Plan` say it: which tensors it reads, and its value by
torch's own operators.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch


def key_of(source: Any) -> str | None:
    """Return the key of the tensor that the value is; None if it is computed, or constant."""
    return getattr(source, "key", None)


def reads(source: Any) -> list[str]:
    """Return the keys of all tensors that the value is computed from."""
    return [part.key for part in _parts(source) if hasattr(part, "key")]


def operators(source: Any) -> list[str]:
    return [part.op for part in _parts(source) if hasattr(part, "op")]


def is_opaque(source: Any) -> bool:
    """Return whether code that is not recorded as operators computes a part of the value."""
    return "opaque" in operators(source)


def evaluate(source: Any, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the value, computed by torch."""
    with torch.no_grad():
        result = _value(source, tensors)
    assert isinstance(result, torch.Tensor)
    return result


def _parts(node: Any) -> Iterator[Any]:
    if isinstance(node, tuple):
        for item in node:
            yield from _parts(item)
    elif hasattr(node, "op"):
        yield from _parts((*node.args, *(value for _, value in node.kwargs)))
        yield node
    else:
        yield node


def _value(node: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(node, tuple):
        return [_value(item, tensors) for item in node]
    if hasattr(node, "key"):
        return tensors[node.key]
    if hasattr(node, "kind"):
        return _special(node.kind, node.name)
    if not hasattr(node, "op"):
        return node
    args = [_value(arg, tensors) for arg in node.args]
    kwargs = {name: _value(arg, tensors) for name, arg in node.kwargs}
    if node.op == "getitem":
        return args[0][args[1]]
    _, packet, overload = node.op.split(".")
    return getattr(getattr(torch.ops.aten, packet), overload)(*args, **kwargs)


def _special(kind: str, name: str) -> Any:
    if kind == "device":
        return torch.device("cpu")
    return complex(name) if kind == "complex" else getattr(torch, name)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether dtype, shape and bytes are equal: NaN equals itself, 0.0 is not -0.0."""
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        return False
    return torch.equal(*(_bytes(tensor) for tensor in (left, right)))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # a single element may have any stride
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)
