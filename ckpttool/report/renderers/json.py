"""The JSON report: the contract's object, an item of a list on one line, so that `grep` and `diff`
can read it too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def render(data: Mapping[str, Any]) -> str:
    r"""Return the object in the order of `data`, ending with a newline. Raises ValueError for a
    float not in JSON.

    Printable letters of every script are written as they are. Characters that a terminal would
    interpret or an encoder reject (C1 controls, bidi overrides, lone surrogates) are escaped as
    ``\uXXXX`` and read back the same.
    """
    lines = []
    for line in _value(data, "").split("\n"):
        lines.append(line if line.isprintable() else "".join(map(_escaped, line)))
    return "\n".join(lines) + "\n"


def _escaped(char: str) -> str:
    return char if char.isprintable() else json.dumps(char)[1:-1]


def _value(value: Any, indent: str) -> str:
    inner = f"{indent}  "
    if isinstance(value, Mapping) and value:
        items = []
        for name, member in value.items():
            items.append(f"{_compact(str(name))}: {_value(member, inner)}")
        begin, end = "{}"
    elif isinstance(value, list) and value:
        items = list(map(_compact, value))
        begin, end = "[]"
    else:
        return _compact(value)
    lines = f",\n{inner}".join(items)
    return f"{begin}\n{inner}{lines}\n{indent}{end}"


def _compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
