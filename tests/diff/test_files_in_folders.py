"""Files of a trainer next to the weights are compared by their bytes, or said not to be."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

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


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt"])
@pytest.mark.parametrize("change", ["other", "missing"])
def test_other_files_are_not(folder: Path, name: str, change: str, run: Run) -> None:
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
        assert (name, change) != ("optimizer.pt", "other")


def test_an_optimizer_in_its_own_file_keeps_dropped_parameters(folder: Path, run: Run) -> None:
    done = run("remap", "b", "--drop", "bias", "-o", "out/")
    assert done.status == 0
    assert Path("out/optimizer.pt").read_bytes() == Path("b/optimizer.pt").read_bytes()
    assert "warning: optimizer.pt is not changed: it still has the state of all" in done.err
