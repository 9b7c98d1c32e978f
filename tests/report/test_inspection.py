"""The output of `inspect`: success is shown as such in every format, and entries keep their own
shapes.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from command import Run, notes_in


@pytest.mark.parametrize(
    ("format", "good", "bad"),
    [
        ("markdown", "✅", "❌"),
        ("github", "::notice", "::error"),
        ("html", "verdict ok", "verdict bad"),
    ],
)
def test_result_is_shown_as_success(
    tmp_path: Path, run: Run, format: str, good: str, bad: str
) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "a.pt")
    done = run("inspect", tmp_path / "a.pt", "--format", format)
    assert done.status == 0
    assert good in done.out
    assert bad not in done.out


def test_key_may_equal_the_path_into_another_entry(tmp_path: Path, run: Run) -> None:
    torch.save(
        {"fc": (torch.ones(2),), "fc.0": torch.ones(2), "fc.1": torch.ones(2)}, tmp_path / "a.pt"
    )
    done = run("inspect", tmp_path / "a.pt")
    assert (
        done.status,
        [line.split()[:2] for line in done.out.splitlines() if "fc.{0-1}" in line],
    ) == (
        0,
        [["3", "fc.{0-1}"]],
    )


def test_nested_tensor_keeps_its_shape_and_is_not_an_alias(tmp_path: Path, run: Run) -> None:
    tied = torch.ones(2)
    torch.save({"a": tied, "fc.0": tied, "fc": [torch.zeros(5)]}, tmp_path / "a.pt")
    shown = run("inspect", tmp_path / "a.pt", "--sort", "bytes").out
    assert [line.split() for line in shown.splitlines() if line.startswith("  fc.0")][:2] == [
        ["fc.0", "float32", "[5]", "20", "bytes"],
        ["fc.0", "float32", "[2]", "8", "bytes"],
    ]
    found = run("inspect", tmp_path / "a.pt", "--format", "json").data["tensors"]
    assert [(one["key"], one["alias_of"], one.get("inside")) for one in found][1:] == [
        ("fc.0", "a", None),
        ("fc.0", None, "fc"),
    ]
    assert run("inspect", tmp_path / "a.pt", "--format", "html").out.count("second name of a") == 1


@pytest.mark.parametrize(
    ("pattern", "inside"),
    [("fc", ["fc", "fc"]), ("fc.0", [None, "fc"]), ("fc.1", ["fc"]), ("w", [None])],
)
def test_filter_matches_nested_tensors(
    pattern: str, inside: list[str | None], tmp_path: Path, run: Run
) -> None:
    torch.save(
        {"w": torch.ones(1), "fc.0": torch.ones(2), "fc": [torch.ones(3), torch.ones(4)]},
        tmp_path / "a.pt",
    )
    done = run("inspect", tmp_path / "a.pt", "--filter", pattern, "--format", "json")
    assert [one.get("inside") for one in done.data["tensors"]] == inside
    assert f"{len(inside)} of 4 tensors" in notes_in(done.data)[-1]
