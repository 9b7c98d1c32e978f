"""`diff --values` says how far each tensor changed: torch's own norms, the largest change first."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import ckpttool
from command import Run


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int32, torch.complex64]
)
def test_norms_are_those_of_torch(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    left = (torch.randn(50, 3) * 9).to(dtype)
    right = left.clone()
    right[:7] += 2
    (entry,) = ckpttool.diff({"w": left}, {"w": right}, values=True).entries
    assert entry.change is not None
    wide = torch.complex128 if dtype.is_complex else torch.float64
    distance = right.to(wide) - left.to(wide)
    norm = float(torch.linalg.vector_norm(distance))
    assert entry.change.norm == pytest.approx(norm)
    expected = norm / float(torch.linalg.vector_norm(left.to(wide)))
    assert entry.change.relative == pytest.approx(expected)
    assert entry.change.maximum == pytest.approx(float(distance.abs().max()))
    assert (entry.change.differing, entry.change.elements) == (21, 150)


def test_values_that_are_not_finite_are_counted() -> None:
    left, right = torch.ones(6), torch.ones(6)
    left[0], right[1], right[2], right[3] = float("nan"), float("nan"), float("inf"), 3.0
    (entry,) = ckpttool.diff({"w": left}, {"w": right}, values=True).entries
    change = entry.change
    assert change is not None
    assert (change.nan_left, change.nan_right) == (1, 1)
    assert (change.infinite_left, change.infinite_right) == (0, 1)
    assert (change.norm, change.maximum) == (2.0, 2.0)


def test_shares_and_values_that_are_not_finite_are_not_overstated(run: Run, tmp_path: Path) -> None:
    left = {key: torch.arange(1.0, 1001.0) for key in ("few", "most", "both", "new")}
    right = {key: value.clone() for key, value in left.items()}
    right["few"][1] += 1
    right["most"][1:] += 1
    for side in left, right:
        side["both"][0] = torch.nan
    right["both"][1] += 1
    right["new"][:2] = torch.inf
    torch.save(left, tmp_path / "a.pt")
    torch.save(right, tmp_path / "b.pt")
    out = run("diff", tmp_path / "a.pt", tmp_path / "b.pt", "--values").out
    rows = {line.split()[0]: line for line in out.splitlines() if line.strip()}
    for key, share in ("few", "<1%"), ("most", ">99%"), ("both", "<1%"), ("new", "<1%"):
        assert f" {share} " in f"{rows[key]} ", key
    assert "1 NaN" in rows["both"]
    assert "->" not in rows["both"]
    assert "0 -> 2 infinite" in rows["new"]


def test_a_change_from_zero_has_no_relative_change(run: Run, tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(2)}, tmp_path / "a.pt")
    torch.save({"w": torch.ones(2)}, tmp_path / "b.pt")
    data = run("diff", tmp_path / "a.pt", tmp_path / "b.pt", "--values", "--format", "json").data
    assert data["entries"][0]["change"]["relative"] is None
    assert data["entries"][0]["change"]["maximum"] == 1.0


def test_the_largest_change_of_each_template_comes_first(run: Run, tmp_path: Path) -> None:
    left = {
        f"layers.{layer}.{name}": torch.ones(4) for layer in range(3) for name in ("w", "v", "x")
    }
    right = {key: value.clone() for key, value in left.items()}
    for layer in range(3):
        right[f"layers.{layer}.w"] *= 1 + layer / 10
    right["layers.1.v"][0] += 5
    right["layers.2.x"][0] = float("nan")
    torch.save(left, tmp_path / "a.pt")
    torch.save(right, tmp_path / "b.pt")
    out = run("diff", tmp_path / "a.pt", tmp_path / "b.pt", "--values").out
    table = out.partition("Values, by relative change\n")[2].splitlines()[1:4]
    assert [line.split() for line in table] == [
        ["layers.{}.x", "0", "0", "0", "25%", "0", "->", "1", "NaN", "layers.2.x"],
        ["layers.{}.v", "2.5", "5", "5", "25%", "layers.1.v"],
        ["layers.{}.w", "0.2", "0.4", "0.2", "100%", "layers.2.w"],
    ]
    every = run("diff", tmp_path / "a.pt", tmp_path / "b.pt", "--values", "--all").out
    assert "layers.1.w       0.1" in every.partition("Values, by relative change\n")[2]


def test_the_page_shows_the_relative_change_as_a_bar(run: Run, tmp_path: Path) -> None:
    left = {name: torch.ones(4) for name in ("most", "half", "nan", "same")}
    right = {name: value.clone() for name, value in left.items()}
    right["most"] += 1
    right["half"] += 0.5
    right["nan"][0] = float("nan")
    torch.save(left, tmp_path / "a.pt")
    torch.save(right, tmp_path / "b.pt")
    page = run("diff", tmp_path / "a.pt", tmp_path / "b.pt", "--values", "--format", "html").out
    bars = re.findall(r'key" data-title="tensors">(\w+)<.*?<meter value="([\d.]+)">', page)
    assert bars == [("nan", "1.000"), ("most", "1.000"), ("half", "0.500")]
