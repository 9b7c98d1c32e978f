"""Two files of nested containers that differ in at most one tensor: the same only if all compared
entries are.
"""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Iterator
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from command import Run, main

SEEDS = int(os.environ.get("CKPTTOOL_SEEDS", "60"))
KEYS = (1, 2, "1", "a", "b", "a.b", "model", "state_dict", "rng", "c d", (1, 2), None, True, 1.5)
Place = tuple[Any, ...]


def container(draw: random.Random, depth: int = 0) -> Any:
    kind = (
        draw.choice(["tensor", "tensor", "tensor", "dict", "list", "plain"])
        if 0 < depth < 4
        else "dict"
    )
    if kind == "tensor" or depth == 4:
        return torch.randn(draw.choice([(), (2,), (2, 3), (0,)]))
    if kind == "dict":
        return {draw.choice(KEYS): container(draw, depth + 1) for _ in range(draw.randint(1, 4))}
    result = [container(draw, depth + 1) for _ in range(draw.randint(0, 3))]
    return result if kind == "list" else draw.choice([3, None, "x", tuple(result)])


def tensors(value: Any, place: Place = ()) -> Iterator[tuple[Place, torch.Tensor]]:
    """Yield each tensor with its path, which distinguishes 1 from "1"."""
    if isinstance(value, torch.Tensor):
        yield place, value
    elif isinstance(value, (dict, list, tuple)):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from tensors(part, (*place, repr(key)))


def changed(value: Any, draw: random.Random) -> Any:
    """Return a copy in which one tensor has another value, shape or dtype, or is not a tensor."""
    result = copy.deepcopy(value)
    parents = [result, *(part for part in _nested(result) if isinstance(part, (dict, list)))]
    places = [
        (parent, key)
        for parent in parents
        for key in _keys(parent)
        if isinstance(parent[key], torch.Tensor)
    ]
    if places:
        parent, key = draw.choice(places)
        parent[key] = draw.choice(
            [parent[key] + 1, parent[key].unsqueeze(0), parent[key].double(), "gone"]
        )
    return result


def _keys(value: Any) -> list[Any]:
    return list(value) if isinstance(value, dict) else list(range(len(value)))


def _nested(value: Any) -> Iterator[Any]:
    if isinstance(value, (dict, list, tuple)):
        for key in _keys(value):
            yield value[key]
            yield from _nested(value[key])


def same(left: dict[Place, torch.Tensor], right: dict[Place, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        left[place].dtype == right[place].dtype and torch.equal(left[place], right[place])
        for place in left
    )


class Pair(NamedTuple):
    """Two files; `equal` if torch reads the same tensors from both."""

    paths: tuple[str, str]
    equal: bool


def save_pair(left: Any, draw: random.Random, folder: Path) -> Pair:
    """Save the value, and a copy of it in which a tensor is changed in two of three cases."""
    right = draw.choice([copy.deepcopy, partial(changed, draw=draw), partial(changed, draw=draw)])(
        left
    )
    paths = str(folder / "left.pt"), str(folder / "right.pt")
    for path, value in zip(paths, (left, right)):
        torch.save(value, path)
    return Pair(paths, same(dict(tensors(left)), dict(tensors(right))))


def optimizer(draw: random.Random) -> dict[str, Any]:
    """Return an optimizer state_dict with custom state, under names that may clash."""
    params = draw.choice([(0, 1), ("a", "a.b")])
    states = {param: {name: container(draw, 2) for name in ("b.c", "c", "m")} for param in params}
    extra = {draw.choice(("0", "b.c", "x")): container(draw, 2), "scaler": container(draw, 1)}
    (name, state), *rest = extra.items()
    return {
        "state": {**states, name: state},
        "param_groups": [{"params": [*params], "lr": 0.1}],
        **dict(rest),
    }


@pytest.mark.parametrize("seed", range(SEEDS))
def test_files_are_the_same_only_if_all_tensors_are(
    seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draw = random.Random(seed)
    pair = save_pair(container(draw), draw, tmp_path)
    status = main(["diff", *pair.paths, "--values"])
    captured = capsys.readouterr()
    assert "internal error" not in captured.err
    assert status in ((0, 2) if pair.equal else (1, 2)) or "not compared" in captured.out, (
        captured.out
    )


@pytest.mark.parametrize("seed", range(SEEDS // 4))
def test_optimizers_are_the_same_only_if_all_tensors_are(
    seed: int, tmp_path: Path, run: Run
) -> None:
    draw = random.Random(seed)
    pair = save_pair(optimizer(draw), draw, tmp_path)
    done = run("diff", *pair.paths, "--values")
    assert done.status in ((0, 2) if pair.equal else (1, 2)), done.out


@pytest.mark.parametrize("seed", range(SEEDS // 4))
def test_statistics_of_each_tensor_match_its_values(seed: int, tmp_path: Path, run: Run) -> None:
    draw = random.Random(seed)
    value = draw.choice([container, optimizer])(draw)
    torch.save(value, tmp_path / "a.pt")
    listed = run("inspect", tmp_path / "a.pt", "--stats", "--format", "json").data["tensors"]
    expected = sorted(sha256(tensor.numpy().tobytes()).hexdigest() for _, tensor in tensors(value))
    assert sorted(one["stats"]["sha256"] for one in listed) == expected
