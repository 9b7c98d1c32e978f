"""Command lines in the documentation import torch only if they run model code."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import torch
from safetensors.torch import save_file

import ckpttool
from doc_lines import command_lines
from torchless import may_need_torch, torchless

MODEL = {"encoder.0.weight": (3, 3), "encoder.0.bias": (3,), "layers.1.weight": (2, 3)}
FILES = (
    "train",
    "old",
    "base",
    "left",
    "right",
    "ours",
    "theirs",
    "in",
    "plain",
    "out",
    "engine",
    "full",
    "whole",
)
WEIGHTS = ("model", "in", "ten", "converted", "tied", "weights", "out")


def write_files(folder: Path) -> None:
    """Write files under the names that the pages use."""
    state = {key: torch.ones(shape) for key, shape in MODEL.items()}
    wrapped = {f"module.{key}": value for key, value in state.items()}
    for name in FILES:
        torch.save({"model": wrapped} if name == "train" else state, folder / f"{name}.pt")
    for name in WEIGHTS:
        save_file(state, folder / f"{name}.safetensors")
    net = torch.nn.Linear(3, 2)
    program = torch.export.export(net, (torch.ones(1, 3),))
    for name in ("deployed", "program"):
        torch.export.save(program, folder / f"{name}.pt2")
    (folder / "rules.toml").write_text('[[rule]]\nrename = "encoder.{x*} => backbone.{x*}"\n')
    (folder / "names.json").write_text(json.dumps(ckpttool.trace(net).to_json()))
    for name in ("shards", "llama"):
        ckpttool.remap(state, f"{folder / name}/")
    for rank in (0, 1):
        torch.save(state, folder / f"rank_{rank}.pt")


def test_only_commands_that_run_model_code_import_torch(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    write_files(kept)
    lines = [
        line.removeprefix("ckpttool").strip() + " --force" * (" -o " in line)
        for line in command_lines("troubleshooting.md")  # run by test_troubleshooting
    ]
    statuses: Counter[int] = Counter()
    imported = []
    with torchless() as process:
        for number, line in enumerate(
            line for line in lines if not may_need_torch(line) and "://" not in line
        ):
            folder = tmp_path / str(number)
            shutil.copytree(kept, folder)
            answer = process.run(line, folder)
            statuses[answer.done.status] += 1
            imported += [line] * answer.torch
        # check that an import is detected
        (kept / "model.py").write_text("import torch\ndef build(): return torch.nn.Linear(3, 2)\n")
        assert process.run("diff --model model.py:build", kept).torch
    assert imported == []
    assert statuses[0] + statuses[1] >= 15, statuses
