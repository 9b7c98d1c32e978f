"""The key listing of an HTML report, and `inspect` for nearly empty files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

import ckpttool
from ckpttool.report.documents.diff import findings
from command import Run


def test_keys_are_listed_in_the_order_of_the_right_side(tmp_path: Path) -> None:
    """Keys only on the left come last. A tensor whose shape depends on values has no size."""
    sparse = torch.eye(2).to_sparse()
    torch.save({"old": torch.ones(3), "b": sparse, "a": torch.ones(2)}, tmp_path / "left.pt")
    torch.save({"a": torch.ones(2), "b": sparse, "new": torch.ones(1)}, tmp_path / "right.pt")
    found = list(findings(ckpttool.diff(str(tmp_path / "left.pt"), str(tmp_path / "right.pt"))))
    shown = {
        name.key: (name.dtype, name.shape) for one in found for name in (*one.left, *one.right)
    }
    assert shown["b"] == ("float32 sparse_coo", "[2, 2]")
    assert shown["old"] == ("float32", "[3]")
    assert [(one.left or one.right)[0].key for one in found if one.status != "unexpected"] == [
        "a",
        "b",
        "new",
    ]
    names = ckpttool.trace("torch.nn:Linear(in_features=2, out_features=3)")
    loose = replace(
        names, serialized=(replace(names.serialized[0], shape=None), names.serialized[1])
    )
    sizes = {
        name.key: name.nbytes for one in findings(ckpttool.diff(model=loose)) for name in one.left
    }
    assert sizes == {"weight": None, "bias": 12}


def test_inspect_of_empty_tensors_and_of_an_optimizer(tmp_path: Path, run: Run) -> None:
    torch.save({"w.a": torch.empty(0, 3), "w.b": torch.empty(0)}, tmp_path / "none.pt")
    done = run("inspect", tmp_path / "none.pt", "--depth", "1")
    assert (done.status, "0.0%" in done.out) == (0, True)
    layer = torch.nn.Linear(2, 2)
    torch.save(torch.optim.SGD(layer.named_parameters(), 0.1).state_dict(), tmp_path / "o.pt")
    rows = [line.split() for line in run("inspect", tmp_path / "o.pt").out.splitlines()]
    assert [row for row in rows if row[-1:] in (["weight"], ["bias"])] == [
        ["(root)", "0", "0", "weight"],
        ["(root)", "0", "1", "bias"],
    ]


def test_the_last_key_is_not_hidden_behind_a_line_that_says_so(tmp_path: Path, run: Run) -> None:
    torch.save({"w": torch.ones(1)}, tmp_path / "left.pt")
    letters = "abcdefghijk"
    for count, is_hidden in ((9, False), (10, True)):
        names = {f"{letter}.w": torch.ones(2) for letter in letters[:count]}
        torch.save({"w": torch.ones(1), **names}, tmp_path / "right.pt")
        out = run("diff", tmp_path / "left.pt", tmp_path / "right.pt").out
        assert ("  ... 2 more keys (--all)" in out) == is_hidden
        assert ("  i.w\n" in out) != is_hidden
