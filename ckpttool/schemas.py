"""A JSON Schema (2020-12) for every object that is written, by its name.

Each is described once, beside the value that it is: so it is written, checked where it is read, and printed here.
"""

from __future__ import annotations

from typing import Any

from ckpttool.checks import CHECKS
from ckpttool.edits.remap.result import REMAP
from ckpttool.edits.rules.ready import SETS
from ckpttool.edits.swap.swap import SWAP
from ckpttool.edits.undo import UNDONE
from ckpttool.errors import CkptError
from ckpttool.expression import DEFINITIONS
from ckpttool.formats.manifest import STATEMENT
from ckpttool.json_schema import ERROR, Kind
from ckpttool.names import NAMES
from ckpttool.plan import PLAN
from ckpttool.queries.diff.result import DIFF
from ckpttool.queries.diff.since import SINCE
from ckpttool.queries.diff.steps import STEPS
from ckpttool.queries.explanation import EXPLAIN
from ckpttool.queries.inspection import INSPECT

DIALECT = "https://json-schema.org/draft/2020-12/schema"
OBJECTS: dict[str, Kind] = {
    "inspect": INSPECT,
    "names": NAMES,
    "diff": DIFF,
    "since": SINCE,
    "steps": STEPS,
    "explain": EXPLAIN,
    "remap": REMAP,
    "swap": SWAP,
    "undo": UNDONE,
    "plan": PLAN,
    "rules": SETS,
    "check": CHECKS,
    "error": ERROR,
    "manifest": STATEMENT,
}


def schema(name: str, closed: bool = False) -> dict[str, Any]:
    """The JSON Schema of an object; a `closed` one refuses members that it does not name, which later versions may add.

    Raises `CkptError` where there is no such object.
    """
    if name not in OBJECTS:
        raise CkptError(f"no such object: {name}", hint=f"the objects are {', '.join(OBJECTS)}")
    kind = OBJECTS[name]
    made = {"$schema": DIALECT, "title": kind.title, **kind.schema(closed)}
    return {**made, "$defs": DEFINITIONS} if "#/$defs/" in repr(made) else made
