"""A JSON Schema (2020-12) for every object that is written, by its name.

Each is described once, next to its value: so it is written, checked where it is read, and printed
here.
"""

from __future__ import annotations

from typing import Any

from ckpttool.checks import CHECKS
from ckpttool.core.codes import CODE
from ckpttool.core.errors import CkptError
from ckpttool.core.expression import DEFINITIONS
from ckpttool.core.names import NAMES
from ckpttool.core.plan import PLAN
from ckpttool.core.schema import ERROR, JsonKind
from ckpttool.diffing.result import DIFF
from ckpttool.inspection.explain import EXPLAIN
from ckpttool.inspection.result import INSPECT
from ckpttool.remapping.result import REMAP
from ckpttool.remapping.undo import UNDONE
from ckpttool.ruleset.parse import SETS
from ckpttool.swap.result import SWAP

DIALECT = "https://json-schema.org/draft/2020-12/schema"
OBJECTS: dict[str, JsonKind] = {
    "inspect": INSPECT,
    "names": NAMES,
    "diff": DIFF,
    "explain": EXPLAIN,
    "remap": REMAP,
    "swap": SWAP,
    "undo": UNDONE,
    "plan": PLAN,
    "rules": SETS,
    "check": CHECKS,
    "error": ERROR,
    "code": CODE,
}


def schema(name: str) -> dict[str, Any]:
    """The JSON Schema of an object.

    Raises `CkptError` where there is no such object.
    """
    if name not in OBJECTS:
        raise CkptError(f"no such object: {name}", hint=f"the objects are {', '.join(OBJECTS)}")
    kind = OBJECTS[name]
    schema = {"$schema": DIALECT, "title": kind.title, **kind.schema()}
    if "#/$defs/" in repr(schema):
        schema["$defs"] = DEFINITIONS
    return schema
