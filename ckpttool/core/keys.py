"""The spelling of keys: dots, numbers, flat parameters."""

from __future__ import annotations

import re
from collections.abc import Container

FLAT_PARAM = "_flat_param"  # FSDP1's name; FlattenParamsWrapper's is flat_param, fairscale's flat_param_0
_FLAT = re.compile(r"_flat_param|flat_param(_\d+)?")

NUMBER = re.compile(r"(?<![^.])(\d+)(?![^.])")  # a segment that is a number, as of a layer


def dotted(*parts: str) -> str:
    """Return the parts joined by dots, without empty ones: the root of a file or a model has no name."""
    return ".".join(filter(None, parts))


def is_flat(key: str) -> bool:
    """Return True if the last segment of `key` is the name of a flat parameter."""
    return "flat_param" in key and _FLAT.fullmatch(key.rpartition(".")[2]) is not None


def free(path: str, taken: Container[str]) -> str:
    """Return `path`, or if it is taken (keys may contain dots) the first of `path@1`, `path@2`, ... that is not."""
    number, found = 0, path
    while found in taken:
        number += 1
        found = f"{path}@{number}"
    return found
