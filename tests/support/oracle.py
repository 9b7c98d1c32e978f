"""Compare torch's reading of a file with ckpttool's index: every tensor, bit for bit, and every
storage.

Empty stand-ins replace foreign classes in a pickle, so that files load without the packages that
wrote them and without running their code.
"""

from __future__ import annotations

import hashlib
import pickle
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import ckpttool
from ckpttool import Checkpoint, CkptError, write
from command import main
from files import content

Print = tuple[str, tuple[int, ...], str]  # dtype, shape, hash of the elements
ENDINGS = {"torch_zip": ".pt", "torch_legacy": ".pt", "safetensors": ".safetensors"}


class StandIn:
    """An object of a missing class: it keeps everything from its pickle."""

    def __new__(cls, *args: Any, **kwargs: Any) -> StandIn:
        instance = super().__new__(cls)
        instance.__dict__.update(args=args, kwargs=kwargs)
        return instance

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state=state)

    def append(self, item: Any) -> None:
        self.__dict__.setdefault("items", []).append(item)

    def extend(self, items: Any) -> None:
        self.__dict__.setdefault("items", []).extend(items)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.__dict__.setdefault("pairs", []).append((key, value))


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        base = module.partition(".")[0]
        if (base == "torch" and name.startswith("_")) or module in (
            "collections",
            "copyreg",
            "_codecs",
            "torch",
        ):
            return super().find_class(module, name)
        if base == "torch" and (name.endswith("Storage") or module == "torch.serialization"):
            return super().find_class(module, name)
        if module in ("builtins", "__builtin__") and name in (
            "set",
            "frozenset",
            "slice",
            "complex",
            "dict",
            "object",
        ):
            return super().find_class("builtins", name)
        return type(name, (StandIn,), {"__module__": module})


def _pickling() -> ModuleType:
    module = ModuleType("stand_ins")
    module.__dict__.update(
        vars(pickle), Unpickler=_Unpickler, load=lambda file, **how: _Unpickler(file, **how).load()
    )
    return module


def load(path: str) -> Any:
    """Load the file like torch.load, with stand-ins for foreign classes."""
    with torch.serialization.warnings.catch_warnings():
        torch.serialization.warnings.simplefilter("ignore")
        return torch.load(
            path,
            map_location="cpu",
            weights_only=False,
            pickle_module=_pickling(),
            encoding="latin1",
        )


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor inside `value`, each object once."""
    todo, seen, kept = [value], set[int](), []
    while todo:
        part = todo.pop()
        if id(part) in seen or isinstance(part, (str, bytes, int, float, type(None), type)):
            continue
        seen.add(id(part))
        kept.append(part)
        if isinstance(part, torch.Tensor):
            yield part
        elif isinstance(part, Mapping):
            todo += [*part.keys(), *part.values(), getattr(part, "__dict__", None)]
        elif isinstance(part, (list, tuple, set, frozenset)):
            todo += part
        elif isinstance(part, torch.ScriptObject):  # packed parameters
            todo.append(part.__getstate__())  # type: ignore[attr-defined]
        else:
            todo.append(getattr(part, "__dict__", None))


def fingerprint(tensor: torch.Tensor) -> Print:
    """Return dtype, shape and a hash of the bytes of a dense tensor."""
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return (
        str(tensor.dtype).removeprefix("torch."),
        tuple(tensor.shape),
        _digest(dense.view(torch.uint8) if dense.numel() else dense),
    )


def fingerprint_of(entry: Any) -> Print:
    """Return the fingerprint of an index entry."""
    dtype = getattr(torch, entry.dtype)
    if not entry.numel:
        return fingerprint(torch.empty(entry.shape, dtype=dtype))
    whole = torch.frombuffer(bytearray(_bytes(entry.storage)), dtype=torch.uint8)
    start = entry.offset * dtype.itemsize
    elements = whole[start : start + (entry.end - entry.offset) * dtype.itemsize].clone()
    return fingerprint(elements.view(dtype).as_strided(entry.shape, entry.stride))


def _bytes(storage: Any) -> bytes:
    return b"".join(content(storage.data))


def _digest(elements: torch.Tensor) -> str:
    return hashlib.blake2b(elements.numpy().data).hexdigest()


def disagreements(path: str) -> list[str]:
    """List the tensors and storages on which ckpttool and torch disagree."""
    checkpoint = ckpttool.open_checkpoint(path)
    loaded = _loaded(checkpoint, path)
    entries = [entry for section in checkpoint.sections for entry in section.all_tensors()]
    dense = {fingerprint_of(entry): entry.key for entry in entries if entry.storage is not None}
    packed = sum(entry.storage is None for entry in entries)
    theirs = {fingerprint(tensor): tensor for tensor in tensors_of(loaded) if _is_dense(tensor)}
    named = {_digest_of(found.storage) for found in checkpoint.unreached}
    found = [
        f"torch has {mark[0]} {list(mark[1])}, which is not in the index"
        for mark, tensor in theirs.items()
        if mark not in dense and _digest(_whole(tensor)) not in named
    ]
    found += [f"{dense[mark]}: torch has no such tensor" for mark in dense.keys() - theirs.keys()]
    if packed + len(named) < sum(not _is_dense(tensor) for tensor in tensors_of(loaded)):
        found.append("packed tensors are missing")
    return found + _by_key(checkpoint, loaded) + _unaccounted(checkpoint, path)


def problems(path: str, out: Path) -> Iterator[str]:
    """Read, diff and rewrite the file with ckpttool; yield every problem."""
    yield from disagreements(path)
    quiet = ("--report", str(out / "report.json"))
    has_state_dict = any(
        section.kind == "state_dict" for section in ckpttool.open_checkpoint(path).sections
    )
    # 2: an error
    if main(["diff", path, path, "--values", *quiet]) != (0 if has_state_dict else 2):
        yield "differs from itself"
    ending = ENDINGS.get(ckpttool.open_checkpoint(path).format)
    if ending is not None:
        rewritten = str(out / f"rewritten{ending}")
        try:
            write(ckpttool.open_checkpoint(path), rewritten, verify=True, force=True, no_fsync=True)
        except CkptError:
            yield "cannot be rewritten"
        else:
            yield from disagreements(rewritten)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return all bytes of the tensor's storage."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.detach().untyped_storage())


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_meta


def _loaded(checkpoint: Checkpoint, path: str) -> Any:
    if checkpoint.format == "safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    if checkpoint.format == "torchscript":
        return torch.jit.load(path, map_location="cpu").state_dict()
    return load(path)


def _by_key(checkpoint: Checkpoint, loaded: Any) -> list[str]:
    """Compare state dicts key by key, including the order of keys."""
    found = []
    for section in checkpoint.sections:
        value = loaded
        for step in filter(None, section.path.split(".")):
            value = value[step] if isinstance(value, Mapping) and step in value else None
        if section.kind == "state_dict" and isinstance(value, Mapping):
            keys = [key for key, part in value.items() if isinstance(part, torch.Tensor)]
            if keys != [entry.key for entry in section.tensors]:
                found.append(f"section {section.path}: other keys than torch has")
            for entry in section.tensors:
                if entry.storage is not None and fingerprint_of(entry) != fingerprint(
                    value[entry.key]
                ):
                    found.append(f"{section.path}::{entry.key}: other values than torch has")
    return found


def _unaccounted(checkpoint: Checkpoint, path: str) -> list[str]:
    """List storages that belong to no tensor and are not reported; packed tensors may own a few."""
    stored = _storages(checkpoint, path)
    entries = [entry for section in checkpoint.sections for entry in section.all_tensors()]
    storages = {id(entry.storage): entry.storage for entry in entries if entry.storage is not None}
    storages |= {id(found.storage): found.storage for found in checkpoint.unreached}
    known = set(map(_digest_of, storages.values()))
    left = [name for name, content in stored.items() if content not in known]
    packed = [entry for entry in entries if entry.storage is None]
    return (
        []
        if packed and len(left) <= 4 * len(packed)
        else [f"storage {name} is not accounted for" for name in left]
    )


def _digest_of(storage: Any) -> str:
    return hashlib.blake2b(_bytes(storage)).hexdigest()


def _storages(checkpoint: Checkpoint, path: str) -> dict[str, str]:
    """Return name -> hash of the content of each storage in the file."""
    if checkpoint.format in ("torch_zip", "torchscript"):
        with zipfile.ZipFile(path) as archive:
            names = [
                name for name in archive.namelist() if "/data/" in name or "/constants/" in name
            ]
            return {name: hashlib.blake2b(archive.read(name)).hexdigest() for name in names}
    if checkpoint.format == "torch_legacy":
        return _legacy_storages(path)
    return {}


def _legacy_storages(path: str) -> dict[str, str]:
    """Return every storage that torch creates while it loads the file."""
    storages: dict[int, torch.UntypedStorage] = {}

    def keep(storage: Any, location: str) -> Any:
        storages[id(storage)] = storage
        return storage

    with torch.serialization.warnings.catch_warnings():
        torch.serialization.warnings.simplefilter("ignore")
        torch.load(
            path,
            map_location=keep,
            weights_only=False,
            pickle_module=_pickling(),
            encoding="latin1",
        )
    return {
        str(number): hashlib.blake2b(bytes(s)).hexdigest()
        for number, s in enumerate(storages.values())
    }
