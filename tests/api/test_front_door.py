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


def test_a_call_writes_over_what_earlier_calls_have_read_and_over_nothing_that_it_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process of the library lives on: what it looked at once is no source of all that follows."""
    monkeypatch.chdir(tmp_path)
    for name, value in (("a.pt", 1.0), ("b.pt", 2.0)):
        torch.save({"weight": torch.full((1, 1), value)}, name)
    ckpttool.inspect("a.pt", stats=True)
    held = ckpttool.open_checkpoint("a.pt")
    calls: list[tuple[Any, str, dict[str, Any]]] = [
        ("a.pt", "a.pt", {}),
        (held, "a.pt", {}),
        ("b.pt", "a.pt", {"like": "a.pt"}),
    ]
    for ckpt, out, options in calls:
        before = Path(out).read_bytes()
        with pytest.raises(CkptError, match="the source itself"):
            ckpttool.remap(ckpt, out, force=True, **options)
        assert Path(out).read_bytes() == before
    ckpttool.remap("b.pt", "a.pt", force=True)
    assert torch.load("a.pt")["weight"].item() == 2
    with pytest.raises(CkptError, match="no longer the file that was opened"):
        ckpttool.write(held, "c.pt")
    assert not Path("c.pt").exists()
