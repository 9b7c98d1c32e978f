"""The index of a checkpoint in shards, as transformers writes it."""

from __future__ import annotations

from typing import Any

from ckpttool.containers import strict_json
from ckpttool.core.errors import CkptError
from ckpttool.core.limits import limits
from ckpttool.core.schema import OBJECT, TEXT, check, map_of, object_of
from ckpttool.io.files import opened

_INDEX = object_of({"weight_map": map_of(TEXT)}, {"metadata": OBJECT})


def read_index(path: str) -> tuple[str, dict[str, Any]]:
    """Return the index as text and as an object: ``weight_map`` maps keys to names of shards, which
    are not checked; ``./`` before them is left out.

    Raises `CkptError`, every problem at its JSON path, for anything else.
    """
    most = limits().json_bytes
    message, hint = f"{path} is not an index of a sharded checkpoint", "download or copy it again"
    with opened(path) as file:
        raw = file.read(most + 1)
    try:
        if len(raw) > most:
            raise ValueError(f"it is longer: {limits().named('json_bytes')}")
        text = raw.decode()
        index = strict_json.loads(text)
    except ValueError as error:
        raise CkptError(f"{message}: {error}", hint=hint) from error
    check(_INDEX, index, message, hint)
    if not index["weight_map"]:
        raise CkptError(f"{message}: it has no weight_map", hint=hint)
    weight_map = {}
    for key, name in index["weight_map"].items():
        while name.startswith("./"):
            name = name.removeprefix("./").lstrip("/")
        weight_map[key] = name
    return text, {**index, "weight_map": weight_map}
