"""A names file as an operand: the names in it, and the checkpoints that they are the names of."""

from __future__ import annotations

import os
from math import prod

from ckpttool.checkpoint import Checkpoint, ExtraEntry, Lazy, Section, Storage, TensorEntry, in_row_major
from ckpttool.dtypes import itemsize
from ckpttool.formats.containers import json_text
from ckpttool.limits import limits
from ckpttool.names import SCHEMA, Names


def is_names_file(operand: object) -> bool:
    """Whether the operand is the path of a file that `trace` wrote."""
    return isinstance(operand, str) and holds(operand, SCHEMA)


def holds(path: str, schema: str) -> bool:
    """Whether it is a JSON file of the schema in any version; what formats a repository may have sorted its members."""
    if not path.endswith(".json") or not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        return schema.rpartition("/")[0].encode() in file.read(limits().json_bytes)


def read_names(path: str) -> Names:
    """The names in the file. Raises `CkptError` with every fault of it."""
    return Names.from_json(
        json_text.read_file(path, "write a names file with `ckpttool trace MODEL -o names.json`"), path
    )


def saved_by(names: Names) -> Checkpoint:
    """A checkpoint that the model writes, with zeros for its values."""
    tensors = tuple(
        _entry(saved.key, saved.dtype, () if saved.shape is None else saved.shape) for saved in names.serialized
    )
    section = Section("", "state_dict", tensors, tuple(map(ExtraEntry, names.extra_state)))
    return Checkpoint("CKPT", "torch_zip", 0, (section,))


def _entry(key: str, dtype: str, shape: tuple[int, ...]) -> TensorEntry:
    length = prod(shape) * itemsize(dtype)
    return in_row_major(key, dtype, shape, Storage(Lazy(length, lambda: [bytes(length)])))
