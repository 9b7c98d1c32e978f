"""Names of operands: sections, and unused names for outputs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

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
    for name in ("train.new.pt", "train.new2.pt"):
        Path(name).touch()
    os.symlink("nowhere", "train.new3.pt")
    assert free("train", "new", ".pt") == "train.new4.pt"
    Path("folder.new").mkdir()
    assert free("folder", "new", "/") == "folder.new2/"
