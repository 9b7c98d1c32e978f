"""Rank files of DTensors that real ranks saved with torch.save: put together they are what `full_tensor()` gives."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
import torch

import dtensor_ranks
from command import Run, notes_in
from flips import check_flips
from places import ROOT
from torch_version import needs_torch

SAVED = ("drawn", "fsdp", "hsdp", "tp", "fsdp-named", "hsdp-named")
SEEDS = os.environ.get("CKPTTOOL_SEEDS", "1")


@pytest.fixture(scope="module", params=range(int(SEEDS)))
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    needs_torch("2.7", "fully_shard without a GPU")
    folder = tmp_path_factory.mktemp("dtensors")
    command = [sys.executable, "-W", "ignore", dtensor_ranks.__file__, str(folder), str(request.param)]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, timeout=300, env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    return folder


def differing(want: Any, have: Any, way: str = "") -> Iterator[str]:
    """Where two loaded files are not the same, bit for bit."""
    if isinstance(want, torch.Tensor):
        if want.dtype != have.dtype or not torch.equal(want, have):
            yield way
    elif isinstance(want, dict):
        if list(want) != list(have):
            yield f"{way}: keys"
        for key in want.keys() & have.keys():
            yield from differing(want[key], have[key], f"{way}.{key}")
    elif isinstance(want, list) and len(want) == len(have):
        for at, (one, other) in enumerate(zip(want, have)):
            yield from differing(one, other, f"{way}.{at}")
    elif want != have:
        yield way


@pytest.mark.parametrize("name", SAVED)
def test_assembled_dtensors_equal_what_the_ranks_gather(saved: Path, run: Run, tmp_path: Path, name: str) -> None:
    """Even and uneven cuts, replicas, strides, by rows and by columns, with the optimizer in both its forms."""
    done = run("remap", saved / f"{name}_*.pt", "-o", tmp_path / "out.pt", "--verify")
    assert done.status == 0, done.err
    full = torch.load(saved / f"full-{name}.pt")
    assert list(differing(full, torch.load(tmp_path / "out.pt"))) == []
    assert run("diff", saved / f"{name}_*.pt", tmp_path / "out.pt", "--values").status == 0
    listed = run("inspect", saved / f"{name}_*.pt", "--format", "json").data
    assert {t["key"]: t["shape"] for t in listed["tensors"] if t["section"] == "model"} == {
        key: list(value.shape) for key, value in full["model"].items()
    }


def test_a_dcp_folder_of_them_loads_into_dtensors_on_another_mesh(saved: Path) -> None:
    """The way back: rank files of DTensors are not written."""
    again, full = (torch.load(saved / f"{name}.pt") for name in ("again", "full-fsdp-named"))
    assert list(differing(full["model"], again["model"])) == []
    assert list(differing(full["optimizer"]["state"], again["optimizer"]["state"])) == []


def copied(saved: Path, to: Path, name: str, change: Callable[[str, bytes], bytes] = lambda record, data: data) -> str:
    """The ranks' files; `change` makes the records of rank 2's file (its replicas are rank 0's, of ``hsdp``)."""
    for path in saved.glob(f"{name}_*.pt"):
        shutil.copy(path, to)
    with zipfile.ZipFile(saved / f"{name}_2.pt") as source, zipfile.ZipFile(to / f"{name}_2.pt", "w") as out:
        for record in source.namelist():
            out.writestr(record, change(record, source.read(record)))
    return f"{to}/{name}_*.pt"


def test_a_missing_rank_is_named(saved: Path, run: Run, tmp_path: Path) -> None:
    pattern = copied(saved, tmp_path, "fsdp")
    (tmp_path / "fsdp_3.pt").unlink()
    done = run("inspect", pattern)
    assert (done.status, "no file is of this rank @ rank 3" in done.err) == (2, True)
    shutil.copy(tmp_path / "fsdp_1.pt", tmp_path / "fsdp_3.pt")
    done = run("inspect", pattern)
    assert (done.status, "is rank 1, as another file is @" in done.err) == (2, True)


def counted(record: str, data: bytes) -> bytes:
    return re.sub(rb"(epoch(?:q.|r....)K)\x03", rb"\g<1>" + bytes([4]), data, flags=re.DOTALL)


def last_bytes(record: str, data: bytes) -> bytes:
    """Other values in the first storages, which are the weights."""
    return data[:-1] + bytes([data[-1] ^ 1]) if re.search(r"/data/[0-3]$", record) and len(data) > 32 else data


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("drawn", counted, "is 3 on rank 0, and 4 on rank 2 @ epoch"),
        ("hsdp", last_bytes, "its replicas differ between the ranks @ model.up.weight"),
    ],
)
def test_ranks_of_two_steps_are_refused(
    saved: Path, run: Run, tmp_path: Path, name: str, change: Callable[[str, bytes], bytes], says: str
) -> None:
    pattern = copied(saved, tmp_path, name, change)
    done = run("remap", pattern, "-o", tmp_path / "out.pt")
    assert (done.status, says in done.err) == (2, True), done.err
    assert not (tmp_path / "out.pt").exists()


STEP = ("optimizer", "state", 0, "step")
MEAN = ("model", "norm.running_mean")  # a buffer


@pytest.mark.parametrize(
    ("way", "value", "says"),
    [
        (MEAN, torch.zeros(7), None),
        (MEAN, torch.zeros(3), "differs between the ranks"),
        (MEAN, None, "some ranks have it, and others do not"),
        (STEP, torch.tensor(7.0), "differs between the ranks"),
        (STEP, None, "some ranks have it, and others do not"),
    ],
)
def test_ordinary_tensors_next_to_dtensors(
    saved: Path, run: Run, tmp_path: Path, way: tuple[Any, ...], value: torch.Tensor | None, says: str | None
) -> None:
    """Rank 2 has another one, or none; a sparse tensor is carried."""
    for path in saved.glob("fsdp_?.pt"):
        state = torch.load(path, weights_only=False)
        state["model"]["more"] = torch.eye(3).to_sparse()
        if path.stem == "fsdp_2":
            where = reduce(getitem, way[:-1], state)
            where.pop(way[-1])
            where.update({} if value is None else {way[-1]: value})
        torch.save(state, tmp_path / path.name)
    key = ".".join(map(str, way))
    done = run("remap", tmp_path / "fsdp_?.pt", "-o", tmp_path / "out.pt", "--format", "json")
    problems = [(one["problem"], one["key"]) for one in done.data.get("problems", ())]
    assert (done.status, problems) == ((0, []) if says is None else (2, [(says, key)])), done.err
    notes = notes_in({"notes": [], **done.data})
    assert (f"{key} differs between the ranks: rank 0's is used" in notes) == (says is None)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("partial", "is Partial: a part of a sum over ranks, not of a tensor @ w"),
        ("differing", "its shape, dtype or placements differ between the ranks @ w"),
    ],
)
def test_what_is_no_part_of_one_tensor_is_refused(saved: Path, run: Run, name: str, says: str) -> None:
    done = run("inspect", saved / f"{name}_*.pt")
    assert (done.status, says in done.err) == (2, True), done.err


@pytest.mark.parametrize("name", ["drawn", "fsdp"])
def test_flipped_bytes_are_an_error_or_other_values(saved: Path, run: Run, tmp_path: Path, name: str) -> None:
    pattern = copied(saved, tmp_path, name)
    check_flips(run, pattern, sorted(tmp_path.glob("*.pt")), name)
