"""Files of a trainer next to the weights are compared by their bytes, or said not to be."""

from __future__ import annotations

import os
import pickle
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from command import Run, notes_in


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder as a trainer writes it, next to a copy."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    Path("a").mkdir()
    save_file(model.state_dict(), "a/model.safetensors")
    torch.save(optimizer.state_dict(), "a/optimizer.pt")
    torch.save({"last_epoch": 3}, "a/scheduler.pt")
    shutil.copytree("a", "b")
    return Path("b")


def test_equal_files_are_compared(folder: Path, run: Run) -> None:
    done = run("diff", "a", "b", "--values", "--whole", "--format", "json")
    assert (done.status, done.data["compared"]["optimizers"]) == (0, True)
    done = run("diff", "a", "b", "--format", "json")
    assert (done.status, done.data["compared"]["optimizers"]) == (0, False)


# of the Trainer, and of accelerate without FSDP
NAMES = ["optimizer.pt", "scheduler.pt", "optimizer.bin", "optimizer_1.bin", "dl_state_dict.bin"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("change", ["other", "missing"])
def test_other_files_are_not(folder: Path, name: str, change: str, run: Run) -> None:
    for side in ("a", "b"):
        if not Path(side, name).exists():
            shutil.copy(Path(side, "optimizer.pt"), Path(side, name))
    if change == "other":
        state = torch.load(folder / name)
        torch.save({**state, "more": torch.ones(1)}, folder / name)
    else:
        (folder / name).unlink()
    done = run("diff", "a", "b", "--values", "--format", "json")
    assert done.status == 0
    assert not done.data["compared"]["optimizers"]
    (note,) = notes_in(done.data)
    assert note.startswith(f"not compared: other files in the folder: {name}")
    assert run("diff", "a", "b", "--values", "--whole").status == 1
    if "ckpttool" in note:
        command = note.partition("(ckpttool ")[2].removesuffix(")")
        assert run(*shlex.split(command)).status == 1
    else:
        assert change == "missing" or name not in ("optimizer.pt", "optimizer.bin")


class Runs:
    def __reduce__(self) -> Any:
        return os.system, ("touch ran",)


@pytest.mark.parametrize("name", NAMES)
def test_code_in_a_file_of_a_trainer_is_named(folder: Path, name: str, run: Run) -> None:
    assert run("check", "b").status == 0
    torch.save({"state": {}, "param_groups": [], "more": Runs()}, folder / name)
    with pytest.raises(pickle.UnpicklingError):
        torch.load(folder / name)
    done = run("check", "b")
    assert (done.status, "system" in done.out) == (1, True)
    assert "would run code" in run("inspect", "b").out


def test_folder_of_accelerate_without_fsdp(tmp_path: Path, run: Run) -> None:
    """accelerate itself writes the folders, which differ in the optimizer only."""
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.prepare(model, optimizer)
    for name in ("a", "b"):
        accelerator.save_state(str(tmp_path / name))
        optimizer.param_groups[0]["lr"] /= 2
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    done = run("diff", tmp_path / "a", tmp_path / "b", "--values", "--whole", "--format", "json")
    assert (done.status, done.data["compared"]["optimizers"]) == (1, False)


def test_an_optimizer_in_its_own_file_keeps_dropped_parameters(folder: Path, run: Run) -> None:
    done = run("remap", "b", "--drop", "bias", "-o", "out/")
    assert done.status == 0
    assert Path("out/optimizer.pt").read_bytes() == Path("b/optimizer.pt").read_bytes()
    assert "warning: optimizer.pt is not changed: it still has the state of all" in done.err
