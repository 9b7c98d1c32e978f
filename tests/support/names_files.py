"""Names files written by hand: what `ckpttool trace` would write for a model that has no code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Json = dict[str, Any]


def ref(key: str) -> Json:
    return {"ref": key}


def operator(name: str, *args: Any, **kwargs: Any) -> Json:
    """Return a call of the operator, as in ``operator("aten.neg.default", ref("w"))``."""
    return {"op": name, "args": list(args), "kwargs": kwargs}


def runtime(fqn: str, *, dtype: str = "float32", size: int = 2, **fields: Any) -> Json:
    """Return a runtime tensor of one dimension: a parameter, if `fields` do not say otherwise."""
    tensor = {"fqn": fqn, "canonical": fqn, "kind": "parameter", "persistent": True}
    tensor |= {"dtype": dtype, "shape": [size], "alias_of": None, **fields}
    return {**tensor, "trainable": tensor["kind"] == "parameter"}


def serialized(key: str, source: Any, *, dtype: str = "float32", size: Any = 2, hook: Any = None):
    """Return a key of the state_dict, computed from `source`; None if no tensor is its source."""
    shape = None if size is None else [size]
    return {"key": key, "dtype": dtype, "shape": shape, "from": source, "hook": hook}


def hook(function: str, line: int) -> Json:
    return {"function": function, "file": "net.py", "line": line, "module": ""}


def names_file(
    path: Path, tensors: list[Json], keys: list[Json], load: Json | None = None, **fields: Any
) -> str:
    """Write a names file and return its path; `load` has the source of each runtime name."""
    names = {
        "schema": "ckpttool.names/1",
        "model": "net.py:Net",
        "torch": "2.6",
        "runtime": tensors,
        "serialized": keys,
        "load": [{"fqn": fqn, "from": source} for fqn, source in (load or {}).items()],
        "not_serialized": [],
        "extra_state": [],
        "roundtrips": "roundtrip_problems" not in fields,
        "roundtrip_problems": [],
        "optimizer": [],
        "modules": [],
        "optimizer_class": None,
        "notes": [],
        "optimizer_groups": [],
        "versions": None,
    }
    path.write_text(json.dumps({**names, **fields}))
    return str(path)
