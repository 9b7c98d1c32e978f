"""`remap --like`: what of the other checkpoint has no place is said, and what has one stays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpttool
from ckpttool.core.errors import CkptError
from ckpttool.formats.detect_folder import open_checkpoint
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


@pytest.mark.parametrize("way", ["like", "to", "neither"])
def test_the_counter_of_an_average_stays_where_the_names_have_a_place_for_it(way: str, tmp_path: Path) -> None:
    """Also where the names go through a model, which has none; one that is made anew would begin at 1."""
    averaged = torch.optim.swa_utils.AveragedModel(nn.Linear(2, 2))
    for _ in range(3):
        averaged.update_parameters(nn.Linear(2, 2))
    source, out = str(tmp_path / "averaged.pt"), str(tmp_path / "out.pt")
    torch.save(averaged.state_dict(), source)
    options: dict[str, Any] = {"like": {"like": source}, "to": {"to": "averaged"}, "neither": {"to": "serialized"}}[way]
    done = ckpttool.remap(source, out, model=lambda: nn.Linear(2, 2), **options)
    found = torch.load(out)
    if way == "neither":
        nn.Linear(2, 2).load_state_dict(found)
        assert done.dropped == ["n_averaged"]
    else:
        torch.optim.swa_utils.AveragedModel(nn.Linear(2, 2)).load_state_dict(found)
        assert (found["n_averaged"].item(), done.dropped) == (3, [])


def test_what_is_open_already_is_taken_over_and_not_written_over(tmp_path: Path) -> None:
    mine, theirs, out = (str(tmp_path / f"{name}.pt") for name in ("mine", "theirs", "out"))
    torch.save(GATE, mine)
    torch.save({f"module.{key}": value for key, value in GATE.items()}, theirs)
    like = open_checkpoint(theirs)
    with pytest.raises(CkptError, match="is the source itself"):
        ckpttool.remap(mine, theirs, like=like, force=True)
    assert ckpttool.remap(mine, out, like=like).counts["renamed"] == 2
    assert torch.load(out).keys() == torch.load(theirs).keys()


def test_nothing_in_common_with_what_is_empty(tmp_path: Path) -> None:
    torch.save(GATE, tmp_path / "mine.pt")
    torch.save(nn.Module().state_dict(), tmp_path / "empty.pt")
    with pytest.raises(CkptError, match="no name in common"):
        ckpttool.remap(str(tmp_path / "mine.pt"), str(tmp_path / "out.pt"), like=str(tmp_path / "empty.pt"))
