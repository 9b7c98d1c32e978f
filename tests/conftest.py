"""Fixtures for all tests, among them checkpoints of real wrappers over two ranks and the results of
loading them.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from itertools import pairwise
from pathlib import Path

import hypothesis
import pytest

# small tensors: more threads only wait for each other
os.environ.setdefault("OMP_NUM_THREADS", "1")
if "CKPTTOOL_GPU" not in os.environ:  # tests of wrappers would move models to a GPU
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
# Hundreds of tests start a process: without bytecode each of them compiles the package again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import torch

import dcp_ranks
import schemas
import wrapped_ranks
from command import Done, Run, main
from torch_version import needs_torch
from wrapped_ranks import BLOCKS, CHAINS, SHARDED, TRAINED, Wrapped, filename

# a test may be slow on a busy machine
hypothesis.settings.register_profile("ckpttool", deadline=None)
hypothesis.settings.load_profile("ckpttool")


@pytest.fixture(scope="session")
def wrapped(tmp_path_factory: pytest.TempPathFactory) -> Wrapped:
    """Remap the plain checkpoint to every form and load it; train in one form and resume in
    another.
    """
    needs_torch("2.7", "fully_shard without a GPU")
    folder = tmp_path_factory.mktemp("wrapped")
    dcp_ranks.run("save", folder, wrapped_ranks.__file__)
    for name in ("loads", "resumes", "results"):
        (folder / name).mkdir()
    for form in CHAINS:
        _remap(folder / "plain.pt", folder / "loads" / f"{filename(form)}.pt", "--to", form)
    for form in BLOCKS:
        name = f"{filename(form)}.pt"
        _remap(folder / "plain.pt", folder / "loads" / name, "--like", str(folder / name))
    model = str(folder / "net.json")
    assert main(["trace", f"{wrapped_ranks.__file__}:Net", "-o", model]) == 0
    for old in TRAINED:
        for new in TRAINED:
            keys = "fqn" if new in SHARDED else "id"
            to = "serialized" if new == "plain" else new
            chosen = ("--model", model, "--to", to, "--optimizer-keys", keys)
            _remap(folder / f"trained-{old}.pt", folder / "resumes" / f"{old} to {new}.pt", *chosen)
    dcp_ranks.run("load", folder, wrapped_ranks.__file__)
    names, failures = (
        json.loads((folder / f"{name}.json").read_text()) for name in ("names", "failures")
    )
    return Wrapped(folder, names, failures)


@pytest.fixture(autouse=True)
def _reset_dynamo() -> None:
    """Older releases of torch count recompilations of a function across tests, and fail above a
    limit.
    """
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command line in this process and return status, stdout and stderr. Validate JSON
    against its schema.
    """

    def run(*args: object) -> Done:
        capsys.readouterr()
        status = main([*map(str, args)])
        done = Done(status, *capsys.readouterr())
        if done.out and ("--format", "json") in pairwise(map(str, args)):
            schemas.check(done.data)
        return done

    return run


def _remap(source: Path, out: Path, *options: str) -> None:
    """Write the remapped file, or copy the source if it needs no change."""
    if main(["remap", str(source), *options, "--dry-run"]) == 1:
        shutil.copy(source, out)
    else:
        assert main(["remap", str(source), *options, "-o", str(out), "--no-fsync"]) == 0
