"""Torch files whose pickles are built node by node, in ways that torch never writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ckpttool.containers.pickle_read import Call, Global, Persistent, Pickle
from ckpttool.containers.pickle_write import dumps
from ckpttool.containers.zip_write import NewRecord, layout_archive
from files import write_pieces

GOOD = {"0": bytes(8)}  # the storage of `tensor_node`


def crafted(tmp_path: Path, root: Any, storages: dict[str, bytes], **records: bytes) -> str:
    """Write a file with this pickle and these storages."""
    notes = {"version": b"3\n", **records}
    entries = [NewRecord("a/data.pkl", dumps(Pickle(root, 2)))]
    entries += [NewRecord(f"a/data/{key}", data) for key, data in storages.items()]
    entries += [NewRecord(f"a/{name}", data) for name, data in notes.items()]
    return write_pieces(layout_archive(None, entries), tmp_path / "crafted.pt")


def tensor_node(
    offset: Any = 0,
    size: Any = (2,),
    stride: Any = (1,),
    numel: Any = 2,
    kind: str = "FloatStorage",
    key: Any = "0",
) -> Call:
    """Return the node of a tensor; by default two zeros."""
    reference = Persistent(("storage", Global("torch", kind), key, "cpu", numel))
    hooks = Call(Global("collections", "OrderedDict"), ())
    args = (reference, offset, size, stride, False, hooks)
    return Call(Global("torch._utils", "_rebuild_tensor_v2"), args)
