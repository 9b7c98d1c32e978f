"""Validate every JSON object that a test sees against its schema, with unknown members
forbidden.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from jsonschema import Draft202012Validator

from ckpttool.schemas import OBJECTS, schema

NAMES = {kind.title: name for name, kind in OBJECTS.items()}


@cache
def validator(name: str) -> Any:
    Draft202012Validator.check_schema(schema(name))
    return Draft202012Validator(schema(name, closed=True))


def check(data: Any) -> str:
    """Validate the object, by the schema and by the reader's own rules, and return its name."""
    name = NAMES[data.get("schema", data.get("_type"))]
    problems = [
        f"{error.json_path}: {error.message:.200}" for error in validator(name).iter_errors(data)
    ]
    problems += map(str, OBJECTS[name].problems(data, None))
    assert not problems, problems
    return name
