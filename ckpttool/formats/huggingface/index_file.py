"""The index file of a sharded checkpoint (``*.index.json``): read and checked by itself, without its shards."""

from __future__ import annotations

from typing import Any

from ckpttool.errors import CkptError
from ckpttool.formats.containers import json_text
from ckpttool.io.files import opened

MAX_INDEX = 1 << 28  # bytes


def read_index(path: str) -> tuple[str, dict[str, Any]]:
    """The index as text, and as the object it is: ``weight_map`` maps keys to names of shards.

    Raises `CkptError` for what is no such index. What the names lead to is not looked at.
    """
    with opened(path) as file:
        raw = file.read(MAX_INDEX + 1)
    try:
        if len(raw) > MAX_INDEX:
            raise ValueError(f"it is longer than {MAX_INDEX} bytes")
        text = raw.decode()
        index = json_text.loads(text)
    except ValueError as error:
        raise _no_index(path, str(error)) from error
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise _no_index(path, "it has no weight_map")
    if not all(isinstance(name, str) for name in weight_map.values()):
        raise _no_index(path, "its weight_map holds something else than file names")
    if not isinstance(index.get("metadata", {}), dict):
        raise _no_index(path, "its metadata is no object")
    return text, index


def _no_index(path: str, problem: str) -> CkptError:
    return CkptError(f"{path} is no index of a sharded checkpoint: {problem}", hint="download or copy it again")
