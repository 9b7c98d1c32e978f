"""The output of `inspect`: success is shown as such in every format, and entries keep their own
shapes.
"""

from __future__ import annotations

import argparse
import collections
import datetime
from pathlib import Path

import numpy as np
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


OBJECTS = {
    "epoch": (12, "int", "12"),
    "lr": (1e-3, "float", "0.001"),
    "done": (True, "bool", "True"),
    "best": (None, "None", ""),
    "name": ("a\nb", "str", "'a\\nb'"),
    "huge": (1 << 20_000, "int", "a number of 20001 bits"),
    "short": ([1, 0.5, "x"], "list", "[1, 0.5, 'x']"),
    "long": ((*range(9),), "tuple", "9 items"),
    "nested": ([[1]], "list", "1 item"),
    "empty": ((), "tuple", "()"),
    "raw": (b"123", "bytes", "3 bytes"),
    "set": ({1}, "set", "1 item"),
    "options": ({"a": 1, "b": {}}, "dict", "2 keys"),
    "ordered": (collections.OrderedDict(a=1), "collections.OrderedDict", "1 key"),
    "history": (np.zeros((5, 3)), "numpy.ndarray", "float64 [5, 3]"),
    "texts": (np.array(["a"]), "numpy.ndarray", ""),
    "args": (argparse.Namespace(lr=1), "argparse.Namespace", ""),
    "day": (datetime.date(2020, 1, 2), "datetime.date(...)", ""),
    "function": (Path, "class or function", "pathlib.Path"),
}


@pytest.mark.parametrize("protocol", [2, 4])
def test_entries_that_are_not_tensors_have_paths_types_and_values(
    tmp_path: Path, run: Run, protocol: int
) -> None:
    state = {"w": torch.ones(2)}
    values = {name: value for name, (value, *_) in OBJECTS.items()}
    content = {"model": state, "run": {"ema": state, "decay": 0.5}, **values}
    path = tmp_path / "a.pt"
    torch.save(content, path, pickle_protocol=protocol)
    done = run("inspect", path, "--all")
    assert f"{len(OBJECTS) + 1} non-tensor entries" in done.out.splitlines()[0]
    table = done.out.partition("Non-tensor entries (copied unchanged)\n")[2].partition("\n\n")[0]
    rows = [line.split(maxsplit=1) for line in table.splitlines()[1:]]
    listed = {key: " ".join(rest.split()) for key, rest in rows}
    expected = {name: f"{kind} {value}".strip() for name, (_, kind, value) in OBJECTS.items()}
    assert listed == {"run.decay": "float 0.5", **expected}
    assert "... 12 more (--all)" in run("inspect", path).out
