"""Conversions between formats: losses are reported, and entries that the output cannot hold are
refused.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from command import Run

torch.set_num_threads(1)
W, WHOLE = torch.ones(2), torch.arange(6.0)
ADAM = {"state": {0: {"step": torch.ones(1)}}, "param_groups": [{"params": [0]}]}
Remap = Callable[..., tuple[int, str]]


@pytest.fixture
def remap(run: Run) -> Remap:
    return lambda *args: run("remap", *args).said


def test_strided_views_become_contiguous(tmp_path: Path, remap: Remap) -> None:
    whole = torch.arange(24.0).reshape(4, 6)
    state = {
        "t": whole.t(),
        "part": torch.arange(10)[2:5],
        "broad": torch.ones(1).expand(3),
        "scalar": torch.tensor(7),
    }
    torch.save(state, tmp_path / "in.pt")
    assert remap(tmp_path / "in.pt", "-o", tmp_path / "out.safetensors", "--verify")[0] == 0
    found = load_file(tmp_path / "out.safetensors")
    assert all(torch.equal(found[key], state[key]) for key in state)


@pytest.mark.parametrize("more", [{}, {"step": "3"}])
def test_safetensors_are_converted_to_torch_files(
    tmp_path: Path, remap: Remap, more: dict[str, str]
) -> None:
    state = {
        "a": torch.ones(2, 3, dtype=torch.bfloat16),
        "b": torch.zeros((), dtype=torch.int64),
        "e": torch.empty(0),
    }
    save_file(state, tmp_path / "in.safetensors", metadata={"format": "pt", **more})
    status, output = remap(tmp_path / "in.safetensors", "-o", tmp_path / "out.pt", "--verify")
    found = torch.load(tmp_path / "out.pt", weights_only=True, mmap=True)
    assert status == 0
    assert found.keys() == state.keys()
    assert all(torch.equal(found[k], state[k]) and found[k].dtype == state[k].dtype for k in state)
    assert ("__metadata__ is left out" in output) == bool(more)


def test_the_format_in_the_metadata_is_not_an_alias(tmp_path: Path, remap: Remap) -> None:
    save_file(
        {"pt": torch.ones(2), "w": torch.ones(1)},
        tmp_path / "in.safetensors",
        metadata={"format": "pt"},
    )
    assert remap(tmp_path / "in.safetensors", "-o", tmp_path / "out.pt", "--verify")[0] == 0
    assert torch.load(tmp_path / "out.pt").keys() == {"pt", "w"}


def test_omitted_module_versions_are_reported(tmp_path: Path, remap: Remap) -> None:
    torch.save(nn.BatchNorm1d(2).state_dict(), tmp_path / "in.pt")
    status, output = remap(tmp_path / "in.pt", "-o", tmp_path / "out.safetensors")
    assert status == 0
    assert "_metadata" in output


def test_aliases_are_refused_or_recorded_and_restored(tmp_path: Path, remap: Remap) -> None:
    weight = torch.ones(2, 2)
    torch.save({"a": weight, "b": weight, "c": torch.zeros(1)}, tmp_path / "in.pt")
    status, output = remap(tmp_path / "in.pt", "-o", tmp_path / "out.safetensors")
    assert status == 1
    assert "the same tensor as a @ b" in output
    assert "--keep-aliases" in output
    assert not (tmp_path / "out.safetensors").exists()
    assert remap(tmp_path / "in.pt", "-o", tmp_path / "out.safetensors", "--keep-aliases")[0] == 0
    with safe_open(tmp_path / "out.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "b": "a"}
        assert sorted(file.keys()) == ["a", "c"]
    status, output = remap(tmp_path / "out.safetensors", "-o", tmp_path / "back.pt")
    found = torch.load(tmp_path / "back.pt")
    assert "__metadata__" not in output
    assert found["b"].data_ptr() == found["a"].data_ptr()


MODEL = nn.Linear(2, 2)
TRAINING = {
    "model": MODEL.state_dict(),
    "optimizer": torch.optim.SGD(MODEL.parameters(), lr=0.1, momentum=0.9).state_dict(),
    "epoch": 3,
    "args": argparse.Namespace(lr=0.1),
}


def training(folder: Path) -> Path:
    torch.save(TRAINING, folder / "train.pt")
    return folder / "train.pt"


@pytest.mark.parametrize("how", ["section", "drop"])
def test_the_model_alone_is_converted(tmp_path: Path, remap: Remap, how: str) -> None:
    path = training(tmp_path)
    operand = f"{path}::model" if how == "section" else path
    drops = [] if how == "section" else ["--drop", "optimizer", "--drop", "epoch", "--drop", "args"]
    status, output = remap(operand, "-o", tmp_path / "out.safetensors", *drops)
    assert status == 0, output
    assert sorted(load_file(tmp_path / "out.safetensors")) == ["bias", "weight"]


@pytest.mark.parametrize(
    ("value", "section", "hint"),
    [
        ({"m": {"w": W, "w._extra_state": 3}}, "", "choose an output that ends in .pt"),
        (
            {"m": {"w": W, "w._extra_state": 3}, "epoch": 3},
            "",
            "take the section alone: {}::m, or choose an output",
        ),
        (
            {"run": {"m": {"w": W}, "n": {"w": W}, "epoch": 3}},
            "run",
            "choose an output that ends in .pt",
        ),
        ({"w": W, "w._extra_state": 3}, "", "choose an output that ends in .pt"),
        (
            ADAM,
            "",
            "it is an optimizer's state, which torch files can hold: choose an output that"
            " ends in .pt",
        ),
        ([W, W], "", "hint: choose an output that ends in .pt"),
        (W, "", "it is one tensor without a name; give it one:"),
        (TRAINING, "", "not a tensor @ epoch"),
        (TRAINING, "", "not a tensor @ args"),
        (TRAINING, "", "{}::model"),
        ({"w": W, "w._extra_state": {"scale": 1.0}}, "", "not a tensor @ w._extra_state"),
        ({"w": W, "z": W.to(torch.complex128)}, "", "complex128 @ z"),
        ({"a": WHOLE[:4], "b": WHOLE[2:]}, "", "@ b"),
    ],
)
def test_the_error_names_the_entry_and_the_shortest_fix(
    tmp_path: Path, remap: Remap, value: Any, section: str, hint: str
) -> None:
    torch.save(value, tmp_path / "in.pt")
    operand = f"{tmp_path / 'in.pt'}::{section}" if section else str(tmp_path / "in.pt")
    status, output = remap(operand, "-o", tmp_path / "out.safetensors")
    assert status == 1
    assert hint.format(operand) in output


def test_in_place_refuses_another_format(tmp_path: Path, remap: Remap) -> None:
    """The name of the file says another format than its content."""
    torch.save({"w": W, "w._extra_state": 3}, tmp_path / "torch.safetensors")
    save_file({"w": W}, tmp_path / "safetensors.pt")
    for name in ("torch.safetensors", "safetensors.pt"):
        before = (tmp_path / name).read_bytes()
        status, output = remap(tmp_path / name, "--in-place", "--rule", "w => v")
        assert (status, "is in another format" in output) == (1, True), output
        assert (tmp_path / name).read_bytes() == before


def test_in_place_keeps_the_format(tmp_path: Path, remap: Remap) -> None:
    torch.save({"w": W, "w._extra_state": 3}, tmp_path / "a.pt")
    save_file({"w": W}, tmp_path / "a.safetensors")
    for name, keys in (("a.pt", {"v", "w._extra_state"}), ("a.safetensors", {"v"})):
        assert remap(tmp_path / name, "--in-place", "--rule", "w => v")[0] == 0
        found = torch.load(tmp_path / name) if name == "a.pt" else load_file(tmp_path / name)
        assert found.keys() == keys


def test_dropped_entries_are_not_written(tmp_path: Path, remap: Remap) -> None:
    path = training(tmp_path)
    assert (
        remap(
            path,
            "-o",
            tmp_path / "out.pt",
            "--drop",
            "optimizer",
            "--drop",
            "epoch",
            "--drop",
            "model.bias",
        )[0]
        == 0
    )
    found = torch.load(tmp_path / "out.pt", weights_only=False)
    assert list(found) == ["model", "args"]
    assert list(found["model"]) == ["weight"]
    torch.save({"w": W, "w._extra_state": 3}, tmp_path / "in.pt")
    assert (
        remap(tmp_path / "in.pt", "-o", tmp_path / "out.safetensors", "--drop", "*._extra_state")[0]
        == 0
    )


def test_drops_that_match_nothing_are_refused(tmp_path: Path, remap: Remap) -> None:
    status, output = remap(
        training(tmp_path), "-o", tmp_path / "out.pt", "--drop", "nowhere.*", "--drop", "epoch"
    )
    assert status == 1
    assert "matches nothing @ nowhere.*" in output
    assert not (tmp_path / "out.pt").exists()


def test_a_safetensors_output_names_torch_as_its_format(tmp_path: Path, remap: Remap) -> None:
    """As `save_pretrained` does; the metadata of a safetensors input is kept."""
    torch.save({"a": torch.ones(2)}, tmp_path / "in.pt")
    save_file({"a": torch.ones(2)}, tmp_path / "in.safetensors")
    for source, expected in (("in.pt", {"format": "pt"}), ("in.safetensors", None)):
        out = tmp_path / f"{source}.out.safetensors"
        assert remap(tmp_path / source, "-o", out, "--rule", "a => b")[0] == 0
        with safe_open(out, "pt") as file:
            assert file.metadata() == expected
