"""Reasons that one tensor has two different names."""

from __future__ import annotations

import pytest

from ckpttool.diffing.causes import segment_change, wrapper_cause
from ckpttool.diffing.result import Entry
from ckpttool.diffing.sections import hidden_segments


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("a.layer.w", "a.w", "hides the segment `layer`"),
        ("layer.a.w", "a.w", "hides the segment `layer`"),
        ("a.w", "a.layer.w", "adds the segment `layer`"),
        ("a.x.y.w", "a.w", "hides the segment `x.y`"),
        ("a.b.w", "a.c.w", "turns `b` into `c`"),
        ("a", "b", "turns `a` into `b`"),
        ("a.b.c", "a.d.e.c", "turns `b` into `d.e`"),
        ("a.a.w", "a.w", "hides the segment `a`"),  # each segment is counted once
        ("a.x.c.d", "a.c.d", "hides the segment `x`"),
        ("w", "w.w", "adds the segment `w`"),
    ],
)
def test_the_changed_segment_is_described(old: str, new: str, reason: str) -> None:
    assert segment_change(old, new) == reason


DDP, COMPILE = (
    "DistributedDataParallel or DataParallel or AveragedModel (`module`)",
    "torch.compile (`_orig_mod`)",
)


@pytest.mark.parametrize(
    ("left", "right", "reason"),
    [
        ("module.a.w", "a.w", f"left is wrapped in {DDP}"),
        ("a.w", "module.a.w", f"right is wrapped in {DDP}"),
        ("module.a.w", "_orig_mod.a.w", f"left is wrapped in {DDP}; right is wrapped in {COMPILE}"),
        ("module._orig_mod.w", "w", f"left is wrapped in {DDP} and {COMPILE}"),
        ("module.module.w", "module.w", f"left is wrapped in {DDP}"),
        ("net.w", "w", "left has the prefix `net`"),
        ("model.w", "w", "left has the prefix `model`"),
        ("module.net.w", "w", f"left is wrapped in {DDP} and has the prefix `net`"),
        ("base_model.model.w", "w", "left is wrapped in PEFT (`base_model.model`)"),
        ("module._orig_mod.w", "_orig_mod.module.w", "same wrappers in a different order"),
        ("a.w", "a.w", ""),
    ],
)
def test_wrappers_are_named(left: str, right: str, reason: str) -> None:
    assert str(wrapper_cause(left, right) or "") == reason


def test_segments_that_a_hook_may_hide_are_counted() -> None:
    """Only keys of one side count; if two segments are possible, neither is reported."""
    missing = ["a.layer.w", "b.layer.w", "c.other.w", "x.x.w", "p.q.w"]
    unexpected = ["a.w", "b.w", "c.w", "x.w", "q.w", "p.w", "d.more.z"]
    entries = [Entry("missing", (), (key,)) for key in missing] + [
        Entry("unexpected", (key,), ()) for key in unexpected
    ]
    entries += [Entry("missing", (), ("d.z",)), Entry("same", ("e.layer.w",), ("e.layer.w",))]
    segments = [
        note.partition(": a state_dict hook may hide it")[0] for note in hidden_segments(entries)
    ]
    assert segments == [
        "2 keys in left without the segment `layer` of the other side",
        "1 key in left without the segment `other` of the other side",
        "1 key in left without the segment `x` of the other side",
        "1 key in right without the segment `more` of the other side",
    ]
