"""How values that differ are described."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from command import Run, notes_in


@pytest.mark.parametrize(
    ("left", "right", "detail"),
    [
        ([1.0, math.nan], [1.0, 2.0], "1 of 2 elements differ; 1 NaN in left"),
        (
            [1.0, 2.0],
            [math.inf, math.nan],
            "2 of 2 elements differ; 1 NaN in right, 1 infinite in right",
        ),
        ([1.5, math.nan], [1.0, 2.0], "2 of 2 elements differ, by 0.5 at most; 1 NaN in left"),
        (
            [math.inf, 1.0],
            [-math.inf, 1.0],
            "1 of 2 elements differ; 1 infinite in left, 1 infinite in right",
        ),
        (
            [math.nan, 1.0],
            [math.nan, 3.0],
            "1 of 2 elements differ, by 2 at most; 1 NaN in left, 1 NaN in right",
        ),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64])
def test_elements_that_are_not_finite_are_counted_on_each_side(
    tmp_path: Path, run: Run, dtype: torch.dtype, left: list[float], right: list[float], detail: str
) -> None:
    torch.save({"w": torch.tensor(left, dtype=dtype)}, tmp_path / "left.pt")
    torch.save({"w": torch.tensor(right, dtype=dtype)}, tmp_path / "right.pt")
    done = run("diff", tmp_path / "left.pt", tmp_path / "right.pt", "--values", "--format", "json")
    assert [entry["detail"] for entry in done.data["entries"]] == [detail]


def test_metadata_of_safetensors_is_compared(tmp_path: Path, run: Run) -> None:
    tensors = {"w": torch.ones(1)}
    save_file(tensors, tmp_path / "a.safetensors", metadata={"format": "pt", "step": "1"})
    save_file(
        tensors, tmp_path / "b.safetensors", metadata={"format": "pt", "step": "2", "more": "x"}
    )
    torch.save(tensors, tmp_path / "c.pt")
    same = run(
        "diff", tmp_path / "a.safetensors", tmp_path / "a.safetensors", "--format", "json"
    ).data
    assert (same["compared"]["metadata"], notes_in(same)) == (True, [])
    arguments = ("diff", tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    done = run(*arguments, "--format", "json")
    assert done.status == 0
    assert notes_in(done.data) == [
        "the metadata of the files (__metadata__) differs: step, more (in right only)"
    ]
    assert run(*arguments, "--values", "--whole").status == 1
    assert (
        run("diff", tmp_path / "a.safetensors", tmp_path / "c.pt", "--values", "--whole").status
        == 0
    )


def test_nothing_is_called_unfixed_if_only_values_differ(tmp_path: Path, run: Run) -> None:
    """There is nothing to fix in the names; a rename next to it is still suggested."""
    state = torch.nn.Linear(2, 3).state_dict()
    torch.save(state, tmp_path / "left.pt")
    torch.save({key: value + 1 for key, value in state.items()}, tmp_path / "right.pt")
    done = run("diff", tmp_path / "left.pt", tmp_path / "right.pt", "--values")
    assert done.status == 1
    assert "2 tensors with other values" in done.out
    assert "weight: 6 of 6 elements differ" in done.out
    assert "fix" not in done.said
    renamed = {f"net.{key}": value + 1 for key, value in state.items()}
    torch.save(renamed, tmp_path / "renamed.pt")
    out = run("diff", tmp_path / "left.pt", tmp_path / "renamed.pt", "--values").out
    assert "fix: ckpttool remap" in out
