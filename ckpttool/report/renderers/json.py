"""The JSON report: the contract's object, an item of a list on one line, so that `grep` and `diff` can read it too."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any


def render(data: Mapping[str, Any]) -> str:
    r"""The object in the order of `data`, ending with a newline. Raises ValueError for a float that JSON has not.

    Letters of every script stand as they are; what a terminal would obey or an encoder refuse (C1 controls, bidi
    overrides, lone surrogates) is escaped as ``\uXXXX`` and reads back the same.
    """
    return "\n".join(line if line.isprintable() else _escaped(line) for line in _value(data, "").split("\n")) + "\n"


def _value(value: Any, indent: str) -> str:
    inner = f"{indent}  "
    if isinstance(value, Mapping) and value:
        members = (f"{_compact(str(name))}: {_value(member, inner)}" for name, member in value.items())
        return _block("{", members, "}", indent)
    if isinstance(value, list) and value:
        return _block("[", map(_compact, value), "]", indent)
    return _compact(value)


def _block(opening: str, lines: Iterable[str], closing: str, indent: str) -> str:
    separator = f",\n{indent}  "
    return f"{opening}\n{indent}  {separator.join(lines)}\n{indent}{closing}"


def _compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _escaped(line: str) -> str:
    return "".join(char if char.isprintable() else json.dumps(char)[1:-1] for char in line)
