"""How keys are spelled: their dots, and the last segments of flat optimizer keys."""

from __future__ import annotations

import re
from collections.abc import Container

FLAT_PARAM = "_flat_param"  # FSDP1's name; FlattenParamsWrapper's is flat_param, fairscale's flat_param_0
_FLAT = re.compile(r"_flat_param|flat_param(_\d+)?")

NUMBER = re.compile(r"(?<![^.])(\d+)(?![^.])")  # a segment that is a number, as of a layer


def dotted(*parts: str) -> str:
    """The parts joined by dots, without those that are empty: the root of a file or a model has no name."""
    return ".".join(filter(None, parts))


def is_flat(key: str) -> bool:
    """Whether the last segment of `key` is one that flat parameters have."""
    return "flat_param" in key and _FLAT.fullmatch(key.rpartition(".")[2]) is not None


def free(path: str, taken: Container[str]) -> str:
    """`path`, or where it is taken (keys may hold dots themselves) the first `path@1`, `path@2`, ... that is free."""
    number, found = 0, path
    while found in taken:
        number += 1
        found = f"{path}@{number}"
    return found
