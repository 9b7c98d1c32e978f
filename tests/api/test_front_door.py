"""The verbs as functions: what they are given is a text or in memory, and nothing that is asked is left undone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

import ckpttool
from ckpttool import CkptError

STATE = {"weight": torch.ones(1, 1)}


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda path: ckpttool.inspect(path), "a PosixPath is no checkpoint"),
        (lambda path: ckpttool.diff(STATE, path), "a PosixPath is no checkpoint"),
        (lambda path: ckpttool.remap(cast(Any, [STATE])), "a list is no checkpoint"),
        (lambda path: ckpttool.trace(3), "an int is no model"),
        (
            lambda path: ckpttool.swap_weights(nn.Linear(1, 1, bias=False), STATE, str(path)),
            "a Linear is in memory: the swap writes no out.pt",
        ),
    ],
)
def test_what_cannot_be_done_is_said(call: Callable[[Any], object], says: str) -> None:
    with pytest.raises(CkptError) as raised:
        call(Path("out.pt"))
    assert raised.value.message == says
    assert not Path("out.pt").exists()
