"""Expressions as data: JSON round trip, and invalid expressions."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ckpttool import CkptError
from ckpttool.core import expression as ex
from ckpttool.core.expression import ARGUMENT, Op, Ref, Special
from ckpttool.core.schema import check

LITERALS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3))
SPECIALS = st.builds(
    Special, st.sampled_from(["dtype", "layout", "memory_format", "device", "complex"]), st.text()
)
ARGUMENTS = st.recursive(
    st.one_of(LITERALS, st.builds(Ref, st.text()), SPECIALS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(tuple),
        st.builds(
            Op,
            st.sampled_from(["aten.cat.default", "getitem", "opaque"]),
            st.lists(inner, max_size=3).map(tuple),
            st.dictionaries(st.text(max_size=3), inner, max_size=2).map(
                lambda kwargs: tuple(kwargs.items())
            ),
        ),
    ),
    max_leaves=8,
)


def from_json(value: Any) -> ex.Argument:
    check(ARGUMENT, value, "not an expression", "write one")
    found: ex.Argument = ARGUMENT.read(value)
    return found


@given(ARGUMENTS)
@example(float("nan"))
def test_json_round_trip(argument: Any) -> None:
    text = json.dumps(ex.to_json(argument), allow_nan=False)
    assert repr(from_json(json.loads(text))) == repr(argument)  # repr: nan is not equal to itself


INVALID: dict[str, Any] = {
    "an unknown member": {"reference": "a"},
    "a ref to a number": {"ref": 1},
    "a ref with another member": {"ref": "a", "as": "b"},
    "an op without a name": {"op": None},
    "args that are not a list": {"op": "aten.t.default", "args": "a"},
    "kwargs that are not an object": {"op": "aten.t.default", "args": [], "kwargs": []},
    "an op and a ref": {"op": "aten.t.default", "ref": "a"},
    "text that is not a float": {"float": "one"},
    "a float of another type": {"float": [1]},
    "an empty object": {},
    "a set": {1},
    "a bad argument": {"op": "aten.t.default", "args": [{}]},
}


@pytest.mark.parametrize("name", INVALID)
def test_invalid_expression_is_refused(name: str) -> None:
    with pytest.raises(CkptError, match="not an expression"):
        from_json(INVALID[name])


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {"ref": "a"}
    for _ in range(depth):
        value = {"op": "aten.t.default", "args": [value], "kwargs": {}}
    return value


def test_nesting_is_bounded() -> None:
    assert list(ex.refs(from_json(nested(ex.MAX_DEPTH)))) == ["a"]
    with pytest.raises(CkptError) as refused:
        from_json(nested(ex.MAX_DEPTH + 1))
    assert "nested more than" in refused.value.problems[0].problem


NODE = Op("aten.cat.default", ((Ref("a"), Ref("b")), 0), (("out", Op("opaque", (Ref("a"),))),))


def test_refs_are_in_order_with_repeats() -> None:
    assert list(ex.refs(NODE)) == ["a", "b", "a"]


def test_opaque_is_found_at_any_depth() -> None:
    assert ex.is_opaque(NODE)
    assert not ex.is_opaque(Op("aten.cat.default", ((Ref("opaque"), "opaque"), 0)))


def test_substitution_replaces_every_ref() -> None:
    found = ex.substitute(NODE, lambda key: Ref(key.upper()))
    assert list(ex.refs(found)) == ["A", "B", "A"]
    assert isinstance(found, Op)
    assert found.args[1] == 0
