"""Strict JSON, with Python's reader as the oracle; everything that only Python accepts is an
error.
"""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool import CkptError
from ckpttool.containers.strict_json import dumps, loads, quoted, read_file, value_at
from surroundings import limited

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(
    value=st.dictionaries(st.text(), VALUES),
    indent=st.sampled_from([None, 0, 2]),
    ascii_only=st.booleans(),
)
def test_output_of_python_is_read(value, indent, ascii_only):
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    assert loads(text) == value == loads(dumps(value))
    assert value_at(f"[{text}, 1]", 1) == (value, 1 + len(text))


@given(st.text())
def test_quoted_text_matches_dumps(text):
    assert quoted(text) == dumps(text)


def test_whitespace_around_a_value_is_ignored(tmp_path):
    (tmp_path / "a.json").write_text(" \t\r\n[1]\n\r\t ")
    with limited(json_bytes=11):
        assert read_file(str(tmp_path / "a.json"), "") == [1]
    with (
        limited(json_bytes=10),
        pytest.raises(CkptError, match="--max-memory 20 raises it"),
    ):
        read_file(str(tmp_path / "a.json"), "")


def test_a_duplicate_name_is_an_error():
    for text in ('{"a":1,"\\u0061":2}', '{"b":{"b":0,"a":1,"a":2}}'):
        with pytest.raises(ValueError, match="'a' is there twice"):
            loads(text)


NO_OBJECTS = [
    "",
    "{",
    "{]",
    "{,}",
    '{"a"}',
    '{"a":}',
    '{"a":1,}',
    '{"a":1 "b":2}',
    '{"a":1}}',
    "{a:1}",
    "{'a':1}",
    "\ufeff{}",
    "\x0b{}",
    "{}\xa0",
]
NO_VALUES = ["NaN", "-Infinity", "1e999", "01", "+1", '"\\ud800"', '"\n"', "[" * 99_999, "9" * 5000]


@pytest.mark.parametrize("text", [*NO_OBJECTS, *(f'{{"a":{value}}}' for value in NO_VALUES)])
def test_invalid_json_is_an_error(text):
    with pytest.raises(ValueError):  # noqa: PT011 - the kind of error is the promise
        loads(text)


def test_minus_zero_is_not_an_integer():
    assert isinstance(loads("-0"), float)
