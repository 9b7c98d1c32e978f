"""`diff3 BASE LEFT RIGHT` against a simple merge of state_dicts, tensor by tensor."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpttool
from ckpttool.core.errors import CkptError
from command import Run

State = dict[str, torch.Tensor]
BASE = {f"layers.{index}.w": torch.full((2, 3), float(index)) for index in range(6)}


def edited(draw: random.Random) -> State:
    """Return the base with a few random changes, which are sometimes the same on both sides."""
    state = {key: value.clone() for key, value in BASE.items()}
    for key in draw.sample(list(state), draw.randrange(4)):
        kind = draw.choice(["drop", "value", "dtype", "shape"])
        if kind == "drop":
            del state[key]
        else:
            changed = {"value": state[key] + 1, "dtype": state[key].half(), "shape": state[key].T.contiguous()}
            state[key] = changed[kind]
    for key in draw.sample(["a", "b", "c"], draw.randrange(3)):
        state[key] = torch.full((2,), float(draw.randrange(2)))
    return state


def same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.dtype == other.dtype and torch.equal(one, other)


@pytest.mark.parametrize("seed", range(30))
def test_each_change_is_attributed_to_the_right_side(seed: int, tmp_path: Path, run: Run) -> None:
    draw = random.Random(seed)
    left, right = edited(draw), edited(draw)
    paths = [str(tmp_path / f"{name}.pt") for name in ("left", "right", "base")]
    for state, path in zip((left, right, BASE), paths):
        torch.save(state, path)
    expected = {}
    for key in {**BASE, **left, **right}:
        by_left, by_right = (not same(BASE.get(key), side.get(key)) for side in (left, right))
        both = "both" if same(left.get(key), right.get(key)) else "conflict"
        if by_left or by_right:
            expected[key] = both if by_left and by_right else "left" if by_left else "right"
    done = run("diff3", paths[2], *paths[:2], "--values", "--format", "json")
    result = done.data
    keys = [
        (e["base"] or [*(e["left"] or {}).get("keys", []), *(e["right"] or {}).get("keys", [])])[0]
        for e in result["entries"]
    ]
    assert dict(zip(keys, (entry["by"] for entry in result["entries"]))) == expected
    assert len(keys) == len(expected)
    assert result["conflicts"] == ("conflict" in expected.values()) == bool(done.status)


def saved(path: Path, state: dict[str, Any]) -> str:
    torch.save(state, path)
    return str(path)


def test_a_rename_and_new_values_merge_but_two_tensors_with_one_name_conflict(tmp_path: Path) -> None:
    base = saved(tmp_path / "base.pt", BASE)
    wrapped = saved(tmp_path / "ddp.pt", {f"module.{key}": value for key, value in BASE.items()})
    trained = saved(tmp_path / "trained.pt", {key: value + 1 for key, value in BASE.items()})
    result = ckpttool.diff3(base, wrapped, trained, values=True)
    assert result.passes
    assert result.summary == {"both": 6}
    other = saved(tmp_path / "other.pt", {**BASE, "module.layers.0.w": torch.ones(1)})
    result = ckpttool.diff3(base, wrapped, other, values=True)
    assert [(point.by, point.base) for point in result.points if point.by == "conflict"] == [
        ("conflict", ("layers.0.w",))
    ]


def test_a_rename_and_a_different_rename_with_new_values_conflict(tmp_path: Path) -> None:
    """It does not matter which side only renamed the tensor."""
    base = saved(tmp_path / "base.pt", BASE)
    ddp = saved(tmp_path / "ddp.pt", {f"module.{key}": value for key, value in BASE.items()})
    both = saved(tmp_path / "both.pt", {f"_orig_mod.{key}": value + 1 for key, value in BASE.items()})
    for sides in ((ddp, both), (both, ddp)):
        assert ckpttool.diff3(base, *sides, values=True).summary == {"conflict": len(BASE)}


def test_ignored_dtypes_are_not_changes(tmp_path: Path) -> None:
    base = saved(tmp_path / "base.pt", BASE)
    half = saved(tmp_path / "half.pt", {key: value.double() for key, value in BASE.items()})
    assert ckpttool.diff3(base, half, base, values=True).summary == {"left": len(BASE)}
    assert not ckpttool.diff3(base, half, base, values=True, ignore_dtype=True).points


def test_a_manifest_is_refused_at_each_position(tmp_path: Path, run: Run) -> None:
    base, manifest = saved(tmp_path / "base.pt", BASE), str(tmp_path / "m.json")
    assert run("inspect", base, "--manifest", manifest).status == 0
    for three in ((manifest, base, base), (base, manifest, base), (base, base, manifest)):
        done = run("diff3", *three)
        assert (done.status, "a manifest has no values to compare with a base" in done.err) == (2, True)


@pytest.mark.parametrize("options", [["--suggest", "r.toml"], ["--optimizer", "torch.optim:SGD", "--model", "m:f"]])
def test_wrong_usage_is_an_error(options: list[str], tmp_path: Path, run: Run) -> None:
    base = saved(tmp_path / "base.pt", BASE)
    assert run("diff3", base, base, base, *options).status == 2
    done = run("diff3", base, base)
    assert (done.status, "usage: ckpttool diff3 [OPTIONS]" in done.err) == (2, True)
    with pytest.raises(CkptError):
        ckpttool.diff3(base, base, str(tmp_path / "none.pt"))
