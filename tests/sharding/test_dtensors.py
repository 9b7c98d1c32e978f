"""Rank files of DTensors saved by real ranks with torch.save: unsharded they equal
`full_tensor()`.
"""

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
    command = [
        sys.executable,
        "-W",
        "ignore",
        dtensor_ranks.__file__,
        str(folder),
        str(request.param),
    ]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, timeout=300, env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    return folder


def differences(expected: Any, actual: Any, place: str = "") -> Iterator[str]:
    """Yield the paths at which two loaded files differ."""
    if isinstance(expected, torch.Tensor):
        if expected.dtype != actual.dtype or not torch.equal(expected, actual):
            yield place
    elif isinstance(expected, dict):
        if list(expected) != list(actual):
            yield f"{place}: keys"
        for key in expected.keys() & actual.keys():
            yield from differences(expected[key], actual[key], f"{place}.{key}")
    elif isinstance(expected, list) and len(expected) == len(actual):
        for at, (one, other) in enumerate(zip(expected, actual)):
            yield from differences(one, other, f"{place}.{at}")
    elif expected != actual:
        yield place


@pytest.mark.parametrize("name", SAVED)
def test_unsharded_dtensors_equal_full_tensors(
    saved: Path, run: Run, tmp_path: Path, name: str
) -> None:
    """Even and uneven shards, replicas, strides, sharding along dim 0 and 1, and both optimizer
    forms.
    """
    done = run("remap", saved / f"{name}_*.pt", "-o", tmp_path / "out.pt", "--verify")
    assert done.status == 0, done.err
    full = torch.load(saved / f"full-{name}.pt")
    assert list(differences(full, torch.load(tmp_path / "out.pt"))) == []
    assert run("diff", saved / f"{name}_*.pt", tmp_path / "out.pt", "--values").status == 0
    listed = run("inspect", saved / f"{name}_*.pt", "--format", "json").data
    assert {t["key"]: t["shape"] for t in listed["tensors"] if t["section"] == "model"} == {
        key: list(value.shape) for key, value in full["model"].items()
    }


def test_dcp_folder_loads_into_dtensors_on_another_mesh(saved: Path) -> None:
    """This is how to get DTensors again, since rank files of DTensors cannot be written."""
    again, full = (torch.load(saved / f"{name}.pt") for name in ("again", "full-fsdp-named"))
    assert list(differences(full["model"], again["model"])) == []
    assert list(differences(full["optimizer"]["state"], again["optimizer"]["state"])) == []


def copy_ranks(
    saved: Path,
    to: Path,
    name: str,
    change: Callable[[str, bytes], bytes] = lambda record, data: data,
) -> str:
    """Copy the rank files with `change` applied to the records of rank 2, which in ``hsdp``
    replicates rank 0.
    """
    for path in saved.glob(f"{name}_*.pt"):
        shutil.copy(path, to)
    with (
        zipfile.ZipFile(saved / f"{name}_2.pt") as source,
        zipfile.ZipFile(to / f"{name}_2.pt", "w") as out,
    ):
        for record in source.namelist():
            out.writestr(record, change(record, source.read(record)))
    return f"{to}/{name}_*.pt"


def test_missing_rank_is_named(saved: Path, run: Run, tmp_path: Path) -> None:
    pattern = copy_ranks(saved, tmp_path, "fsdp")
    (tmp_path / "fsdp_3.pt").unlink()
    done = run("inspect", pattern)
    assert (done.status, "no file is of this rank @ rank 3" in done.err) == (2, True)
    shutil.copy(tmp_path / "fsdp_1.pt", tmp_path / "fsdp_3.pt")
    done = run("inspect", pattern)
    assert (done.status, "is rank 1, as another file is @" in done.err) == (2, True)


def change_epoch(record: str, data: bytes) -> bytes:
    return re.sub(rb"(epoch(?:q.|r....)K)\x03", rb"\g<1>" + bytes([4]), data, flags=re.DOTALL)


def change_weights(record: str, data: bytes) -> bytes:
    """Change the last byte of the first storages, which are the weights."""
    return (
        data[:-1] + bytes([data[-1] ^ 1])
        if re.search(r"/data/[0-3]$", record) and len(data) > 32
        else data
    )


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("drawn", change_epoch, "is 3 on rank 0, and 4 on rank 2 @ epoch"),
        ("hsdp", change_weights, "its replicas differ between the ranks @ model.up.weight"),
    ],
)
def test_ranks_of_two_steps_are_refused(
    saved: Path,
    run: Run,
    tmp_path: Path,
    name: str,
    change: Callable[[str, bytes], bytes],
    message: str,
) -> None:
    pattern = copy_ranks(saved, tmp_path, name, change)
    done = run("remap", pattern, "-o", tmp_path / "out.pt")
    assert (done.status, message in done.err) == (2, True), done.err
    assert not (tmp_path / "out.pt").exists()


STEP = ("optimizer", "state", 0, "step")
MEAN = ("model", "norm.running_mean")  # a buffer


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (MEAN, torch.zeros(7), None),
        (MEAN, torch.zeros(3), "differs between the ranks"),
        (MEAN, None, "some ranks have it, and others do not"),
        (STEP, torch.tensor(7.0), "differs between the ranks"),
        (STEP, None, "some ranks have it, and others do not"),
    ],
)
def test_plain_tensors_next_to_dtensors_must_be_equal(
    saved: Path,
    run: Run,
    tmp_path: Path,
    place: tuple[Any, ...],
    value: torch.Tensor | None,
    message: str | None,
) -> None:
    """Rank 2 has another tensor or none; a sparse tensor is kept."""
    for path in saved.glob("fsdp_?.pt"):
        state = torch.load(path, weights_only=False)
        state["model"]["more"] = torch.eye(3).to_sparse()
        if path.stem == "fsdp_2":
            parent = reduce(getitem, place[:-1], state)
            parent.pop(place[-1])
            parent.update({} if value is None else {place[-1]: value})
        torch.save(state, tmp_path / path.name)
    key = ".".join(map(str, place))
    done = run("remap", tmp_path / "fsdp_?.pt", "-o", tmp_path / "out.pt", "--format", "json")
    problems = [(one["problem"], one["key"]) for one in done.data.get("problems", ())]
    assert (done.status, problems) == ((0, []) if message is None else (2, [(message, key)])), (
        done.err
    )
    notes = notes_in({"notes": [], **done.data})
    assert (f"{key} differs between the ranks: rank 0's is used" in notes) == (message is None)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("partial", "is Partial: a part of a sum over ranks, not of a tensor @ w"),
        ("differing", "its shape, dtype or placements differ between the ranks @ w"),
    ],
)
def test_inconsistent_placements_are_refused(
    saved: Path, run: Run, name: str, message: str
) -> None:
    done = run("inspect", saved / f"{name}_*.pt")
    assert (done.status, message in done.err) == (2, True), done.err


@pytest.mark.parametrize("name", ["drawn", "fsdp"])
def test_flipped_bytes_give_an_error_or_other_values(
    saved: Path, run: Run, tmp_path: Path, name: str
) -> None:
    pattern = copy_ranks(saved, tmp_path, name)
    check_flips(run, pattern, sorted(tmp_path.glob("*.pt")), name)
