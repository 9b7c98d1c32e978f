"""Tensors that a model saves inside of entries that are no tensors: pickled bytes, dicts. torch is the oracle."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import ckpttool
import mend_models
from command import Run

MODELS = mend_models.__file__


@pytest.mark.parametrize("build", [mend_models.Pickled, mend_models.Unread])
def test_a_buffer_in_extra_state_is_saved_where_loading_brings_it_back(build: type[mend_models.Pickled]) -> None:
    source, target = build(), build()
    source.amax.fill_(7)
    target.load_state_dict(source.state_dict(), strict=True)
    assert ("amax" in ckpttool.trace(build).not_serialized) == (not torch.equal(target.amax, source.amax))


def test_diff_says_where_it_is_saved(run: Run) -> None:
    done = run("diff", "--model", f"{MODELS}:Pickled", "--format", "json")
    (entry,) = [entry for entry in done.data["entries"] if entry["right"] == ["amax"]]
    assert (entry["status"], entry["reason"]) == ("extra_state", "saved inside an entry that is not a tensor")


def test_tensors_in_dicts_below_one_key(run: Run, tmp_path: Path) -> None:
    """Loading is torch's answer; a change of wrappers carries the entry whole; the model's own code takes it apart."""
    model, fresh = mend_models.in_a_dict(), mend_models.in_a_dict()
    path, ddp, back = (str(tmp_path / f"{name}.pt") for name in ("own", "ddp", "back"))
    words = ("--model", f"{MODELS}:in_a_dict")
    torch.save(model.state_dict(), path)
    assert run("diff", *words, path).status == 0
    assert run("remap", path, *words, "--to", "ddp", "-o", ddp).status == 0
    nn.ModuleDict({"module": fresh}).load_state_dict(torch.load(ddp), strict=True)
    assert all(map(torch.equal, fresh.parameters(), model.parameters()))
    assert run("diff", *words, ddp).status == 1
    assert run("remap", ddp, *words, "--to", "serialized", "-o", back).status == 0
    again = mend_models.in_a_dict()
    again.load_state_dict(torch.load(back), strict=True)
    assert all(map(torch.equal, again.parameters(), model.parameters()))
    apart = run("remap", path, *words, "--to", "runtime", "-o", str(tmp_path / "apart.pt"))
    assert apart.status == 0
    assert "by running" in apart.out
    have = torch.load(tmp_path / "apart.pt")
    assert have.keys() == {"0.params", *dict(model.named_parameters())}  # the entry itself is no tensor, and is carried
    assert all(torch.equal(have[name], value) for name, value in model.named_parameters())
    assert run("remap", tmp_path / "apart.pt", *words, "--to", "serialized", "-o", tmp_path / "whole.pt").status == 0
    last = mend_models.in_a_dict()
    last.load_state_dict(torch.load(tmp_path / "whole.pt"), strict=True)
    assert all(map(torch.equal, last.parameters(), model.parameters()))
    alone = {e["right"][0]: e for e in run("diff", *words, "--format", "json").data["entries"] if e["right"]}
    assert alone["0.weight"]["reason"] == "saved inside an entry that is not a tensor"
    assert alone["0.weight"]["status"] == "missing"
