"""The JSON report: the contract's object, one file a tool can read back without loss."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def render(data: Mapping[str, Any]) -> str:
    r"""Indented JSON in the order of `data`, ending with a newline.

    Letters of every script stand as they are; what a terminal would obey or an encoder refuse (C1 controls, bidi
    overrides, lone surrogates) is escaped as ``\uXXXX`` and reads back the same.
    """
    lines = json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False).split("\n")
    return "\n".join(line if line.isprintable() else _escaped(line) for line in lines) + "\n"


def _escaped(line: str) -> str:
    return "".join(char if char.isprintable() else json.dumps(char)[1:-1] for char in line)
