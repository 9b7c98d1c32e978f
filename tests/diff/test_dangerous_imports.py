"""A diff names what would run code, even if the weights fit. Oracle: torch's own unpickler."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
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


# In folders whose checkpoint is in another file: of transformers, of Megatron-Core
UNREAD = ["pytorch_model.bin", "pytorch_model-00001-of-00001.bin", "tokens.pickle", "common.pt"]


@pytest.mark.parametrize("name", UNREAD)
def test_a_file_of_the_folder_that_is_not_read(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    state = nn.Linear(2, 3).state_dict()
    if name == "common.pt":
        dcp.save(state, checkpoint_id="model", no_dist=True)
    else:
        Path("model").mkdir()
        save_file(state, "model/model.safetensors")
        Path("model/config.json").write_text("{}")
    torch.save(state, f"model/{name}")
    assert run("check", "model").status == 0
    torch.save({**state, "more": Runs()}, f"model/{name}")
    with pytest.raises(pickle.UnpicklingError):
        torch.load(f"model/{name}")
    done = run("check", "model")
    assert (done.status, f"model/{name}" in done.out) == (1, True)
    assert "would run code" in run("inspect", "model").out.splitlines()[0]
    assert not Path("ran").exists()


def test_other_data_with_the_ending_bin_is_not_read(run: Run, tmp_path: Path) -> None:
    save_file(nn.Linear(2, 3).state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "ggml.bin").write_bytes(b"lmgg" + bytes(40))
    (tmp_path / "links.bin").mkdir()
    assert run("check", tmp_path).status == 0
