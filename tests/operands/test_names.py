"""Names of operands: sections, and unused names for outputs."""

from __future__ import annotations

import os
from pathlib import Path

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import ckpttool

MODEL = {"fc.weight": torch.ones(2), "fc.bias": torch.ones(2)}
WRAPPED = {f"module.{key}": value for key, value in MODEL.items()}


@pytest.fixture(autouse=True)
def _working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("named", "path"),
    [
        ("train.pt", "train.pt"),
        ("train.pt::model", "train.pt"),
        ("train.pt::", "train.pt"),
        ("a::b::c.d", "a::b"),
        ("::model", "::model"),
        ("memory://b/a.pt", "memory://b/a.pt"),
        ("memory://b/a.pt::ema", "memory://b/a.pt"),
        ("simplecache::memory://b/a.pt", "simplecache::memory://b/a.pt"),
        ("simplecache::memory://b/a.pt::model.ema", "simplecache::memory://b/a.pt"),
        ("zip://m.pt::memory://b/a.zip", "zip://m.pt::memory://b/a.zip"),
        ("zip://m.pt::memory://b/a.zip::model", "zip://m.pt::memory://b/a.zip"),
    ],
)
def test_the_path_of_an_operand_ends_before_its_section(named: str, path: str) -> None:
    with pytest.raises(ckpttool.CkptError) as missing:
        ckpttool.inspect(named)
    assert missing.value.message.endswith(f": {path}")


@pytest.mark.parametrize(("name", "section"), [("a::b", "c.d"), ("train.pt", "model")])
def test_a_section_is_found_in_a_file_of_any_name(name: str, section: str) -> None:
    outer, _, inner = section.partition(".")
    torch.save({outer: {inner: MODEL} if inner else MODEL, "epoch": 3}, name)
    (found,) = ckpttool.open_checkpoint(f"{name}::{section}").sections
    assert found.keys == list(MODEL)


def save_as(path: str) -> None:
    """Save the wrapped model in the format of the name."""
    if path.startswith("memory:"):
        torch.save(WRAPPED, "local.pt")
        fsspec.filesystem("memory").pipe("/b/train.pt", Path("local.pt").read_bytes())
    elif path.startswith("folder"):
        ckpttool.convert(WRAPPED, "folder/", max_shard_size="8")
    elif path.endswith(".safetensors"):
        save_file(WRAPPED, path)
    elif ".dcp" in path:
        dcp.save(WRAPPED, checkpoint_id="saved.dcp")
    else:
        Path(path).parent.mkdir(exist_ok=True)
        torch.save({"model": WRAPPED}, path)


def output_of_fix(source: str) -> str:
    torch.save(MODEL, "right.pt")
    (command,) = ckpttool.diff(source, "right.pt").fix
    return command.rpartition(" -o ")[2]


@pytest.mark.filterwarnings("ignore:.*(no_dist|single process|TypedStorage)")
@pytest.mark.parametrize(
    ("source", "out"),
    [
        ("train.pt", "train.renamed.pt"),
        ("train.pt::model", "train.renamed.pt"),
        ("train.PT", "train.renamed.PT"),
        ("train.xyz", "train.renamed.pt"),
        ("train.safetensors", "train.renamed.safetensors"),
        ("runs/train.pt", "runs/train.renamed.pt"),
        ("saved.dcp/", "saved.renamed.dcp"),
        ("folder/", "folder.renamed/"),
        ("folder/model.safetensors.index.json", "folder.renamed/"),
        ("memory://b/train.pt", "memory://b/train.renamed.pt"),
    ],
)
def test_the_output_of_a_fix_is_next_to_its_source(source: str, out: str) -> None:
    save_as(source.partition("::")[0])
    assert output_of_fix(source) == out


def test_the_output_for_an_object_in_memory_is_in_the_working_folder() -> None:
    torch.save(MODEL, "right.pt")
    (call,) = ckpttool.diff(WRAPPED, "right.pt").fix
    assert "out='checkpoint.renamed.pt'" in call


def test_the_output_of_a_fix_gets_a_number_if_the_name_exists() -> None:
    save_as("train.pt")
    for name in ("train.renamed.pt", "train.renamed2.pt"):
        Path(name).touch()
    os.symlink("nowhere", "train.renamed3.pt")
    assert output_of_fix("train.pt") == "train.renamed4.pt"
    save_as("folder/")
    Path("folder.renamed").mkdir()
    assert output_of_fix("folder/") == "folder.renamed2/"
