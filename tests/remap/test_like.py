"""`remap --like`: names of the other checkpoint that cannot be matched are reported, and metadata
is kept.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpttool
from ckpttool import CkptError, open_checkpoint
from command import Run

GATE = {"gate.weight": torch.ones(2), "head.weight": torch.zeros(3)}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({}, None),
        (
            {"gate@1.weight": GATE["gate.weight"]},
            "gate@1.weight; all are second names, which --model MODEL --to FORM",
        ),
        (
            {"tied.weight": GATE["gate.weight"]},
            "tied.weight; all are second names, which --model MODEL --to FORM",
        ),
        ({"other.weight": torch.ones(5)}, "other.weight"),
    ],
    ids=["none", "variant", "tie", "other"],
)
def test_unmatched_names_are_reported(
    run: Run, tmp_path: Path, more: dict[str, Any], message: str | None
) -> None:
    source, other, out = (str(tmp_path / f"{name}.pt") for name in ("source", "other", "out"))
    torch.save({f"module.{key}": value for key, value in GATE.items()}, source)
    torch.save({**GATE, **more}, other)
    done = run("remap", source, "--like", other, "-o", out)
    assert done.status == 0
    assert torch.load(out).keys() == GATE.keys()
    assert ("of the other checkpoint" in done.err) == (message is not None)
    assert (message or "") in done.err
    assert ("second names" in done.err) == ("second" in (message or ""))
    left = torch.load(other).keys() - torch.load(out).keys()
    assert all(key in done.err for key in left)
    assert json.loads(run("diff", out, other, "--format", "json").out)["identical"] == (not more)


@pytest.mark.parametrize("way", ["like", "to", "neither"])
def test_averaging_counter_is_kept_if_the_target_form_has_one(way: str, tmp_path: Path) -> None:
    """The counter's value is kept even if the model, which has no counter, is used; a new counter
    would start at 1.
    """
    averaged = torch.optim.swa_utils.AveragedModel(nn.Linear(2, 2))
    for _ in range(3):
        averaged.update_parameters(nn.Linear(2, 2))
    source, out = str(tmp_path / "averaged.pt"), str(tmp_path / "out.pt")
    torch.save(averaged.state_dict(), source)
    options: dict[str, Any] = {
        "like": {"like": source},
        "to": {"to": "averaged"},
        "neither": {"to": "serialized"},
    }[way]
    done = ckpttool.remap(source, out, model=lambda: nn.Linear(2, 2), **options)
    found = torch.load(out)
    if way == "neither":
        nn.Linear(2, 2).load_state_dict(found)
        assert done.dropped == ["n_averaged"]
    else:
        torch.optim.swa_utils.AveragedModel(nn.Linear(2, 2)).load_state_dict(found)
        assert (found["n_averaged"].item(), done.dropped) == (3, [])


def test_like_accepts_an_open_checkpoint_and_does_not_overwrite_it(tmp_path: Path) -> None:
    source, other, out = (str(tmp_path / f"{name}.pt") for name in ("source", "other", "out"))
    torch.save(GATE, source)
    torch.save({f"module.{key}": value for key, value in GATE.items()}, other)
    like = open_checkpoint(other)
    with pytest.raises(CkptError, match="is the source itself"):
        ckpttool.remap(source, other, like=like, force=True)
    assert ckpttool.remap(source, out, like=like).counts["renamed"] == 2
    assert torch.load(out).keys() == torch.load(other).keys()


def test_empty_checkpoint_has_no_key_in_common(tmp_path: Path) -> None:
    torch.save(GATE, tmp_path / "source.pt")
    torch.save(nn.Module().state_dict(), tmp_path / "empty.pt")
    with pytest.raises(CkptError, match="no key in common"):
        ckpttool.remap(
            str(tmp_path / "source.pt"), str(tmp_path / "out.pt"), like=str(tmp_path / "empty.pt")
        )
