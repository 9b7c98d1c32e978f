"""`remap --like`: what of the other checkpoint's names is not in the output is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from command import Run

GATE = {"gate.weight": torch.ones(2), "head.weight": torch.zeros(3)}


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({}, None),
        ({"gate@1.weight": GATE["gate.weight"]}, "gate@1.weight; all are second names, which --model MODEL --to FORM"),
        ({"tied.weight": GATE["gate.weight"]}, "tied.weight; all are second names, which --model MODEL --to FORM"),
        ({"other.weight": torch.ones(5)}, "other.weight"),
    ],
    ids=["none", "variant", "tie", "other"],
)
def test_names_that_are_left_out(run: Run, tmp_path: Path, more: dict[str, Any], says: str | None) -> None:
    mine, theirs, out = (str(tmp_path / f"{name}.pt") for name in ("mine", "theirs", "out"))
    torch.save({f"module.{key}": value for key, value in GATE.items()}, mine)
    torch.save({**GATE, **more}, theirs)
    done = run("remap", mine, "--like", theirs, "-o", out)
    assert done.status == 0
    assert torch.load(out).keys() == GATE.keys()
    assert ("of the other checkpoint" in done.err) == (says is not None)
    assert (says or "") in done.err
    assert ("second names" in done.err) == ("second" in (says or ""))
    left = torch.load(theirs).keys() - torch.load(out).keys()
    assert all(key in done.err for key in left)
    assert json.loads(run("diff", out, theirs, "--format", "json").out)["identical"] == (not more)
