"""An object in memory as the checkpoint that `torch.save` would make of it: the same index, and
nothing is written.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeGuard

import torch
from torch.storage import TypedStorage

from ckpttool.containers.pickle_read import Origin, loads
from ckpttool.containers.tensors import Storages
from ckpttool.containers.tree import read_tree
from ckpttool.core.checkpoint import Checkpoint, Lazy, Storage
from ckpttool.core.errors import CkptError, Problem
from ckpttool.core.limits import Memory
from ckpttool.core.pickle_imports import in_order
from ckpttool.core.text import dotted, first_line, plural
from ckpttool.evaluate import torch_eval
from ckpttool.formats.registry import MEMORY
from ckpttool.formats.remarks import read_form, remarks
from ckpttool.tracing.instances import layout_of
from ckpttool.tracing.memory import inside

_NO_LIMIT = 1 << 50  # bytes: the object is the caller's own


class _Pickler(pickle.Pickler):
    """Pickles as `torch.save` does, and keeps the storages instead of their bytes."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=2)
        self.keys: dict[int, str] = {}
        self.memory: dict[str, torch.UntypedStorage] = {}
        self.dtypes: dict[str, torch.dtype] = {}

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, TypedStorage):
            untyped, dtype, numel = obj._untyped_storage, obj.dtype, obj._size()
            kind = getattr(torch, obj._pickle_storage_type())
        elif isinstance(obj, torch.UntypedStorage):
            untyped, dtype, numel = obj, torch.uint8, obj.nbytes()
            kind = torch.serialization.normalize_storage_type(type(obj))
        else:
            return None
        key = self.keys.setdefault(untyped._cdata, str(len(self.keys)))
        if self.dtypes.setdefault(key, dtype) != dtype and untyped.data_ptr():
            raise RuntimeError("tensors of different dtypes share one storage")
        self.memory[key] = untyped
        return "storage", kind, key, torch.serialization.location_tag(untyped), numel


def checkpoint_of(obj: object) -> Checkpoint:
    """Return the index that the file written by ``torch.save(obj, ...)`` would have.

    Bytes are read from the live tensors when they are needed. Raise `CkptError` if `torch.save`
    cannot save the object, or if the memory of a tensor was freed.
    """
    check_memory(_tensors(obj))
    file = io.BytesIO()
    pickler = _Pickler(file)
    try:
        pickler.dump(obj)
    except Exception as error:  # whatever the object's own code raises
        raise CkptError(
            f"torch.save cannot save this object: {first_line(error)}",
            hint="pass only what a checkpoint file can hold, such as model.state_dict()",
        ) from error
    parsed = loads(file.getvalue(), origin=Origin(nbytes=_NO_LIMIT))
    held = {
        key: Storage(Lazy(memory.nbytes(), bytes_of(memory)))
        for key, memory in pickler.memory.items()
    }
    storages = Storages(
        lambda key, nbytes: held[key], dict(held), memory=Memory(_NO_LIMIT), pickled=parsed.end
    )

    sizes = {key: storage.nbytes for key, storage in held.items()}
    imports = in_order(parsed.imports)
    checkpoint = read_tree(
        MEMORY.title, MEMORY.name, sum(sizes.values()), parsed, storages, sizes, imports=imports
    )
    notes = (*checkpoint.notes, *remarks(checkpoint))
    return read_form(replace(checkpoint, notes=notes))


def check_memory(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raise `CkptError` if the memory of a tensor, or of a part of it, was freed: reading it would
    end the process.
    """
    freed = []
    for key, tensor in tensors:
        if any(map(_is_freed, levels(tensor.detach()))):
            freed.append(Problem("its memory was freed", key))
    if freed:
        hint = "gather it first, as FSDP's own state_dict() does"
        raise CkptError(f"{plural(len(freed), 'tensor')} without memory", hint=hint, problems=freed)


def _is_freed(tensor: torch.Tensor) -> bool:
    return (
        layout_of(tensor) == "strided"
        and tensor.numel() > 0
        and not tensor.untyped_storage().nbytes()
    )


def levels(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensor, then the tensors that it consists of, down to dense ones."""
    yield tensor
    for part in inside(tensor):
        yield from levels(part)


def bytes_of(memory: torch.UntypedStorage) -> Callable[[], list[memoryview]]:

    def read() -> list[memoryview]:
        whole = torch.empty(0, dtype=torch.uint8, device=memory.device).set_(memory)
        return [torch_eval.to_bytes(whole.cpu())]

    return read


def _tensors(obj: object) -> Iterator[tuple[str, torch.Tensor]]:
    todo, seen = [("", obj)], set[int]()
    while todo:
        path, value = todo.pop()
        if isinstance(value, torch.Tensor):
            yield path, value
        elif is_container(value) and id(value) not in seen:
            seen.add(id(value))
            parts = value.items() if isinstance(value, Mapping) else enumerate(value)
            todo += [(dotted(path, str(key)), part) for key, part in parts]


def is_container(value: object) -> TypeGuard[Mapping[Any, Any] | list[Any] | tuple[Any, ...]]:
    return isinstance(value, (Mapping, list, tuple))
