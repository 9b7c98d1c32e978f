"""The index file of a sharded checkpoint (``*.index.json``): read and checked by itself, without its shards."""

from __future__ import annotations

from typing import Any

from ckpttool.errors import CkptError
from ckpttool.formats.containers import json_text
from ckpttool.io.files import opened
from ckpttool.json_schema import OBJECT, TEXT, check, map_of, object_of
from ckpttool.limits import limits

_INDEX = object_of({"weight_map": map_of(TEXT)}, {"metadata": OBJECT})
_AGAIN = "download or copy it again"


def read_index(path: str) -> tuple[str, dict[str, Any]]:
    """The index as text, and as the object it is: ``weight_map`` maps keys to names of shards.

    Raises `CkptError`, every problem at its JSON path, for what is no such index. What the names lead to is not looked
    at.
    """
    most = limits().json_bytes
    with opened(path) as file:
        raw = file.read(most + 1)
    try:
        if len(raw) > most:
            raise ValueError(f"it is longer: {limits().named('json_bytes')}")
        text = raw.decode()
        index = json_text.loads(text)
    except ValueError as error:
        raise _no_index(path, str(error)) from error
    check(_INDEX, index, f"{path} is no index of a sharded checkpoint", _AGAIN)
    if not index["weight_map"]:
        raise _no_index(path, "it has no weight_map")
    return text, index


def _no_index(path: str, problem: str) -> CkptError:
    return CkptError(f"{path} is no index of a sharded checkpoint: {problem}", hint=_AGAIN)
