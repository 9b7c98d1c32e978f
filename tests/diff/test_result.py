"""The words of an answer."""

from __future__ import annotations

import pytest

from ckpttool.diffing.result import with_sides


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ("only the right has it", "only NEW has it"),
        ("left: its parameters are named by the file", "OLD: its parameters are named by the file"),
        ("left's parameters are ids, right's names", "OLD's parameters are ids, NEW's names"),
        ("number 1 on the left, 2 on the right", "number 1 on OLD, 2 on NEW"),
        ("left `a.left.w` is right `right`", "OLD `a.left.w` is NEW `right`"),
        ("tree.left: 3 of 4 elements; right.w", "tree.left: 3 of 4 elements; right.w"),
        ("the hook (models/left/right.py:3), left_arm", "the hook (models/left/right.py:3), left_arm"),
    ],
)
def test_sides_are_called_otherwise_and_keys_are_not(said: str, wanted: str) -> None:
    assert with_sides(said, "OLD", "NEW") == wanted
