"""Reading commands do not write after a killed edit; they name the command that resolves it.

`make test` tries a few kinds of leftovers of each format; `make faults` (CKPTTOOL_FAULTS=all) tries all.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from ckpttool.cli.app import main

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data"
ALL_KINDS = os.environ.get("CKPTTOOL_FAULTS") == "all"
MAX_KINDS = None if ALL_KINDS else 4  # of leftovers per format

STATE = {"a.weight": torch.arange(2_000.0), "a.bias": torch.ones(3), "b.weight": torch.zeros(2, 2)}
RENAME = ["--rule", "a.{x} => z.{x}"]
LONGER = ["--rule", f"b.{{x}} => {'a.much.longer.name.' * 9}{{x}}"]


def sharded(work: Path, ending: str) -> None:
    home = work / "in"
    home.mkdir()
    shards = {key: f"model-{i + 1:05}-of-00003.{ending}" for i, key in enumerate(STATE)}
    for key, name in shards.items():
        save = torch.save if ending == "bin" else save_file
        save({key: STATE[key]}, home / name)
    stem = "pytorch_model.bin" if ending == "bin" else "model.safetensors"
    (home / f"{stem}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shards}))


def program(work: Path) -> None:
    shutil.copy(DATA / "tagger-torch-2.9.1.pt2", work / "in.pt2")


def legacy(work: Path) -> None:
    torch.save(STATE, work / "in.pt", _use_new_zipfile_serialization=False)


# Format -> function that writes the files, options of the killed command, checkpoint to read afterwards.
CASES: dict[str, tuple[Callable[[Path], object], list[str], str]] = {
    "safetensors": (lambda work: save_file(STATE, work / "in.safetensors"), RENAME, "in.safetensors"),
    "safetensors, longer": (lambda work: save_file(STATE, work / "in.safetensors"), LONGER, "in.safetensors"),
    "safetensors, copied": (
        lambda work: save_file(STATE, work / "in.safetensors"),
        [],
        "in.safetensors",
    ),
    "torch zip": (lambda work: torch.save({"model": STATE, "epoch": 3}, work / "in.pt"), RENAME, "in.pt"),
    "torch legacy": (legacy, RENAME, "in.pt"),
    "program": (program, ["--rule", "scale => s"], "in.pt2"),
    "sharded": (lambda work: sharded(work, "safetensors"), RENAME, "in"),
    "sharded, copied": (lambda work: sharded(work, "safetensors"), [], "in"),
    "sharded, copied here": (lambda work: sharded(work, "safetensors"), [], "in"),
    "sharded bin": (lambda work: sharded(work, "bin"), RENAME, "in"),
    "dcp, here": (lambda work: dcp.save({"model": STATE, "step": 7}, checkpoint_id=work / "in"), RENAME, "in"),
    "dcp": (lambda work: dcp.save({"model": STATE, "step": 7}, checkpoint_id=work / "in"), RENAME, "in"),
}


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run the cases of the selected tests in one process, and return its results."""
    tests = [test for test in request.session.items if isinstance(test, pytest.Function)]
    selected = [test.callspec.params["name"] for test in tests if test.module is request.module]
    others = tmp_path_factory.mktemp("others")
    torch.save({"0.weight": torch.zeros(2, 2), "0.bias": torch.ones(2)}, others / "other.pt")
    (others / "net.py").write_text(
        "import torch\ndef build():\n    return torch.nn.Sequential(torch.nn.Linear(2, 2))\n"
    )
    assert main(["trace", f"{others}/net.py:build", "-o", f"{others}/names.json"]) == 0
    scenarios = {}
    for name in map(str, selected):
        make, words, ckpt = CASES[name]
        template = tmp_path_factory.mktemp("template")
        (template / "work").mkdir()
        make(template / "work")
        for other_name in ("other.pt", "names.json"):
            shutil.copy(others / other_name, template)
        line = ["remap" if words else "convert", ckpt, *words, "--in-place"]
        cwd = "."
        if name.endswith("here"):  # the current folder cannot be exchanged, so a journal is used
            line[1], cwd = ".", ckpt
        scenarios[name] = {"template": str(template), "line": line, "cwd": cwd, "ckpt": ckpt}
    # in memory if possible, since the order of calls is tested
    scratch = Path(tempfile.mkdtemp(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) and not ALL_KINDS else None))
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "support" / "reader_driver.py")],
        input=json.dumps({"scenarios": scenarios, "scratch": str(scratch), "most": MAX_KINDS}),
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    shutil.rmtree(scratch)
    assert done.returncode == 0
    return {row["name"]: row for row in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("name", CASES)
def test_reading_commands_do_not_write(results: dict[str, Any], name: str) -> None:
    row = results[name]
    assert row["problems"][:5] == []
    assert row["kinds"] >= 2
    assert row["runs"] >= 32
    is_atomic = name.endswith("copied") or name in ("torch legacy", "dcp")  # replaced by one call
    assert is_atomic == (row["interrupted"] == 0)
