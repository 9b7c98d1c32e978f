"""Folders with the files of several ranks under names that many scripts use: the error names a path
that can be read. Oracle: the tensors before they were cut.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from command import Run, fixes_in

MODEL = """
from torch import nn
def net():
    return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
"""


def part(state: dict[str, Any], rank: int) -> dict[str, Any]:
    return {
        "0.weight": state["0.weight"].chunk(2, 0)[rank].clone(),
        "0.bias": state["0.bias"].chunk(2, 0)[rank].clone(),
        "1.weight": state["1.weight"].chunk(2, 1)[rank].clone(),
        "1.bias": state["1.bias"].clone(),
    }


# where each rank's file is, and what is around the part
FILES: dict[str, tuple[str, dict[str, Any] | None]] = {
    "Megatron-LM": ("iter_0000100/mp_rank_{:02}/model_optim_rng.pt", {"iteration": 100}),
    "stages": ("iter_0000100/mp_rank_{:02}_000/model_optim_rng.pt", {"checkpoint_version": 3.0}),
    "rank": ("rank_{}.pt", None),
    "tensor-parallel": ("pytorch_model-tp{}.bin", None),
    "of": ("model-rank{}-of-2.pt", None),
}


@pytest.mark.parametrize("name", FILES)
def test_the_error_names_the_files_of_all_ranks(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(MODEL)
    state = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8)).state_dict()
    place, around = FILES[name]
    for rank in range(2):
        file = tmp_path / "run" / place.format(rank)
        file.parent.mkdir(parents=True, exist_ok=True)
        cut = part(state, rank)
        torch.save(cut if around is None else {**around, "model": cut}, file)
    folder = "run/iter_0000100" if "/" in place else "run"
    refused = run("inspect", folder)
    assert refused.status == 2
    (pattern,) = re.findall(r"(?:all|together|pipeline): (\S+)$", refused.err.strip())
    done = run("diff", *shlex.split(pattern), "--model", "model.py:net", "--format", "json")
    assert done.status == 1
    (line,) = fixes_in(done.data)
    assert run(*shlex.split(line)[1:]).status == 0
    out = shlex.split(line)[-1]
    loaded = torch.load(out)
    loaded = loaded if around is None else loaded.get("model", loaded)
    assert all(torch.equal(loaded[key], state[key]) for key in state)
    assert (
        run("fix", *shlex.split(pattern), "--model", "model.py:net", "-o", "fixed.pt").status == 0
    )
    assert run("diff", "fixed.pt", "--model", "model.py:net").status == 0


@pytest.mark.parametrize("names", [("step_0.pt", "step_1.pt"), ("rank_1.pt", "rank_2.pt")])
def test_other_numbers_do_not_count_ranks(names: tuple[str, str], tmp_path: Path, run: Run) -> None:
    for name in names:
        torch.save({"w": torch.ones(2)}, tmp_path / name)
    refused = run("inspect", tmp_path)
    assert refused.status == 2
    assert "*" not in refused.err


def test_one_rank_of_megatron_is_named(tmp_path: Path, run: Run) -> None:
    file = tmp_path / "mp_rank_00/model_optim_rng.pt"
    file.parent.mkdir()
    torch.save({"model": {"w": torch.ones(2)}}, file)
    assert f"name the file: {file}" in run("inspect", tmp_path).err
