"""Files of pruned models: a model without masks gets what `torch.nn.utils.prune.remove` makes
permanent.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import ckpttool
from command import Run, fixes_in


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3)))


def pruned() -> nn.Module:
    model: Any = net()
    prune.l1_unstructured(model[0], "weight", 0.5)
    prune.random_unstructured(model[0], "bias", 0.5)
    prune.ln_structured(model[1][0], "weight", 0.5, n=2, dim=0)
    return model


def permanent() -> dict[str, torch.Tensor]:
    """Return what torch saves after `prune.remove`."""
    made: Any = pruned()
    for module, name in ((made[0], "weight"), (made[0], "bias"), (made[1][0], "weight")):
        prune.remove(module, name)
    return dict(made.state_dict())


def same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    bits = {
        key: value.view(torch.int32) if value.is_floating_point() else value
        for key, value in actual.items()
    }
    wanted = {
        key: value.view(torch.int32) if value.is_floating_point() else value
        for key, value in expected.items()
    }
    return bits.keys() == wanted.keys() and all(torch.equal(bits[key], wanted[key]) for key in bits)


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod."])
def test_fix_makes_pruning_permanent(prefix: str, tmp_path: Path, run: Run) -> None:
    model = pruned()
    torch.save(
        {f"{prefix}{key}": value for key, value in model.state_dict().items()}, tmp_path / "in.pt"
    )
    (fix,) = fixes_in(
        run("diff", tmp_path / "in.pt", "--model", f"{__file__}:net", "--format", "json").data
    )
    words = shlex.split(fix)[1:]
    assert run(*words).status == 0
    result = torch.load(words[-1], weights_only=True)
    assert same(result, permanent())
    live = net()
    ckpttool.load(tmp_path / "in.pt", live)
    assert same(dict(live.state_dict()), permanent())


def test_pruned_model_keeps_its_masks(tmp_path: Path, run: Run) -> None:
    torch.save(
        {f"module.{key}": value for key, value in pruned().state_dict().items()}, tmp_path / "in.pt"
    )
    asked = ("--model", f"{__file__}:pruned", "--to", "serialized")
    assert run("remap", tmp_path / "in.pt", *asked, "-o", tmp_path / "out.pt").status == 0
    assert same(torch.load(tmp_path / "out.pt"), dict(pruned().state_dict()))


def test_state_of_a_pruned_weight_does_not_follow(tmp_path: Path, run: Run) -> None:
    """Its moments are those of the weight before the mask."""
    model: Any = net()
    prune.l1_unstructured(model[0], "weight", 0.5)
    optimizer = torch.optim.AdamW(model.parameters())
    model[0](torch.ones(1, 4)).sum().backward()
    optimizer.step()
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "in.pt"
    )
    asked = ("--model", f"{__file__}:net", "--to", "serialized")
    done = run("remap", tmp_path / "in.pt", *asked, "-o", tmp_path / "out.pt")
    assert (done.status, "--drop optimizer" in done.err) == (1, True)
    assert (
        run(
            "remap", tmp_path / "in.pt", *asked, "--drop", "optimizer", "-o", tmp_path / "out.pt"
        ).status
        == 0
    )
    net().load_state_dict(torch.load(tmp_path / "out.pt", weights_only=True)["model"])
