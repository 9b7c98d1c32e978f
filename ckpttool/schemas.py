"""A JSON Schema (2020-12) for every object that is written, by its name.

What is read again (names files, plans, manifests) is described where it is read; the rest here, member by member.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ckpttool.checks import CHECKS
from ckpttool.checks import SCHEMA as CHECK
from ckpttool.edits.cost import COST, VERIFIED
from ckpttool.edits.remap.result import OPTIMIZER
from ckpttool.edits.remap.result import SCHEMA as REMAP
from ckpttool.edits.rules.ready import SCHEMA as RULES
from ckpttool.edits.swap.swap import SCHEMA as SWAP
from ckpttool.errors import CkptError
from ckpttool.expression import DEFINITIONS
from ckpttool.formats.manifest import MANIFEST_KIND, STATEMENT
from ckpttool.json_schema import (
    COUNT,
    FLAG,
    OBJECT,
    PROBLEM,
    SHAPE,
    TEXT,
    TEXTS,
    Kind,
    either,
    list_of,
    map_of,
    nullable,
    object_of,
    one_of,
    plain,
)
from ckpttool.names import HOOK, NAMES
from ckpttool.names import SCHEMA as NAMES_SCHEMA
from ckpttool.optimizer_state import FORMS
from ckpttool.plan import PLAN
from ckpttool.plan import SCHEMA as PLAN_SCHEMA
from ckpttool.queries.diff.result import AMBIGUOUS, ENTRIES, STATUSES, SUGGESTED
from ckpttool.queries.diff.result import SCHEMA as DIFF
from ckpttool.queries.diff.since import SCHEMA as SINCE_SCHEMA
from ckpttool.queries.diff.since import SINCE
from ckpttool.queries.diff.steps import SCHEMA as STEPS_SCHEMA
from ckpttool.queries.diff.steps import STEPS
from ckpttool.queries.explanation import SCHEMA as EXPLAIN
from ckpttool.queries.inspection import SCHEMA as INSPECT

DIALECT = "https://json-schema.org/draft/2020-12/schema"
ERROR = "ckpttool.error/1"
_NUMBER = plain("a number", lambda value: isinstance(value, (int, float)), {"type": "number"})


def _saying(title: str, kind: Kind) -> Kind:
    """The object, with the member that says what it is."""

    def schema(closed: bool) -> dict[str, Any]:
        found = kind.schema(closed)
        members = {"schema": one_of(title).schema(closed), **found["properties"]}
        return {**found, "properties": members, "required": ["schema", *found["required"]]}

    return replace(kind, schema=schema)


_COUNTS = object_of({}, dict.fromkeys(STATUSES, COUNT))
_STATISTICS = object_of(
    {
        **dict.fromkeys(("min", "max", "mean"), nullable(_NUMBER)),
        **dict.fromkeys(("zeros", "nan", "inf"), nullable(COUNT)),
        "sha256": TEXT,
    }
)
_INSPECT = object_of(
    {
        "source": TEXT,
        "format": TEXT,
        "bytes": COUNT,
        "sections": list_of(
            object_of(
                {
                    "path": TEXT,
                    "kind": one_of("state_dict", "optimizer", "other"),
                    "tensors": COUNT,
                    "bytes": COUNT,
                    "wrappers": TEXTS,
                }
            )
        ),
        "tensors": list_of(
            object_of(
                {
                    "section": TEXT,
                    "key": TEXT,
                    "dtype": TEXT,
                    "shape": SHAPE,
                    "bytes": COUNT,
                    "alias_of": nullable(TEXT),
                },
                {"inside": TEXT, "stats": nullable(_STATISTICS)},
            )
        ),
        "globals": TEXTS,
        "extras": list_of(object_of({"section": TEXT, "key": TEXT})),
        "others": TEXTS,
        "flat_parameters": list_of(object_of({"section": TEXT, "key": TEXT, "unit": TEXT, "elements": COUNT})),
        "adapters": list_of(
            object_of({"section": TEXT, "kinds": TEXTS, "modules": TEXTS, "tensors": COUNT, "alone": FLAG})
        ),
        "optimizers": list_of(
            object_of(
                {
                    "section": TEXT,
                    "form": one_of(*FORMS),
                    "groups": list_of(
                        object_of({"params": list_of(either(TEXT, _NUMBER)), "names": list_of(nullable(TEXT))})
                    ),
                }
            )
        ),
        "metadata": OBJECT,
        "notes": TEXTS,
        "unreached": list_of(object_of({"path": TEXT, "bytes": COUNT, "referred": FLAG})),
    }
)
_DIFF = object_of(
    {
        "left": TEXT,
        "right": TEXT,
        "identical": FLAG,
        "summary": _COUNTS,
        "entries": ENTRIES,
        "fix": TEXTS,
        "notes": TEXTS,
    },
    {
        "exchangeable": list_of(TEXTS),
        "accepted": FLAG,
        "ignored": _COUNTS,
        "unused_ignores": TEXTS,
        "suggested": SUGGESTED,
        "ambiguous": AMBIGUOUS,
        "rules": nullable(TEXT),
    },
)
_EXPLAIN = object_of(
    {
        "name": TEXT,
        "canonical": TEXT,
        "runtime": TEXT,
        "serialized": nullable(either(TEXT, TEXTS)),
        "forms": map_of(TEXT),
        "aliases": TEXTS,
        "optimizer_id": nullable(COUNT),
        "optimizer_group": nullable(COUNT),
        "optimizer_state": TEXTS,
        "hook": nullable(HOOK),
        "dtype": TEXT,
        "shape": nullable(SHAPE),
    }
)
_WAY = one_of("model.load", "model.save")
_REMAP = object_of(
    {
        "source": TEXT,
        "output": TEXT,
        "from": nullable(TEXT),
        "to": nullable(TEXT),
        **dict.fromkeys(("renamed", "transformed", "unchanged"), COUNT),
        "sections": TEXTS,
        "dropped": TEXTS,
        "optimizer": OPTIMIZER,
        "by_code": list_of(object_of({"way": _WAY, "model": TEXT, "keys": TEXTS})),
        "notes": TEXTS,
    },
    {
        "plan": _saying(PLAN_SCHEMA, PLAN),
        "written": object_of({"way": one_of("edited", "copied", "undone"), "bytes": COUNT, "reason": nullable(TEXT)}),
        "verified": VERIFIED,
        "cost": COST,
    },
)
_SWAP = object_of(
    {
        **dict.fromkeys(("program", "weights", "output", "layout", "from"), TEXT),
        "swapped": COUNT,
        **dict.fromkeys(("kept", "constants", "ignored", "by_code"), TEXTS),
    },
    {"verified": VERIFIED, "cost": COST},
)
_ERROR = object_of(
    {
        "status": COUNT,
        "error": TEXT,
        "problems": list_of(PROBLEM),
        "hint": TEXT,
    }
)
_SET = object_of({"name": TEXT, "about": TEXT, "sizes": TEXTS})
# Name -> what the object says that it is, and all that it has besides.
OBJECTS: dict[str, tuple[str, Kind]] = {
    "inspect": (INSPECT, _INSPECT),
    "names": (NAMES_SCHEMA, NAMES),
    "diff": (DIFF, _DIFF),
    "since": (SINCE_SCHEMA, SINCE),
    "steps": (STEPS_SCHEMA, STEPS),
    "explain": (EXPLAIN, _EXPLAIN),
    "remap": (REMAP, _REMAP),
    "swap": (SWAP, _SWAP),
    "plan": (PLAN_SCHEMA, PLAN),
    "rules": (RULES, object_of({"sets": list_of(_SET)})),
    "check": (CHECK, CHECKS),
    "error": (ERROR, _ERROR),
    "manifest": (STATEMENT, MANIFEST_KIND),
}


def schema(name: str, closed: bool = False) -> dict[str, Any]:
    """The JSON Schema of an object; a `closed` one refuses members that it does not name, which later versions may add.

    Raises `CkptError` where there is no such object.
    """
    if name not in OBJECTS:
        raise CkptError(f"no such object: {name}", hint=f"the objects are {', '.join(OBJECTS)}")
    title, kind = OBJECTS[name]
    said = kind if kind is MANIFEST_KIND else _saying(title, kind)  # which says it in the words of in-toto
    made = {"$schema": DIALECT, "title": title, **said.schema(closed)}
    return {**made, "$defs": DEFINITIONS} if "#/$defs/" in repr(made) else made
