"""Modules that have different versions in two files."""

from __future__ import annotations

from ckpttool.core.checkpoint import Section
from ckpttool.naming.convert import otherwise


def test_versions_of_shared_modules_are_compared() -> None:
    left = Section(
        "", "state_dict", (), modules={"": {"version": 2}, "a": {"version": 1}, "b": {}, "c": {"version": 1}}
    )
    right = Section("", "state_dict", (), modules={"": {"version": 1}, "a": {"version": 1}, "b": {"version": 1}})
    assert otherwise(left, right) == ["(root)", "b"]
    assert otherwise(right, left) == ["(root)", "b"]
    assert otherwise(left, Section("", "state_dict", ())) == otherwise(Section("", "state_dict", ()), left) == []
