"""Commands that read never write, whatever a killed edit left: they say which command resolves it.

`make test` takes a few kinds of leftovers of each format, `make faults` (CKPTTOOL_FAULTS=all) every one.
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
EVERY = os.environ.get("CKPTTOOL_FAULTS") == "all"
MOST = None if EVERY else 4  # kinds of leftovers of each format

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


# Format -> what fills the folder, the line that is killed, the checkpoint that is read then.
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
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one process saw that went through the cases whose tests are run."""
    tests = [test for test in request.session.items if isinstance(test, pytest.Function)]
    asked = [test.callspec.params["name"] for test in tests if test.module is request.module]
    beside = tmp_path_factory.mktemp("beside")
    torch.save({"0.weight": torch.zeros(2, 2), "0.bias": torch.ones(2)}, beside / "other.pt")
    (beside / "net.py").write_text(
        "import torch\ndef build():\n    return torch.nn.Sequential(torch.nn.Linear(2, 2))\n"
    )
    assert main(["trace", f"{beside}/net.py:build", "-o", f"{beside}/names.json"]) == 0
    scenarios = {}
    for name in map(str, asked):
        make, words, ckpt = CASES[name]
        template = tmp_path_factory.mktemp("template")
        (template / "work").mkdir()
        make(template / "work")
        for name_beside in ("other.pt", "names.json"):
            shutil.copy(beside / name_beside, template)
        line = ["remap" if words else "convert", ckpt, *words, "--in-place"]
        cwd = "."
        if name.endswith("here"):  # the current folder cannot change places with a new one: a journal says what is done
            line[1], cwd = ".", ckpt
        scenarios[name] = {"template": str(template), "line": line, "cwd": cwd, "ckpt": ckpt}
    # in memory where there is such a place, since what is tested is the order of the calls
    scratch = Path(tempfile.mkdtemp(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) and not EVERY else None))
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "support" / "reader_driver.py")],
        input=json.dumps({"scenarios": scenarios, "scratch": str(scratch), "most": MOST}),
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    shutil.rmtree(scratch)
    assert done.returncode == 0
    return {row["name"]: row for row in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("name", CASES)
def test_commands_that_read_write_nothing(seen: dict[str, Any], name: str) -> None:
    row = seen[name]
    assert row["problems"][:5] == []
    assert row["kinds"] >= 2
    assert row["runs"] >= 32
    at_once = name.endswith("copied") or name in ("torch legacy", "dcp")  # one call puts it into its place
    assert at_once == (row["interrupted"] == 0)
