# mypy: ignore-errors
# typeshed does not know pickle._Pickler.
"""Files as torch.save wrote them in Python 2: an ``OrderedDict`` built from a list of items,
``str`` as bytes.
"""

from __future__ import annotations

import io
import pickle
import struct
import sys
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any, ClassVar

import torch

_MAGIC, _PROTOCOL = 0x1950A86A20F9469CFC6C, 1001


class _Storage:
    """A storage of a file, which the pickle refers to by a persistent id."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.whole = tensor.detach().contiguous().reshape(-1)


class _Pickler(pickle._Pickler):  # type: ignore[name-defined,misc]
    """Protocol 2 as written by Python 2's cPickle, as far as torch files depend on it."""

    dispatch: ClassVar[dict[Any, Any]] = dict(pickle._Pickler.dispatch)  # type: ignore[attr-defined]

    def __init__(self, file: Any, legacy: bool) -> None:
        super().__init__(file, protocol=2)
        self.legacy = legacy
        self.storages: dict[int, tuple[str, _Storage]] = {}
        self.wrapped: dict[int, _Storage] = {}

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, _Storage):
            return None
        key, _ = self.storages.setdefault(id(value), (str(len(self.storages)), value))
        kind = getattr(
            torch, {torch.float32: "FloatStorage", torch.int64: "LongStorage"}[value.whole.dtype]
        )
        return ("storage", kind, key, "cpu", value.whole.numel(), *([None] if self.legacy else []))

    def save_text(self, text: str) -> None:
        raw = text.encode("latin1")
        self.write(
            b"U" + bytes([len(raw)]) + raw
            if len(raw) < 256
            else b"T" + struct.pack("<i", len(raw)) + raw
        )
        self.memoize(text)

    def save_long(self, number: int) -> None:
        raw = pickle.encode_long(number)
        self.write(b"\x8a" + bytes([len(raw)]) + raw)

    def save_ordered(self, value: OrderedDict[Any, Any]) -> None:
        state = vars(value) or None
        self.save_reduce(
            OrderedDict, ([[key, part] for key, part in value.items()],), state, obj=value
        )

    def save_tensor(self, value: torch.Tensor) -> None:
        storage = self.wrapped.setdefault(value.untyped_storage()._cdata, _Storage(value))
        args = (storage, 0, tuple(value.shape), tuple(value.stride()), False, OrderedDict())
        self.save_reduce(torch._utils._rebuild_tensor_v2, args, obj=value)

    dispatch[str] = save_text
    dispatch[int] = save_long
    dispatch[OrderedDict] = save_ordered
    dispatch[torch.Tensor] = save_tensor


def save(value: Any, path: str | Path, *, legacy: bool = True) -> str:
    """Write `value` (contiguous tensors, dicts, lists, strings, numbers) and return the path."""
    data = io.BytesIO()
    pickler = _Pickler(data, legacy)
    pickler.dump(value)
    storages = dict(pickler.storages.values())
    if legacy:
        _write_legacy(Path(path), data.getvalue(), storages)
    else:
        _write_zip(Path(path), data.getvalue(), storages)
    return str(path)


def _write_legacy(path: Path, contents: bytes, storages: dict[str, _Storage]) -> None:
    with path.open("wb") as out:
        for part in (
            _MAGIC,
            _PROTOCOL,
            {"protocol_version": _PROTOCOL, "little_endian": True, "type_sizes": {}},
        ):
            pickle.dump(part, out, 2)
        out.write(contents)
        pickle.dump(list(storages), out, 2)
        for storage in storages.values():
            out.write(struct.pack("<q", storage.whole.numel()) + storage.whole.numpy().tobytes())


def _write_zip(path: Path, contents: bytes, storages: dict[str, _Storage]) -> None:
    assert sys.byteorder == "little"
    with zipfile.ZipFile(path, "w") as out:
        out.writestr("archive/data.pkl", contents)
        for key, storage in storages.items():
            out.writestr(f"archive/data/{key}", storage.whole.numpy().tobytes())
        out.writestr("archive/version", b"3\n")
