"""Validate every JSON object that a test sees against its schema, with unknown members
forbidden.
"""

from __future__ import annotations

import json
from contextlib import redirect_stdout
from functools import cache
from io import StringIO
from typing import Any

from jsonschema import Draft202012Validator

from command import main


def printed(*words: str) -> str:
    """Return what ``ckpttool schema`` prints."""
    with redirect_stdout(StringIO()) as out:
        assert main(["schema", *words]) == 0
    return out.getvalue()


NAMES = {title: name for name, title in map(str.split, printed().splitlines())}


@cache
def validator(name: str) -> Any:
    schema = json.loads(printed(name))
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(closed(schema))


def closed(schema: Any) -> Any:
    """Return the schema without members that it does not name, which later versions may add."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    result = {key: closed(part) for key, part in schema.items()}
    if "properties" in schema and schema.get("type") == "object":
        result.setdefault("additionalProperties", False)
    return result


def check(data: Any) -> str:
    """Validate the object and return its name."""
    name = NAMES[data.get("schema", data.get("_type"))]
    problems = [
        f"{error.json_path}: {error.message:.200}" for error in validator(name).iter_errors(data)
    ]
    assert not problems, problems
    return name
