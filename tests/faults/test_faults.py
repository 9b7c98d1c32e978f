"""No data is lost: if any call fails or the process dies at any point, the output is the old or the
new one.

Reading commands do not write after a killed edit; they name the command that resolves it. `make
test` tries a few fixed points of each scenario, and a few kinds of leftovers of each format; `make
faults` (CKPTTOOL_FAULTS=all) tries all.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from command import main
from fault_driver import Scenario

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data"
ALL_POINTS = os.environ.get("CKPTTOOL_FAULTS") == "all"
POINTS = None if ALL_POINTS else 1  # per mode
MAX_KINDS = None if ALL_POINTS else 4  # of leftovers per format

STATE = {
    "a.weight": torch.arange(40_000, dtype=torch.float32),
    "a.bias": torch.ones(3, dtype=torch.bfloat16),
    "b.weight": torch.zeros(2, 2),
}
OTHER = {"c": torch.ones(3)}
PROGRAM = "tagger-torch-2.9.1.pt2"
RENAME = ("--rule", "a.{x} => z.{x}")


@dataclass(frozen=True)
class Case:
    """A command line, and the function that writes the files of its folder."""

    make: Callable[[Path], object]
    line: str
    cwd: str = "."
    look: str = ""
    journal: bool = False


def tensors(folder: Path) -> None:
    save_file(STATE, folder / "in.safetensors")
    (folder / "in.safetensors").chmod(0o640)


def edited(folder: Path) -> None:
    tensors(folder)
    assert main(["remap", str(folder / "in.safetensors"), *RENAME, "--in-place"]) == 0


def sharded_edited(folder: Path) -> None:
    sharded(folder)
    assert main(["remap", str(folder / "in"), *RENAME, "--in-place"]) == 0


def tensors_and_out(folder: Path) -> None:
    tensors(folder)
    save_file(OTHER, folder / "out.safetensors")


def zipped(folder: Path) -> None:
    torch.save({"model": STATE, "epoch": 3}, folder / "in.pt")


def legacy(folder: Path, state: dict[str, torch.Tensor] = STATE) -> None:
    torch.save(state, folder / "in.pt", _use_new_zipfile_serialization=False)


def scripted(folder: Path) -> None:
    (folder / "in.pt").write_bytes((DATA / "script-torch-2.5.1.pt").read_bytes())
    state = torch.jit.load(folder / "in.pt").state_dict()
    torch.save({key: value + 1 for key, value in state.items()}, folder / "new.pt")


def sharded(folder: Path, name: str = "in", state: dict[str, torch.Tensor] = STATE) -> None:
    home = folder / name
    home.mkdir()
    shards = {
        f"model-{i + 1:05}-of-{len(state):05}.safetensors": key for i, key in enumerate(state)
    }
    for shard, key in shards.items():
        save_file({key: state[key]}, home / shard)
    index = {
        "metadata": {"total_size": 1},
        "weight_map": {key: shard for shard, key in shards.items()},
    }
    (home / "model.safetensors.index.json").write_text(json.dumps(index))
    (home / "config.json").write_text("{}")


def sharded_and_out(folder: Path) -> None:
    sharded(folder)
    sharded(folder, "out", {**OTHER, "d": torch.zeros(2), "e": torch.ones(1), "f": torch.ones(1)})
    (folder / "out" / "config.json").unlink()
    (folder / "out" / "logs").mkdir()
    (folder / "out" / "logs" / "events").write_text("kept")
    (folder / "out" / "link").symlink_to("logs/events")


def distributed(folder: Path, name: str = "in", state: dict[str, torch.Tensor] = STATE) -> None:
    dcp.save({"model": state, "step": 7}, checkpoint_id=folder / name)


def distributed_and_out(folder: Path) -> None:
    distributed(folder)
    distributed(folder, "out", OTHER)
    (folder / "out" / "note.txt").write_text("kept")


def program(folder: Path) -> None:
    for name in (PROGRAM, "weights-torch-2.9.1.pt"):
        (folder / name).write_bytes((DATA / name).read_bytes())


CASES = {
    "safetensors, copied": Case(tensors, "remap in.safetensors -o out.safetensors"),
    "safetensors, over another": Case(
        tensors_and_out, "remap in.safetensors -o out.safetensors --force"
    ),
    "safetensors, in place": Case(
        tensors, "remap in.safetensors --in-place", look="in.safetensors", journal=True
    ),
    "safetensors, undone": Case(edited, "undo in.safetensors", look="in.safetensors", journal=True),
    "safetensors, verified": Case(
        tensors, "remap in.safetensors -o out.safetensors --verify --no-fsync"
    ),
    "with a report": Case(tensors, "remap in.safetensors -o o.safetensors --report r.md"),
    "torch zip, in place": Case(zipped, "remap in.pt --in-place", look="in.pt", journal=True),
    "torch zip to safetensors": Case(zipped, "remap in.pt::model -o out.safetensors"),
    "torch legacy to torch zip": Case(legacy, "remap in.pt -o out.pt"),
    "torchscript": Case(scripted, "swap-weights in.pt new.pt -o out.pt"),
    "program": Case(
        program, "swap-weights tagger-torch-2.9.1.pt2 weights-torch-2.9.1.pt -o out.pt2"
    ),
    "sharded, copied": Case(sharded, "remap in -o out/"),
    "sharded, in place": Case(sharded, "remap in --in-place", look="in", journal=True),
    "sharded, undone": Case(sharded_edited, "undo in", look="in", journal=True),
    "sharded, over another": Case(sharded_and_out, "remap in -o out --force"),
    "sharded, here": Case(sharded_and_out, "remap ../in -o . --force", "out", ".", journal=True),
    "to shards": Case(zipped, "convert in.pt::model -o out/ --max-shard-size 100KB"),
    "dcp, copied": Case(distributed, "remap in -o out.dcp"),
    "dcp, in place": Case(distributed, "remap in --in-place", look="in", journal=True),
    "dcp, here": Case(distributed_and_out, "remap ../in -o . --force", "out", ".", journal=True),
    "dcp, over another": Case(distributed_and_out, "remap in -o out --force"),
    "dcp to safetensors": Case(distributed, "remap in::model -o out.safetensors"),
}


def scenario(case: Case, template: Path) -> Scenario:
    """Return the case as the scenario that the driver needs."""
    case.make(template)
    own = not case.line.startswith("remap") or ".pt2" in case.line
    rules = () if own else RENAME
    once = "--in-place" in case.line or case.line.startswith("undo")
    again = () if once or "--force" in case.line else ("--force",)
    argv = [*case.line.split(), *rules]
    apart = "--report" in case.line
    return Scenario(str(template), argv, case.cwd, case.look, case.journal, once, apart, again)


def selected(request: pytest.FixtureRequest, function: str) -> list[str]:
    """Return the names of the selected cases of a test."""
    tests = [test for test in request.session.items if isinstance(test, pytest.Function)]
    return [
        str(t.callspec.params["name"])
        for t in tests
        if t.module is request.module and t.originalname == function
    ]


def run_driver(name: str, **wanted: Any) -> dict[str, Any]:
    """Run the scenarios in one process, and return its results by name."""
    # in memory if possible, since the order of calls is tested; only a disk can move blocks
    scratch = Path(
        tempfile.mkdtemp(
            dir="/dev/shm" if os.access("/dev/shm", os.W_OK) and not ALL_POINTS else None
        )
    )
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "support" / name)],
        input=json.dumps({**wanted, "scratch": str(scratch)}),
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    shutil.rmtree(scratch)
    assert done.returncode == 0
    return {row["name"]: row for row in map(json.loads, done.stdout.splitlines())}


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    names = selected(request, "test_output_is_the_old_or_the_new_one")
    scenarios = {
        name: asdict(scenario(CASES[name], tmp_path_factory.mktemp("template"))) for name in names
    }
    return run_driver("fault_driver.py", scenarios=scenarios, points=POINTS)


@pytest.mark.parametrize("name", CASES)
def test_output_is_the_old_or_the_new_one(
    results: dict[str, Any], name: str, record_property: Callable[[str, object], None]
) -> None:
    row = results[name]
    points = Counter(row["points"])
    for figure, value in {
        "part": name.partition(",")[0],
        "calls": len(row["calls"]),
        "points": points.total(),
        "kills": sum(count for mode, count in points.items() if "KILL" in mode),
        "signals": points["TERM"] + points["INT"] + points["HUP"],
        "slowest, s": round(row["slowest"], 2),
    }.items():
        record_property(figure, value)
    assert row["problems"][:5] == []
    assert points.total() >= 8
    assert not ALL_POINTS or points["EIO"] == len(row["calls"])
    assert {"rename", "replace", "link", "renameat2"} & set(row["calls"])


# Readers

SMALL = {"a.weight": torch.arange(2_000.0), "a.bias": torch.ones(3), "b.weight": torch.zeros(2, 2)}


def small_tensors(work: Path) -> None:
    save_file(SMALL, work / "in.safetensors")


def small_shards(work: Path) -> None:
    sharded(work, state=SMALL)
    (work / "in" / "config.json").unlink()


def small_bins(work: Path) -> None:
    (work / "in").mkdir()
    shards = {key: f"model-{i + 1:05}-of-00003.bin" for i, key in enumerate(SMALL)}
    for key, shard in shards.items():
        torch.save({key: SMALL[key]}, work / "in" / shard)
    index = {"metadata": {}, "weight_map": shards}
    (work / "in" / "pytorch_model.bin.index.json").write_text(json.dumps(index))


# Format -> function that writes the files, options of the killed command, checkpoint to read
# afterwards.
READ: dict[str, tuple[Callable[[Path], object], Sequence[str], str]] = {
    "safetensors": (small_tensors, RENAME, "in.safetensors"),
    "torch zip": (
        lambda work: torch.save({"model": SMALL, "epoch": 3}, work / "in.pt"),
        RENAME,
        "in.pt",
    ),
    "sharded": (small_shards, RENAME, "in"),
    "sharded bin": (small_bins, RENAME, "in"),
    "dcp": (lambda work: distributed(work, state=SMALL), RENAME, "in"),
}


@pytest.fixture(scope="module")
def readings(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    others = tmp_path_factory.mktemp("others")
    torch.save({"0.weight": torch.zeros(2, 2), "0.bias": torch.ones(2)}, others / "other.pt")
    (others / "net.py").write_text(
        "import torch\ndef build():\n    return torch.nn.Sequential(torch.nn.Linear(2, 2))\n"
    )
    assert main(["trace", f"{others}/net.py:build", "-o", f"{others}/names.json"]) == 0
    scenarios = {}
    for name in selected(request, "test_reading_commands_do_not_write"):
        make, words, ckpt = READ[name]
        template = tmp_path_factory.mktemp("template")
        (template / "work").mkdir()
        make(template / "work")
        for other_name in ("other.pt", "names.json"):
            shutil.copy(others / other_name, template)
        line = ["remap", ckpt, *words, "--in-place"]
        scenarios[name] = {"template": str(template), "line": line, "cwd": ".", "ckpt": ckpt}
    return run_driver("reader_driver.py", scenarios=scenarios, most=MAX_KINDS)


@pytest.mark.parametrize("name", READ)
def test_reading_commands_do_not_write(readings: dict[str, Any], name: str) -> None:
    row = readings[name]
    assert row["problems"][:5] == []
    assert row["kinds"] >= 2
    assert row["runs"] >= 32
    assert row["interrupted"] > 0
