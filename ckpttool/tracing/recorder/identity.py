"""When two tensors are one: the same elements of the same memory, whatever Python objects stand for them."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ckpttool.tracing.recorder.memory import geometry

Token = tuple[Any, ...]  # (address of the storage, geometry), or what else identifies a tensor that has no storage


def token(tensor: torch.Tensor) -> Token:
    """What is equal for two tensors exactly when they are the same elements of the same memory."""
    if torch.nn.parameter.is_lazy(tensor):
        return ("object", id(tensor))
    if is_traceable_wrapper_subclass(tensor):
        return (type(tensor), tuple(tensor.shape), *map(token, inside(tensor)))
    try:
        if tensor.layout == torch.strided:
            return (address(tensor), geometry(tensor))
        return (tensor.layout, tuple(tensor.shape), *map(token, components(tensor)))
    except RuntimeError:
        return ("object", id(tensor))


def address(tensor: torch.Tensor) -> int:
    """A number for the tensor's storage: where its bytes lie (numpy may share them), or the storage object on meta."""
    storage = tensor.untyped_storage()
    return (0 if tensor.device.type == "meta" else storage.data_ptr()) or storage._cdata


def components(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The dense tensors that a sparse tensor is made of."""
    if tensor.layout == torch.sparse_coo:
        return (tensor._indices(), tensor._values())
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    raise NotImplementedError(tensor.layout)


def inside(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that a wrapper subclass or a sparse tensor is made of."""
    if torch.nn.parameter.is_lazy(tensor):
        return []
    if is_traceable_wrapper_subclass(tensor):
        parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        return [part for part in parts if isinstance(part, torch.Tensor)]  # a DTensor lists its mesh too
    try:
        return list(components(tensor))
    except RuntimeError:
        return []
