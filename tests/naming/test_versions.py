"""Which modules two files have in other versions."""

from __future__ import annotations

from ckpttool.core.checkpoint import Section
from ckpttool.naming.convert import otherwise


def test_versions_of_shared_modules_are_compared() -> None:
    one = Section("", "state_dict", (), modules={"": {"version": 2}, "a": {"version": 1}, "b": {}, "c": {"version": 1}})
    other = Section("", "state_dict", (), modules={"": {"version": 1}, "a": {"version": 1}, "b": {"version": 1}})
    assert otherwise(one, other) == ["(root)", "b"]
    assert otherwise(other, one) == ["(root)", "b"]
    assert otherwise(one, Section("", "state_dict", ())) == otherwise(Section("", "state_dict", ()), one) == []
