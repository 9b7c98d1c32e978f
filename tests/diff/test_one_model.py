"""Values of two checkpoints of one model: every changed bit is found, whatever names the two
have.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckpttool
from ckpttool import Diff, Names
from command import Run, notes_in
from zoo import FLAT, state_of, traced

State = dict[str, Any]
MOST_FLIPS = 6  # tensors of a model that are changed, one at a time


def states_by_form(name: str, names: Names, folder: Path) -> dict[str, State]:
    """Return the same weights as saved, in DDP, and with the runtime names if they can be
    computed.
    """
    saved = dict(state_of(name))
    states = {"saved": saved, "ddp": {f"module.{key}": value for key, value in saved.items()}}
    try:
        ckpttool.remap(saved, str(folder / "runtime.pt"), model=names, to="runtime")
        states["runtime"] = torch.load(folder / "runtime.pt")
    except ckpttool.CkptError:
        pass
    return states


def with_one_bit_changed(state: State, key: str) -> State:
    """Change a bit of the last byte of the first element: of the exponent, which no conversion
    rounds away.
    """
    changed = copy.deepcopy(state)
    tensor = changed[key]
    first_byte = tensor.storage_offset() * tensor.element_size()
    tensor.untyped_storage()[first_byte + tensor.element_size() - 1] ^= 1
    return changed


def names_of_tensor(state: State, key: str) -> set[str]:
    """Return the keys whose tensors share the storage of `key`."""
    storage = state[key].untyped_storage().data_ptr()
    return {name for name, value in state.items() if value.untyped_storage().data_ptr() == storage}


def not_equal(diff: Diff) -> set[str]:
    """Return the keys of left that are different, without a counterpart, or not compared."""
    entries = [
        entry for entry in diff.entries if entry.status in ("value", "unexpected", "shape", "dtype")
    ]
    return {key for entry in entries for key in entry.left}


@pytest.mark.parametrize("name", FLAT)
def test_a_changed_bit_is_found_in_every_form(tmp_path: Path, name: str) -> None:
    names = traced(name)
    states = states_by_form(name, names, tmp_path)
    for left_form, left in states.items():
        keys = [
            key for key, value in left.items() if isinstance(value, torch.Tensor) and value.numel()
        ]
        for right_form, right in states.items():
            if names.versions and left_form != right_form:
                continue  # the forms other than the saved one have no versions here
            for key in keys[:: max(1, len(keys) // MOST_FLIPS)]:
                diff = ckpttool.diff(
                    with_one_bit_changed(left, key), right, model=names, values=True
                )
                assert not diff.identical, (left_form, right_form, key)
                assert not_equal(diff) & names_of_tensor(left, key), (left_form, right_form, key)


def test_tensors_that_only_one_side_ties_are_named(tmp_path: Path, run: Run) -> None:
    weight = torch.ones(2, 2)
    torch.save({"head": weight, "embed": weight}, tmp_path / "tied.pt")
    torch.save({"head": weight.clone(), "embed": weight.clone()}, tmp_path / "untied.pt")
    for left, right, side in (("tied", "untied", "left"), ("untied", "tied", "right")):
        done = run(
            "diff",
            tmp_path / f"{left}.pt",
            tmp_path / f"{right}.pt",
            "--values",
            "--format",
            "json",
        )
        assert done.status == 0
        assert f"tied in {side} only: embed = head" in notes_in(done.data)
        assert (
            run(
                "diff", tmp_path / f"{left}.pt", tmp_path / f"{right}.pt", "--values", "--whole"
            ).status
            == 1
        )
    same = run(
        "diff", tmp_path / "tied.pt", tmp_path / "tied.pt", "--values", "--format", "json"
    ).data
    assert same["compared"]["aliases"] is True
    assert notes_in(same) == []


def test_a_tie_that_safetensors_cannot_hold_is_information(tmp_path: Path, run: Run) -> None:
    weight = torch.ones(2, 2)
    torch.save({"head": weight, "embed": weight}, tmp_path / "tied.pt")
    save_file({"head": weight.clone(), "embed": weight.clone()}, tmp_path / "tied.safetensors")
    done = run("diff", tmp_path / "tied.pt", tmp_path / "tied.safetensors", "--values", "--whole")
    assert done.status == 0
