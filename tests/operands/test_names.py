"""Names of operands: sections, steps of a run, and unused names for outputs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckpttool.core.errors import CkptError
from ckpttool.diffing.history import in_order, steps_in
from ckpttool.io.paths import is_url
from ckpttool.operands.checkpoint import split
from ckpttool.operands.output import free, outputs


@pytest.fixture(autouse=True)
def _working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("named", "parts"),
    [
        ("train.pt", ("train.pt", None)),
        ("train.pt::model", ("train.pt", "model")),
        ("train.pt::", ("train.pt", "")),
        ("a::b::c.d", ("a::b", "c.d")),
        ("::model", ("::model", None)),
        ("s3://b/a.pt", ("s3://b/a.pt", None)),
        ("s3://b/a.pt::ema", ("s3://b/a.pt", "ema")),
        ("simplecache::s3://b/a.pt", ("simplecache::s3://b/a.pt", None)),
        ("simplecache::s3://b/a.pt::model.ema", ("simplecache::s3://b/a.pt", "model.ema")),
        ("zip://m.pt::s3://b/a.zip", ("zip://m.pt::s3://b/a.zip", None)),
        ("zip://m.pt::s3://b/a.zip::model", ("zip://m.pt::s3://b/a.zip", "model")),
    ],
)
def test_operand_is_split_into_path_and_section(named: str, parts: tuple[str, str | None]) -> None:
    assert split(named) == parts
    assert is_url(parts[0]) == ("://" in parts[0])


@pytest.mark.parametrize(
    ("named", "order"),
    [
        (["s-10", "s-9", "s-100"], ["s-9", "s-10", "s-100"]),
        (["s-10-b", "s-9-a"], ["s-10-b", "s-9-a"]),
        (["2/e-1", "1/e-20", "1/e-3"], ["1/e-3", "1/e-20", "2/e-1"]),
        (["last", "best"], ["last", "best"]),
    ],
)
def test_steps_are_sorted_if_only_numbers_differ(named: list[str], order: list[str]) -> None:
    assert in_order(named) == order


def folder(*files: str) -> None:
    for file in files:
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).touch()


RUNS = {
    "files": (
        ["run/s-10.pt", "run/s-9.pt", "run/.s-8.pt", "run/optimizer.pt", "run/notes.txt"],
        ["s-9.pt", "s-10.pt"],
        [],
    ),
    "folders": (["run/s-10/a.pt", "run/s-9/a.pt", "run/logs/x.txt", "run/.s-8/a.pt"], ["s-9", "s-10"], []),
    "folders and other files": (
        ["run/s-1/a.pt", "run/s-2/.metadata", "run/x.pt", "run/y.pt", "run/optimizer.pt"],
        ["s-1", "s-2"],
        ["x.pt", "y.pt"],
    ),
    "files and another folder": (["run/s-1/a.pt", "run/x.pt", "run/y.pt"], ["x.pt", "y.pt"], ["s-1"]),
    "a folder of folders is a step": (["run/s-1/model/.metadata", "run/s-2/model/.metadata"], ["s-1", "s-2"], []),
}


@pytest.mark.parametrize("case", RUNS)
def test_steps_are_found_in_the_folder_of_a_run(case: str) -> None:
    files, steps, others = RUNS[case]
    folder(*files)
    assert steps_in("run") == ([f"run/{name}" for name in steps], others)


@pytest.mark.parametrize(
    "files",
    [
        ["run/a.pt"],
        ["run/s-1/a.pt", "run/a.pt"],
        ["run/model-00001-of-00002.safetensors", "run/model-00002-of-00002.safetensors"],
        ["run/notes.txt", "run/logs/x.txt"],
    ],
)
def test_folder_without_steps_is_refused(files: list[str]) -> None:
    folder(*files)
    with pytest.raises(CkptError, match="nothing to compare"):
        steps_in("run")


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("train.pt", ["train.new.pt"]),
        ("train.pt::model", ["train.new.pt"]),
        ("train.PT", ["train.new.PT", "train.new.pt"]),
        ("train.xyz", ["train.new.pt"]),
        ("train.safetensors", ["train.new.safetensors", "train.new.pt"]),
        ("runs/train.pt", ["runs/train.new.pt"]),
        ("rank_*.pt", ["rank.new.pt"]),
        ("*.pt", ["checkpoint.new.pt"]),
        ("saved.dcp/", ["saved.new.dcp", "saved.new.pt"]),
        ("saved.dcp/.metadata", ["saved.dcp.new/", "saved.dcp.new.pt"]),
        ("folder/", ["folder.new/", "folder.new.pt"]),
        ("folder/model.safetensors.index.json", ["folder.new/", "folder.new.pt"]),
        ("memory://b/train.pt", ["memory://b/train.new.pt"]),
    ],
)
def test_output_names_are_in_the_folder_of_the_source(source: str, names: list[str]) -> None:
    for name in ("folder", "saved.dcp"):
        Path(name).mkdir()
    assert list(outputs(source, "new")) == names


def test_existing_name_gets_a_number() -> None:
    folder("train.new.pt", "train.new2.pt")
    os.symlink("nowhere", "train.new3.pt")
    assert free("train", "new", ".pt") == "train.new4.pt"
    Path("folder.new").mkdir()
    assert free("folder", "new", "/") == "folder.new2/"
