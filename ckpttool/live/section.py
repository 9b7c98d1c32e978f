"""A live state dict as the index that planning works on: the same `Section` that a file's reader would give."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch

from ckpttool.checkpoint import ExtraEntry, Lazy, Section, Storage, TensorEntry, contiguous_stride
from ckpttool.errors import CkptError, Problem
from ckpttool.evaluate import with_torch
from ckpttool.tracing.recorder.identity import inside, token
from ckpttool.tracing.runtime import dtype_name, is_special, layout_of
from ckpttool.values import dataclass
from ckpttool.words import plural


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """The payload of a tensor that is no dense block of memory; what it is made of is compared."""

    tensor: torch.Tensor

    def content(self) -> bytes | None:
        """Equal for tensors that mean the same by the same bytes; of DTensors, for this rank's parts."""
        found = hashlib.blake2b()
        for level in _levels(self.tensor.detach()):
            found.update(_told(level).encode(errors="surrogatepass"))
            if layout_of(level) == "strided":
                found.update(with_torch.to_bytes(level.cpu()))
            elif not inside(level):
                return None
        return found.digest()


def section_of(state_dict: Mapping[str, object]) -> Section:
    """The state dict as a section. Tensors keep their storage: nothing is copied until bytes are compared.

    What is no dense block of memory (quantized, sparse, subclasses, meta) has no storage but a `layout`. Raises
    `CkptError` where a key is no string, and where the memory of a tensor, or of a part of it, was freed: whoever reads
    that ends the process.
    """
    tensors: list[TensorEntry] = []
    extras: list[ExtraEntry] = []
    storages: dict[int, Storage] = {}
    first: dict[object, Packed] = {}
    check_memory((key, value) for key, value in state_dict.items() if isinstance(value, torch.Tensor))
    for key, value in state_dict.items():
        if not isinstance(key, str):
            raise CkptError(f"the state dict has a key that is no string: {key!r}", hint="pass model.state_dict()")
        if isinstance(value, torch.Tensor):
            levels = list(_levels(value.detach()))
            one = token(value), *(map(_told, levels) if is_special(value) else ())
            tensors.append(_entry(key, value, storages, first.setdefault(one, Packed(value))))
        else:
            plain = _is_plain(value)
            extras.append(ExtraEntry(key, None if plain else value, value if plain else None))
    versions = getattr(state_dict, "_metadata", None)
    modules = {path: dict(own) for path, own in versions.items()} if isinstance(versions, Mapping) else None
    return Section("", "state_dict", tuple(tensors), tuple(extras), modules)


def check_memory(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raise `CkptError` if the memory of a tensor, or of a part of it, was freed: reading it would end the process."""
    freed = [
        Problem("its memory was freed", key) for key, tensor in tensors if any(map(_is_freed, _levels(tensor.detach())))
    ]
    if freed:
        hint = "gather it first, as FSDP's own state_dict() does"
        raise CkptError(f"{plural(len(freed), 'tensor')} without memory", hint=hint, problems=freed)


def context(tensor: torch.Tensor) -> object:
    """What a wrapper subclass knows beside its parts (a scale, a block size, ...): None where it is none."""
    return tensor.__tensor_flatten__()[1] if hasattr(tensor, "__tensor_flatten__") else None


def _is_plain(value: object) -> bool:
    """Whether a file has the value as it is: numbers, words, and lists of such."""
    return all(map(_is_plain, value)) if type(value) is list else type(value) in (bool, int, float, str)


def _is_freed(tensor: torch.Tensor) -> bool:
    return layout_of(tensor) == "strided" and tensor.numel() > 0 and not tensor.untyped_storage().nbytes()


def _levels(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensor, and behind it what it is made of, down to dense ones."""
    yield tensor
    for part in inside(tensor):
        yield from _levels(part)


def _told(tensor: torch.Tensor) -> str:
    """All that a tensor is but the values of its dense parts."""
    return repr((type(tensor).__name__, tensor.dtype, tuple(tensor.shape), context(tensor)))


def _entry(key: str, tensor: torch.Tensor, storages: dict[int, Storage], first: Packed) -> TensorEntry:
    shape, dtype, layout = tuple(tensor.shape), dtype_name(tensor.dtype), layout_of(tensor)
    if layout != "strided":
        nbytes = tensor.numel() * tensor.element_size()
        return TensorEntry(key, dtype, shape, contiguous_stride(shape), 0, None, layout, nbytes, payload=first)
    tensor = tensor.resolve_conj().resolve_neg()  # the memory of a lazy one holds other values
    memory = tensor.untyped_storage()
    storage = storages.setdefault(memory._cdata, Storage(Lazy(memory.nbytes(), bytes_of(memory))))
    return TensorEntry(key, dtype, shape, tuple(tensor.stride()), int(tensor.storage_offset()), storage)


def bytes_of(memory: torch.UntypedStorage) -> Callable[[], list[memoryview]]:
    """Return a function that reads the bytes of a live storage."""

    def read() -> list[memoryview]:
        whole = torch.empty(0, dtype=torch.uint8, device=memory.device).set_(memory)
        return [with_torch.to_bytes(whole.cpu())]

    return read
