"""Startup cost of commands, counted in imported modules, since times depend on the machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckpttool
from places import ROOT

# Slow to import, and needed by few commands.
HEAVY = {"pydantic", "rich", "torch", "numpy", "fsspec", "asyncio", "email", "logging"}
HEAVY |= {
    "importlib.metadata",
    "urllib.request",
    "concurrent.futures",
    "multiprocessing",
    "socket",
    "hashlib",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    state = {f"layers.{index}.weight": torch.randn(2, 3) for index in range(4)}
    save_file(state, tmp_path / "a.safetensors")
    torch.save(state, tmp_path / "a.pt")
    save_file(
        {name.replace("layers", "blocks"): t for name, t in state.items()},
        tmp_path / "renamed.safetensors",
    )
    net = torch.nn.Linear(3, 2)
    torch.export.save(torch.export.export(net, (torch.ones(1, 3),)), tmp_path / "p.pt2")
    torch.save(net.state_dict(), tmp_path / "new.pt")
    named, by_id = (torch.optim.AdamW(of) for of in ([*net.named_parameters()], net.parameters()))
    for name, optimizer in (("named.pt", named), ("ids.pt", by_id)):
        net(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        torch.save(
            {"model": net.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / name
        )
    names = ckpttool.trace(lambda: torch.nn.Linear(3, 2))
    (tmp_path / "names.json").write_text(json.dumps(names.to_json()))
    return tmp_path


LINES = [
    ("inspect a.safetensors", 0, 103),
    ("inspect a.pt --format json", 0, 120),
    ("inspect none.pt", 2, 101),
    ("diff a.safetensors a.pt", 0, 170),
    ("diff a.safetensors a.pt --values", 0, 170),
    ("diff a.safetensors renamed.safetensors", 1, 228),
    ("remap a.safetensors -o b.safetensors --rule layers.{x*}=>blocks.{x*}", 0, 158),
    ("remap named.pt -o o.pt --optimizer-keys fqn", 0, 172),
    ("remap ids.pt -o o.pt --optimizer-keys fqn --model names.json", 0, 172),
    ("diff ids.pt --model names.json", 0, 172),
    ("inspect ids.pt", 0, 120),
    ("swap-weights p.pt2 new.pt -o o.pt2", 0, 145),
]


@pytest.mark.parametrize(("line", "status", "limit"), LINES, ids=[line for line, _, _ in LINES])
def test_command_imports_only_what_it_needs(
    folder: Path, line: str, status: int, limit: int
) -> None:
    """`limit` is slightly more than the number of ckpttool modules that the command imports
    today.
    """
    code = (
        "import sys; before = set(sys.modules)\n"
        "from ckpttool.cli.app import main\n"
        f"status = main({line.split()!r})\n"
        "print(*sorted(set(sys.modules) - before), file=open('modules', 'w')); sys.exit(status)"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=env, capture_output=True, text=True
    )
    assert done.returncode == status, done.stderr
    loaded = (folder / "modules").read_text().split()
    assert (
        sorted({name for name in loaded if name in HEAVY or name.partition(".")[0] in HEAVY}) == []
    )
    modules = [name for name in loaded if name.startswith("ckpttool")]
    assert len(modules) <= limit, (len(modules), " ".join(modules))


def test_values_are_compared_without_torch(folder: Path) -> None:
    state = {
        f"layers.{index}.weight": torch.zeros(2, 3, dtype=torch.bfloat16) for index in range(4)
    }
    save_file(state, folder / "left.safetensors")
    save_file(
        {**state, "layers.0.weight": torch.ones(2, 3, dtype=torch.bfloat16)},
        folder / "right.safetensors",
    )
    code = (
        "import sys; from ckpttool.cli.app import main\n"
        "status = main(['diff', 'left.safetensors', 'right.safetensors', '--values'])\n"
        "assert 'torch' not in sys.modules; sys.exit(status)"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=env, capture_output=True, text=True
    )
    assert (done.returncode, "6 of 6 elements differ, by 1 at most" in done.stdout) == (1, True), (
        done.stderr
    )
