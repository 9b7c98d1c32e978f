"""State dicts whose tensors differ in several ways at once: none of the ways hides another,
whatever is accepted.
"""

from __future__ import annotations

import os
import random
import shlex
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import ckpttool
from command import main

SEEDS = int(os.environ.get("CKPTTOOL_SEEDS", "80"))
KEYS = ("a.w", "a.b", "b.w", "b.b")
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
STATUSES = ("renamed", "shape", "dtype", "value", "missing", "unexpected")
EVERYTHING = "{x*}"


class Fact(NamedTuple):
    """What really differs about one tensor with these names."""

    left: str | None
    right: str | None
    statuses: frozenset[str]


def states(
    draw: random.Random,
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, str]]:
    """Return two state dicts, and the names that the left has for tensors of the right."""
    right = {key: torch.rand(draw.choice([(2,), (2, 3)])).to(draw.choice(DTYPES)) for key in KEYS}
    prefix = draw.choice(["", "module.", "_orig_mod."])
    left: dict[str, torch.Tensor] = {}
    names: dict[str, str] = {}
    for key, tensor in right.items():
        changes = set(
            draw.choices(["none", "dtype", "value", "shape", "gone"], [6, 3, 3, 1, 1], k=2)
        )
        if "gone" in changes and (left or key != KEYS[-1]):  # a file without tensors is refused
            continue
        tensor = tensor + 1 if "value" in changes else tensor
        tensor = tensor.to(draw.choice(DTYPES)) if "dtype" in changes else tensor
        names[key] = prefix + key
        left[names[key]] = tensor.unsqueeze(0).clone() if "shape" in changes else tensor.clone()
    if draw.random() < 0.2:
        left[f"{prefix}more"] = torch.rand(7)
    return left, right, names


def facts(
    left: dict[str, torch.Tensor],
    right: dict[str, torch.Tensor],
    names: dict[str, str],
    values: bool,
    dtypes: bool,
) -> list[Fact]:
    found = [
        Fact(key, None, frozenset({"unexpected"})) for key in left if key not in names.values()
    ]
    for key, expected in right.items():
        if key not in names:
            found.append(Fact(None, key, frozenset({"missing"})))
            continue
        actual, statuses = left[names[key]], set()
        if names[key] != key:
            statuses.add("renamed")
        if actual.shape != expected.shape:
            statuses.add("shape")
        else:
            if actual.dtype != expected.dtype and dtypes:
                statuses.add("dtype")
            if values and not torch.equal(actual.to(expected.dtype), expected):
                statuses.add("value")
        found.append(Fact(names[key], key, frozenset(statuses)))
    return found


def passes(found: list[Fact], fail_on: list[str], ignored: list[tuple[list[str], str]]) -> bool:
    """Return whether no difference is left; torch refuses a shape even with strict=False."""
    left_over = set[str]()
    for fact in found:
        lines = [
            statuses for statuses, key in ignored if key in (EVERYTHING, fact.left, fact.right)
        ]
        left_over |= fact.statuses.difference(*lines)
    return not left_over.intersection([*fail_on, "shape"] if fail_on else STATUSES)


def model(state: dict[str, torch.Tensor]) -> nn.Module:
    result = nn.Module()
    for key, tensor in state.items():
        name, _, leaf = key.partition(".")
        if name not in dict(result.named_children()):
            result.add_module(name, nn.Module())
        result.get_submodule(name).register_buffer(leaf, torch.zeros_like(tensor))
    return result


@pytest.mark.parametrize("seed", range(SEEDS))
def test_each_difference_of_a_tensor_counts(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    left, right, names = states(draw)
    torch.save(left, tmp_path / "left.pt")
    torch.save(right, tmp_path / "right.pt")
    loads = names == {key: key for key in KEYS} and len(left) == len(right)
    loads = loads and all(left[key].shape == right[key].shape for key in KEYS)
    with_model = model(right)
    if loads:
        with_model.load_state_dict(left, strict=True)
    else:
        with pytest.raises(RuntimeError):
            with_model.load_state_dict(left, strict=True)

    fail_on = sorted(draw.sample(STATUSES, draw.randint(0, 4)))
    ignored = [
        (draw.sample(STATUSES, draw.randint(1, 3)), draw.choice([EVERYTHING, *KEYS, *left]))
        for _ in range(draw.randint(0, 3))
    ]
    ignore_dtype, values = draw.random() < 0.5, draw.random() < 0.5
    options: dict[str, Any] = {
        "ignore_dtype": ignore_dtype,
        "fail_on": ",".join(fail_on) or None,
        "ignore": [f"{','.join(statuses)} {key} # reason" for statuses, key in ignored],
    }
    found = facts(left, right, names, values, not ignore_dtype)
    two = ckpttool.diff(
        str(tmp_path / "left.pt"), str(tmp_path / "right.pt"), values=values, **options
    )
    assert two.identical is not any(fact.statuses for fact in found)
    assert two.passes is passes(found, fail_on, ignored)
    if any("renamed" in fact.statuses for fact in found):
        assert main(shlex.split(two.fix[-1])[1:]) == 0
        fixed = ckpttool.diff(
            str(next(tmp_path.glob("left.*.pt"))), str(tmp_path / "right.pt"), ignore_dtype=True
        )
        assert not any("renamed" in entry.statuses for entry in fixed.entries)

    found = facts(left, right, names, False, not ignore_dtype)
    one = ckpttool.diff(str(tmp_path / "left.pt"), model=model(right), **options)
    assert one.identical is not any(fact.statuses for fact in found)
    assert one.passes is passes(found, fail_on, ignored)
    if ignore_dtype:
        assert one.identical is loads
