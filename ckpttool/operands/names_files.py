"""Names files, which `trace` writes."""

from __future__ import annotations

import os
from dataclasses import replace
from math import prod

from ckpttool.containers import strict_json
from ckpttool.core.checkpoint import (
    Checkpoint,
    ExtraEntry,
    Lazy,
    Section,
    Storage,
    TensorEntry,
    in_row_major,
)
from ckpttool.core.dtypes import itemsize
from ckpttool.core.expression import Expression, Ref
from ckpttool.core.limits import limits
from ckpttool.core.names import SCHEMA, Names, SerializedKey
from ckpttool.core.text import CKPT


def is_names_file(operand: object) -> bool:
    """Return True for the path of a file that `trace` wrote."""
    if not isinstance(operand, str) or not operand.endswith(".json"):
        return False
    if not os.path.isfile(operand):
        return False
    mark = SCHEMA.rpartition("/")[0].encode()
    with open(operand, "rb") as file:
        return mark in file.read(limits().json_bytes)


def read_names(path: str) -> Names:
    """Return the names in the file. Raise `CkptError` with all of its faults."""
    hint = "write a names file with `ckpttool trace MODEL -o names.json`"
    return Names.from_json(strict_json.read_file(path, hint), path)


def saved_by(names: Names) -> Checkpoint:
    """Return a checkpoint that the model saves, with zeros as values; tied keys share them."""
    first: dict[Expression, TensorEntry] = {}
    tensors: list[TensorEntry] = []
    for key in names.serialized:
        entry = _zeros(key)
        if isinstance(key.source, Ref):
            entry = replace(first.setdefault(key.source, entry), key=key.key)
        tensors.append(entry)
    extras = tuple(map(ExtraEntry, names.extra_state))
    section = Section("", "state_dict", tuple(tensors), extras)
    return Checkpoint(CKPT, "torch_zip", 0, (section,))


def _zeros(key: SerializedKey) -> TensorEntry:
    shape = key.shape or ()
    nbytes = prod(shape) * itemsize(key.dtype)
    data = Lazy(nbytes, lambda: [bytes(nbytes)])
    return in_row_major(key.key, key.dtype, shape, Storage(data))
