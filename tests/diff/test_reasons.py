"""Reasons that one tensor has two different names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import ckpttool


def renaming_model(old: str, new: str) -> nn.Module:
    """Return a model with the parameter `old`, which a hook saves under the key `new`."""
    *modules, name = old.split(".")
    model = inner = nn.Module()
    for segment in modules:
        inner.add_module(segment, nn.Module())
        inner = inner.get_submodule(segment)
    inner.register_parameter(name, nn.Parameter(torch.ones(2)))

    def rename(_: nn.Module, state: dict[str, Any], *__: Any) -> None:
        state[new] = state.pop(old)

    model._register_state_dict_hook(rename)
    return model


@pytest.mark.parametrize(
    ("fqn", "key", "reason"),
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
def test_diff_names_the_segment_that_a_hook_changes(fqn: str, key: str, reason: str) -> None:
    diff = ckpttool.diff(model=renaming_model(fqn, key))
    (entry,) = diff.entries
    assert (entry.status, entry.left, entry.right) == ("renamed", (key,), (fqn,))
    assert reason in entry.reason


DDP = "DistributedDataParallel or DataParallel or AveragedModel (`module`)"
COMPILE = "torch.compile (`_orig_mod`)"


@pytest.mark.parametrize(
    ("left", "right", "reason"),
    [
        ("module.a.w", "a.w", f"left is wrapped in {DDP}"),
        ("a.w", "module.a.w", f"right is wrapped in {DDP}"),
        ("module.a.w", "_orig_mod.a.w", f"left is wrapped in {DDP}; right is wrapped in {COMPILE}"),
        ("module._orig_mod.w", "w", f"left is wrapped in {DDP} and {COMPILE}"),
        ("module.module.w", "module.w", f"left is wrapped in {DDP}"),
        ("module.module._orig_mod.w", "_orig_mod.module.w", f"left is wrapped in {DDP}"),
        ("net.w", "w", "left has the prefix `net`"),
        ("model.w", "w", "left has the prefix `model`"),
        ("base_model.model.w", "w", "left is wrapped in PEFT (`base_model.model`)"),
        ("module._orig_mod.w", "_orig_mod.module.w", "same wrappers in a different order"),
    ],
)
def test_diff_names_the_wrappers_of_a_side(left: str, right: str, reason: str) -> None:
    diff = ckpttool.diff({left: torch.ones(2)}, {right: torch.ones(2)})
    (entry,) = diff.entries
    assert (entry.status, entry.left, entry.right) == ("renamed", (left,), (right,))
    assert entry.reason == reason


def test_diff_counts_the_segments_that_a_hook_may_hide() -> None:
    """Only keys of one side count; if two segments are possible, neither is reported."""
    left = ["a.w", "b.w", "c.w", "x.w", "q.w", "p.w", "d.more.z", "e.layer.w"]
    right = ["a.layer.w", "b.layer.w", "c.other.w", "x.x.w", "p.q.w", "d.z", "e.layer.w"]
    diff = ckpttool.diff(
        {key: torch.ones(2) for key in left}, {key: torch.ones(2) for key in right}
    )
    hint = ": a state_dict hook may hide it (pass --model to know)"
    assert [note.removesuffix(hint) for note in diff.notes if note.endswith(hint)] == [
        "2 keys in left without the segment `layer` of the other side",
        "1 key in left without the segment `other` of the other side",
        "1 key in left without the segment `x` of the other side",
        "1 key in right without the segment `more` of the other side",
    ]
