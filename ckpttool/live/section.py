"""A live state dict as the index that planning works on: the same `Section` that a file's reader would give."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch

from ckpttool.checkpoint import ExtraEntry, Lazy, Section, Storage, TensorEntry, contiguous_stride
from ckpttool.errors import CkptError
from ckpttool.evaluate import with_torch
from ckpttool.tracing.recorder.identity import Token, components, token
from ckpttool.tracing.runtime import dtype_name
from ckpttool.values import dataclass


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """The payload of a tensor that is no dense block of memory; what it is made of is compared."""

    tensor: torch.Tensor

    def content(self) -> bytes | None:
        """Equal for tensors of one class that are made of the same bytes; of DTensors, for this rank's parts."""
        found = hashlib.blake2b(type(self.tensor).__name__.encode())
        try:
            for part in _dense_parts(self.tensor):
                found.update(f"{part.dtype}{tuple(part.shape)}".encode())
                found.update(with_torch.to_bytes(raw(part).cpu()))
        except (RuntimeError, NotImplementedError):
            return None
        return found.digest()


def section_of(state_dict: Mapping[str, object]) -> Section:
    """The state dict as a section. Tensors keep their storage: nothing is copied until bytes are compared.

    What is no dense block of memory (quantized, sparse, subclasses, meta) has no storage but a `layout`. Raises
    `CkptError` where a key is no string.
    """
    tensors: list[TensorEntry] = []
    extras: list[ExtraEntry] = []
    storages: dict[int, Storage] = {}
    first: dict[Token, Packed] = {}
    for key, value in state_dict.items():
        if not isinstance(key, str):
            raise CkptError(f"the state dict has a key that is no string: {key!r}", hint="pass model.state_dict()")
        if isinstance(value, torch.Tensor):
            tensors.append(_entry(key, value, storages, first.setdefault(token(value), Packed(value))))
        else:
            plain = value is None or type(value) in (bool, int, float, str)
            extras.append(ExtraEntry(key, None if plain else value, value if plain else None))
    versions = getattr(state_dict, "_metadata", None)
    modules = {path: dict(own) for path, own in versions.items()} if isinstance(versions, Mapping) else None
    return Section("", "state_dict", tuple(tensors), tuple(extras), modules)


def layout_of(tensor: torch.Tensor) -> str:
    """``strided`` for a dense block of memory that can be read, else what the tensor is instead."""
    if is_special(tensor):
        return "subclass"
    if tensor.is_quantized:
        return "quantized"
    if tensor.layout != torch.strided:
        return str(tensor.layout).removeprefix("torch.")
    return "meta" if tensor.device.type == "meta" else "strided"


def is_special(tensor: torch.Tensor) -> bool:
    """Whether the tensor's class has its own idea of what operators do (a quantized weight, a DTensor, ...)."""
    overrides_functions = torch.overrides.has_torch_function_unary(tensor)
    return overrides_functions or type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that a sparse tensor or a wrapper subclass is made of; NotImplementedError for what is neither."""
    if hasattr(tensor, "__tensor_flatten__"):
        found = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        return [part for part in found if isinstance(part, torch.Tensor)]  # a DTensor lists its mesh too
    return list(components(tensor))


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a dense tensor as bytes, in row-major order."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _dense_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    if layout_of(tensor) == "strided":
        return [tensor]
    return [dense for part in parts(tensor) for dense in _dense_parts(part)]


def _entry(key: str, tensor: torch.Tensor, storages: dict[int, Storage], first: Packed) -> TensorEntry:
    shape, dtype, layout = tuple(tensor.shape), dtype_name(tensor.dtype), layout_of(tensor)
    if layout != "strided":
        nbytes = tensor.numel() * tensor.element_size()
        return TensorEntry(key, dtype, shape, contiguous_stride(shape), 0, None, layout, nbytes, payload=first)
    memory = tensor.untyped_storage()
    storage = storages.setdefault(memory._cdata, Storage(Lazy(memory.nbytes(), lambda: [_bytes(memory)])))
    return TensorEntry(key, dtype, shape, tuple(tensor.stride()), int(tensor.storage_offset()), storage)


def _bytes(memory: torch.UntypedStorage) -> memoryview:
    whole = torch.empty(0, dtype=torch.uint8, device=memory.device).set_(memory)
    return with_torch.to_bytes(whole.cpu())
