"""The key listing of an HTML report, and `inspect` for nearly empty files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch

from command import Done, Run
from names_files import names_file, ref, runtime, serialized


def listing_of(done: Done) -> Any:
    """Return the key listing that an HTML report holds for its table."""
    found = re.search(r'<script type="application/json" id="listing">(.*?)</script>', done.out)
    assert found is not None
    return json.loads(found[1])


def outlines_of(listing: Any) -> dict[str, list[Any]]:
    """Return dtype, shape and size of each key of the left, and of the keys that only the right
    has.
    """
    outlines: dict[str, list[Any]] = {}
    for _, _, left, left_outlines, *right in listing["rows"]:
        keys, numbers = (left, left_outlines) if left else right
        for key, number in zip(keys, numbers):
            outlines[key] = listing["outlines"][number]
    return outlines


def test_keys_are_listed_in_the_order_of_the_right_side(tmp_path: Path, run: Run) -> None:
    sparse = torch.eye(2).to_sparse()
    torch.save({"old": torch.ones(3), "b": sparse, "a": torch.ones(2)}, tmp_path / "left.pt")
    torch.save({"a": torch.ones(2), "b": sparse, "new": torch.ones(1)}, tmp_path / "right.pt")
    done = run("diff", tmp_path / "left.pt", tmp_path / "right.pt", "--format", "html")
    listing = listing_of(done)
    assert done.status == 1
    assert outlines_of(listing)["b"][:2] == ["float32 sparse_coo", "[2, 2]"]
    assert outlines_of(listing)["old"][:2] == ["float32", "[3]"]
    keys = [(row[2] or row[4])[0] for row in listing["rows"]]
    assert [key for key in keys if key != "old"] == ["a", "b", "new"]


def test_a_tensor_whose_shape_depends_on_values_has_no_size(tmp_path: Path, run: Run) -> None:
    names = names_file(
        tmp_path / "names.json",
        [runtime("weight"), runtime("bias")],
        [serialized("weight", ref("weight"), size=None), serialized("bias", ref("bias"), size=3)],
    )
    done = run("diff", "--model", names, "--format", "html")
    sizes = {key: outline[2] for key, outline in outlines_of(listing_of(done)).items()}
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
