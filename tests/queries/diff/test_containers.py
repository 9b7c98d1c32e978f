"""Two files of nested containers, one of them changed in one tensor: the same only where all that is compared is."""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpttool.cli.app import main

SEEDS = int(os.environ.get("CKPTTOOL_SEEDS", "100"))
KEYS = (1, 2, "1", "a", "b", "a.b", "model", "state_dict", "rng", "c d", (1, 2), None, True, 1.5)
Way = tuple[Any, ...]


def container(draw: random.Random, depth: int = 0) -> Any:
    kind = draw.choice(["tensor", "tensor", "tensor", "dict", "list", "plain"]) if 0 < depth < 4 else "dict"
    if kind == "tensor" or depth == 4:
        return torch.randn(draw.choice([(), (2,), (2, 3), (0,)]))
    if kind == "dict":
        return {draw.choice(KEYS): container(draw, depth + 1) for _ in range(draw.randint(1, 4))}
    made = [container(draw, depth + 1) for _ in range(draw.randint(0, 3))]
    return made if kind == "list" else draw.choice([3, None, "x", tuple(made)])


def tensors(value: Any, way: Way = ()) -> Iterator[tuple[Way, torch.Tensor]]:
    """Every tensor under the way to it, which tells 1 from "1"."""
    if isinstance(value, torch.Tensor):
        yield way, value
    elif isinstance(value, (dict, list, tuple)):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from tensors(part, (*way, repr(key)))


def changed(value: Any, draw: random.Random) -> Any:
    """A copy in which one tensor has another value, shape or dtype, or is none."""
    made = copy.deepcopy(value)
    parents = [made, *(part for part in _parts(made) if isinstance(part, (dict, list)))]
    places = [(parent, key) for parent in parents for key in _keys(parent) if isinstance(parent[key], torch.Tensor)]
    if places:
        parent, key = draw.choice(places)
        parent[key] = draw.choice([parent[key] + 1, parent[key].unsqueeze(0), parent[key].double(), "gone"])
    return made


def _keys(value: Any) -> list[Any]:
    return list(value) if isinstance(value, dict) else list(range(len(value)))


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, (dict, list, tuple)):
        for key in _keys(value):
            yield value[key]
            yield from _parts(value[key])


def same(left: dict[Way, torch.Tensor], right: dict[Way, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        left[way].dtype == right[way].dtype and torch.equal(left[way], right[way]) for way in left
    )


@pytest.mark.parametrize("seed", range(SEEDS))
def test_the_same_only_where_all_tensors_are(seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draw = random.Random(seed)
    left = container(draw)
    right = changed(left, draw)
    paths = [str(tmp_path / name) for name in ("left.pt", "right.pt")]
    for path, value in zip(paths, (left, right)):
        torch.save(value, path)
    status = main(["diff", *paths, "--values"])
    said = capsys.readouterr()
    assert "internal error" not in said.err
    equal = same(dict(tensors(left)), dict(tensors(right)))
    assert status in ((0, 2) if equal else (1, 2)) or "not compared" in said.out, said.out
