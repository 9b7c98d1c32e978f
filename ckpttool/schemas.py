"""A JSON Schema (2020-12) for every object that is written, by its name.

What is read again (names files, plans, manifests) is described where it is read; the rest here, member by member.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpttool.checks import SCHEMA as CHECK
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
    SHAPE,
    TEXT,
    TEXTS,
    AnyKind,
    Either,
    Kind,
    ListOf,
    MapOf,
    Nullable,
    ObjectOf,
    one_of,
)
from ckpttool.names import HOOK, NAMES
from ckpttool.names import SCHEMA as NAMES_SCHEMA
from ckpttool.optimizer_state import FORMS
from ckpttool.plan import PLAN
from ckpttool.plan import SCHEMA as PLAN_SCHEMA
from ckpttool.queries.diff.result import SCHEMA as DIFF
from ckpttool.queries.diff.result import STATUSES
from ckpttool.queries.diff.since import BY
from ckpttool.queries.diff.since import CHANGES as SINCE_STATUSES
from ckpttool.queries.diff.since import SCHEMA as SINCE
from ckpttool.queries.diff.steps import CHANGES as STEP_STATUSES
from ckpttool.queries.diff.steps import KINDS as STEP_KINDS
from ckpttool.queries.diff.steps import SCHEMA as STEPS
from ckpttool.queries.explanation import SCHEMA as EXPLAIN
from ckpttool.queries.inspection import SCHEMA as INSPECT

DIALECT = "https://json-schema.org/draft/2020-12/schema"
ERROR = "ckpttool.error/1"
_NUMBER = Kind("a number", lambda value: isinstance(value, (int, float)), {"type": "number"})
_ANY_SHAPE = Nullable(SHAPE)
_COUNTS = ObjectOf({}, dict.fromkeys(STATUSES, COUNT))
_STATISTICS = ObjectOf(
    {
        **dict.fromkeys(("min", "max", "mean"), Nullable(_NUMBER)),
        **dict.fromkeys(("zeros", "nan", "inf"), Nullable(COUNT)),
        "sha256": TEXT,
    }
)
_STATUS = one_of(*STATUSES)
_INSPECT: Mapping[str, AnyKind] = {
    "source": TEXT,
    "format": TEXT,
    "bytes": COUNT,
    "sections": ListOf(
        ObjectOf(
            {
                "path": TEXT,
                "kind": one_of("state_dict", "optimizer", "other"),
                "tensors": COUNT,
                "bytes": COUNT,
                "wrappers": TEXTS,
            }
        )
    ),
    "tensors": ListOf(
        ObjectOf(
            {
                "section": TEXT,
                "key": TEXT,
                "dtype": TEXT,
                "shape": SHAPE,
                "bytes": COUNT,
                "alias_of": Nullable(TEXT),
            },
            {"inside": TEXT, "stats": Nullable(_STATISTICS)},
        )
    ),
    "globals": TEXTS,
    "extras": ListOf(ObjectOf({"section": TEXT, "key": TEXT})),
    "others": TEXTS,
    "flat_parameters": ListOf(ObjectOf({"section": TEXT, "key": TEXT, "unit": TEXT, "elements": COUNT})),
    "adapters": ListOf(ObjectOf({"section": TEXT, "kinds": TEXTS, "modules": TEXTS, "tensors": COUNT, "alone": FLAG})),
    "optimizers": ListOf(
        ObjectOf(
            {
                "section": TEXT,
                "form": one_of(*FORMS),
                "groups": ListOf(ObjectOf({"params": ListOf(Either(TEXT, _NUMBER)), "names": ListOf(Nullable(TEXT))})),
            }
        )
    ),
    "metadata": OBJECT,
    "notes": TEXTS,
    "unreached": ListOf(ObjectOf({"path": TEXT, "bytes": COUNT, "referred": FLAG})),
}
_SPREAD = ListOf(ObjectOf({"exponent": _NUMBER, "elements": COUNT}))
_PAIR: Mapping[str, AnyKind] = {"left": TEXTS, "right": TEXTS}
_DIFF = ObjectOf(
    {
        "schema": one_of(DIFF),
        "left": TEXT,
        "right": TEXT,
        "identical": FLAG,
        "summary": _COUNTS,
        "entries": ListOf(
            ObjectOf(
                {"status": _STATUS, **_PAIR, "reason": TEXT},
                {"hook": HOOK, "detail": TEXT, "spread": _SPREAD, "ignored": TEXT},
            )
        ),
        "fix": TEXTS,
        "notes": TEXTS,
    },
    {
        "exchangeable": ListOf(TEXTS),
        "accepted": FLAG,
        "ignored": _COUNTS,
        "unused_ignores": TEXTS,
        "suggested": ListOf(ObjectOf({**_PAIR, "evidence": TEXT, "transposed": Nullable(one_of("left", "right"))})),
        "ambiguous": ListOf(ObjectOf({**_PAIR, "reason": TEXT})),
        "rules": Nullable(TEXT),
    },
)
_CHANGE = Nullable(ObjectOf({"status": one_of(*STATUSES, *SINCE_STATUSES.values()), "keys": TEXTS, "reason": TEXT}))
_SINCE: Mapping[str, AnyKind] = {
    **dict.fromkeys(("base", "left", "right"), TEXT),
    "conflicts": FLAG,
    "summary": ObjectOf({}, dict.fromkeys(BY, COUNT)),
    "entries": ListOf(ObjectOf({"by": one_of(*BY), "base": TEXTS, "left": _CHANGE, "right": _CHANGE})),
    "notes": TEXTS,
}
_STEP: Mapping[str, AnyKind] = {
    "source": TEXT,
    **dict.fromkeys(("since", "error"), Nullable(TEXT)),
    "tensors": COUNT,
    "changes": ListOf(
        ObjectOf(
            {
                "section": TEXT,
                "status": one_of(*STATUSES, *STEP_STATUSES.values(), *STEP_KINDS),
                **dict.fromkeys(("before", "after"), TEXTS),
                "reason": TEXT,
            },
            {"detail": TEXT},
        )
    ),
    "suggested": ListOf(ObjectOf({**dict.fromkeys(("before", "after"), TEXTS), "evidence": TEXT})),
}
_STEPS: Mapping[str, AnyKind] = {
    "run": Nullable(TEXT),
    "identical": FLAG,
    "steps": ListOf(ObjectOf(_STEP)),
    "notes": TEXTS,
}
_EXPLAIN: Mapping[str, AnyKind] = {
    "name": TEXT,
    "canonical": TEXT,
    "runtime": TEXT,
    "serialized": Nullable(Either(TEXT, TEXTS)),
    "forms": MapOf(TEXT),
    "aliases": TEXTS,
    "optimizer_id": Nullable(COUNT),
    "optimizer_group": Nullable(COUNT),
    "optimizer_state": TEXTS,
    "hook": Nullable(HOOK),
    "dtype": TEXT,
    "shape": _ANY_SHAPE,
}
_FORM = one_of(*FORMS)
_SECTION = ObjectOf(
    {
        "section": TEXT,
        "from": _FORM,
        "to": _FORM,
        "params": COUNT,
        "evidence": Nullable(TEXT),
        "new": TEXTS,
        "dropped": TEXTS,
    }
)
_PLAN = ObjectOf({"schema": one_of(PLAN_SCHEMA), **PLAN.needs}, PLAN.may)
_WAY = one_of("model.load", "model.save")
_REMAP = ObjectOf(
    {
        "schema": one_of(REMAP),
        "source": TEXT,
        "output": TEXT,
        "from": Nullable(TEXT),
        "to": Nullable(TEXT),
        **dict.fromkeys(("renamed", "transformed", "unchanged"), COUNT),
        "sections": TEXTS,
        "dropped": TEXTS,
        "optimizer": Nullable(ObjectOf({"from": _FORM, "to": _FORM, "params": COUNT, "sections": ListOf(_SECTION)})),
        "by_code": ListOf(ObjectOf({"way": _WAY, "model": TEXT, "keys": TEXTS})),
        "notes": TEXTS,
    },
    {
        "plan": _PLAN,
        "written": ObjectOf({"way": one_of("edited", "copied", "undone"), "bytes": COUNT, "reason": Nullable(TEXT)}),
    },
)
_SWAP: Mapping[str, AnyKind] = {
    **dict.fromkeys(("program", "weights", "output", "layout", "from"), TEXT),
    "swapped": COUNT,
    **dict.fromkeys(("kept", "constants", "ignored", "by_code"), TEXTS),
}
_ERROR: Mapping[str, AnyKind] = {
    "status": COUNT,
    "error": TEXT,
    "problems": ListOf(ObjectOf({"problem": TEXT, "key": TEXT})),
    "hint": TEXT,
}
_PROBLEMS = ListOf(ObjectOf({"problem": TEXT, "key": TEXT}))
_CHECK: Mapping[str, AnyKind] = {
    "ok": FLAG,
    "files": ListOf(
        ObjectOf({"path": TEXT, "kind": TEXT, "problems": _PROBLEMS, "hint": Nullable(TEXT), "notes": TEXTS})
    ),
}
_SET: Mapping[str, AnyKind] = {"name": TEXT, "about": TEXT, "sizes": TEXTS}
# Name -> what the object says that it is, and all that it has.
OBJECTS: dict[str, tuple[str, AnyKind]] = {
    "inspect": (INSPECT, ObjectOf({"schema": one_of(INSPECT), **_INSPECT})),
    "names": (NAMES_SCHEMA, ObjectOf({"schema": one_of(NAMES_SCHEMA), **NAMES.needs}, NAMES.may)),
    "diff": (DIFF, _DIFF),
    "since": (SINCE, ObjectOf({"schema": one_of(SINCE), **_SINCE})),
    "steps": (STEPS, ObjectOf({"schema": one_of(STEPS), **_STEPS})),
    "explain": (EXPLAIN, ObjectOf({"schema": one_of(EXPLAIN), **_EXPLAIN})),
    "remap": (REMAP, _REMAP),
    "swap": (SWAP, ObjectOf({"schema": one_of(SWAP), **_SWAP})),
    "plan": (PLAN_SCHEMA, _PLAN),
    "rules": (RULES, ObjectOf({"schema": one_of(RULES), "sets": ListOf(ObjectOf(_SET))})),
    "check": (CHECK, ObjectOf({"schema": one_of(CHECK), **_CHECK})),
    "error": (ERROR, ObjectOf({"schema": one_of(ERROR), **_ERROR})),
    "manifest": (STATEMENT, MANIFEST_KIND),
}


def schema(name: str, closed: bool = False) -> dict[str, Any]:
    """The JSON Schema of an object; a `closed` one refuses members that it does not name, which later versions may add.

    Raises `CkptError` where there is no such object.
    """
    if name not in OBJECTS:
        raise CkptError(f"no such object: {name}", hint=f"the objects are {', '.join(OBJECTS)}")
    title, kind = OBJECTS[name]
    made = {"$schema": DIALECT, "title": title, **kind.schema(closed)}
    return {**made, "$defs": DEFINITIONS} if "#/$defs/" in repr(made) else made
