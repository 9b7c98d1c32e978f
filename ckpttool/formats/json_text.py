"""Strict JSON: what the reference readers of the formats accept and nothing more, with the place of every member.

Python's own reader lets duplicate keys, ``NaN``, ``-0`` as an integer and lone surrogates pass; here they are errors.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from typing import Any, NoReturn

_BLANK = " \t\n\r"


@dataclass(frozen=True, slots=True)
class Member:
    """One member of an object: its name, and where in the text the quoted name stands; its value."""

    name: str
    start: int
    end: int
    value: Any


def loads(text: str) -> Any:
    """The value of the JSON text. Raises ValueError, whatever is wrong with it."""
    try:
        value, end = _DECODER.raw_decode(text, _skip(text, 0))
    except RecursionError:
        raise ValueError("nested too deep") from None
    _at_end(text, end)
    _check_surrogates(text, value)
    return value


def members(text: str) -> list[Member]:
    """The members of the object that the JSON text is, in file order. Raises ValueError, whatever is wrong with it.

    Names that stand twice in the outermost object are left for the caller to see; inside it they are an error.
    """
    found: list[Member] = []
    at = _skip(text, _expect(text, 0, "{"))
    try:
        while text[at : at + 1] != "}":
            start = _skip(text, _expect(text, at, ",")) if found else at
            if text[start : start + 1] != '"':
                raise ValueError(f"a quoted name expected at character {start}")
            name, end = _DECODER.raw_decode(text, start)
            value, at = _DECODER.raw_decode(text, _skip(text, _expect(text, end, ":")))
            found.append(Member(name, start, end, value))
            at = _skip(text, at)
    except RecursionError:
        raise ValueError("nested too deep") from None
    _at_end(text, at + 1)
    _check_surrogates(text, [(member.name, member.value) for member in found])
    return found


def dumps(value: Any) -> str:
    """JSON without blanks and with plain UTF-8, as the reference writers spell it."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _skip(text: str, at: int) -> int:
    while text[at : at + 1] and text[at] in _BLANK:
        at += 1
    return at


def _expect(text: str, at: int, mark: str) -> int:
    at = _skip(text, at)
    if text[at : at + 1] != mark:
        raise ValueError(f"{mark!r} expected at character {at}")
    return at + 1


def _at_end(text: str, at: int) -> None:
    if text[at:].strip(_BLANK):
        raise ValueError(f"more text after the end of the JSON value at character {at}")


def _check_surrogates(text: str, value: Any) -> None:
    if "\\ud" in text or "\\uD" in text:
        json.dumps(value, ensure_ascii=False).encode()  # UnicodeEncodeError is a ValueError


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"{twice!r} stands twice in one object")
    return found


def _int(digits: str) -> int | float:
    return -0.0 if digits == "-0" else int(digits)


def _float(digits: str) -> float:
    value = float(digits)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"number out of range: {digits}")
    return value


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_int=_int, parse_float=_float, parse_constant=_no_number)
