"""A diff names what would run code, even if the weights fit. Oracle: torch's own unpickler."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from command import Run

MODEL = "torch.nn:Linear(in_features=2, out_features=3)"


class Runs:
    def __reduce__(self) -> Any:
        return os.system, ("touch ran",)


@pytest.mark.parametrize("is_left", [True, False])
def test_a_file_that_fits_and_runs_code(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_left: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    state = nn.Linear(2, 3).state_dict()
    torch.save({"model": state, "hook": Runs()}, "runs.pt")
    torch.save({"model": state}, "plain.pt")
    with pytest.raises(pickle.UnpicklingError):
        torch.load("runs.pt")
    text = "runs.pt has 1 dangerous import, executed if it is loaded with weights_only=False:"
    sides = ("runs.pt", "plain.pt") if is_left else ("plain.pt", "runs.pt")
    done = run("diff", *sides)
    assert text in done.out + done.err
    loads = run("diff", sides[0], "--model", MODEL)
    assert loads.status == 0
    assert (text in loads.out + loads.err) is is_left
    assert not Path("ran").exists()
