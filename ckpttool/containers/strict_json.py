"""Strict JSON: accept what the reference readers accept, and nothing more."""

from __future__ import annotations

import json
from collections import Counter
from operator import itemgetter
from typing import Any, NoReturn

from ckpttool.core.errors import CkptError
from ckpttool.core.limits import limits
from ckpttool.io.files import opened

_BLANKS = " \t\n\r"


def read_file(path: str, hint: str) -> Any:
    """Return the JSON value in the file. Raises `CkptError` with `hint` if it is not JSON."""
    value, _ = read_value_and_text(path, hint)
    return value


def read_value_and_text(path: str, hint: str) -> tuple[Any, bytes]:
    """Return the JSON value in the file, and its bytes. Raises as `read_file`."""
    most = limits().json_bytes
    with opened(path, pipes=True) as file:
        data = file.read(most + 1)
    try:
        if len(data) > most:
            raise ValueError(f"it is longer: {limits().named('json_bytes')}")
        return loads(data.decode("utf-8-sig"), surrogates=True), data
    except ValueError as error:
        raise CkptError(f"{path} is not JSON: {error}", hint=hint) from None


def loads(text: str, *, surrogates: bool = False) -> Any:
    """Return the value of the JSON text. Raises ValueError, whatever is wrong with it.

    With `surrogates` strings may hold lone surrogates, as keys of a pickle may.
    """
    # reading integers in Python is half of the time
    decoder = _DECODER if "-0" in text else _PLAIN_DECODER
    value, end = _value(text, len(text) - len(text.lstrip(_BLANKS)), decoder)
    if text[end:].strip(_BLANKS):
        raise ValueError(f"more text after the end of the JSON value at character {end}")
    if not surrogates:
        _check_surrogates(text, value)
    return value


def value_at(text: str, at: int) -> tuple[Any, int]:
    """Return the value that begins at character `at` of the text, and its end. Raises ValueError as
    `loads` does.
    """
    value, end = _value(text, at, _DECODER)
    _check_surrogates(text[at:end], value)
    return value, end


def _value(text: str, at: int, decoder: json.JSONDecoder) -> tuple[Any, int]:
    try:
        return decoder.raw_decode(text, at)
    except RecursionError:
        raise ValueError("nested too deep") from None


def dumps(value: Any) -> str:
    """Return JSON without blanks and with plain UTF-8, as the reference writers spell it."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def quoted(text: str) -> str:
    """Return the text as a string of JSON, as `dumps` spells it, but without an encoder for each
    call.
    """
    return json.encoder.encode_basestring(text)


def _check_surrogates(text: str, value: Any) -> None:
    if "\\ud" in text or "\\uD" in text:
        json.dumps(value, ensure_ascii=False).encode()  # UnicodeEncodeError is a ValueError


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        twice = next(
            name for name, count in Counter(map(itemgetter(0), pairs)).items() if count > 1
        )
        raise ValueError(f"{twice!r} is there twice in one object")
    return value


def _int(digits: str) -> int | float:
    return -0.0 if digits == "-0" else int(digits)


def _float(digits: str) -> float:
    value = float(digits)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"number out of range: {digits}")
    return value


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(
    object_pairs_hook=_unique, parse_int=_int, parse_float=_float, parse_constant=_no_number
)
_PLAIN_DECODER = json.JSONDecoder(
    object_pairs_hook=_unique, parse_float=_float, parse_constant=_no_number
)
