"""Rules that rename a model with its optimizer: torch still assigns each parameter its own state by
position.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

import ckpttool

NAMES = ["a", "b", "c", "d"]
RENAMES = {
    "one": {"a": "z"},
    "swap": {"a": "b", "b": "a"},
    "all": {name: f"{name}{name}" for name in NAMES},
    "no rename": {},
}


class Net(nn.Module):
    """Layers of one shape, registered in this order, so that only order and names distinguish
    them.
    """

    def __init__(self, layers: Sequence[str]) -> None:
        super().__init__()
        for name in layers:
            self.add_module(name, nn.Linear(2, 2))


def sgd(model: nn.Module, groups: int, named: bool) -> torch.optim.Optimizer:
    params = [pair if named else pair[1] for pair in model.named_parameters()]
    parts: list[Any] = [params[:3], params[3:]] if groups == 2 else [params]
    return torch.optim.SGD(
        [{"params": part, "weight_decay": 0.5 * at} for at, part in enumerate(parts)], 0.1, 0.9
    )


def trained(
    layers: Sequence[str], groups: int, named: bool
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Train so that every momentum is twice its parameter."""
    model = Net(layers)
    optimizer = sgd(model, groups, named)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with torch.no_grad():
        for owner, own in optimizer.state.items():
            own["momentum_buffer"].copy_(owner.normal_() * 2)
    return model, optimizer


def saved(model: nn.Module, optimizer: torch.optim.Optimizer, form: str) -> Mapping[str, Any]:
    if form.startswith("id"):
        return optimizer.state_dict()
    return get_optimizer_state_dict(
        model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=form == "flat")
    )


def loads(path: Path, layers: Sequence[str], groups: int) -> bool:
    model, found = Net(layers), torch.load(path)
    optimizer = sgd(model, groups, named=False)
    model.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
    return all(
        torch.equal(optimizer.state[p]["momentum_buffer"], p.detach() * 2)
        for p in model.parameters()
    )


@pytest.mark.parametrize("form", ["id", "id with names", "fqn", "flat"])
@pytest.mark.parametrize("kind", RENAMES)
def test_ids_and_keys_are_in_model_order_after_a_rename(
    kind: str, form: str, tmp_path: Path
) -> None:
    path, out = tmp_path / "old.pt", tmp_path / "out.pt"
    for seed in range(3):
        chance = random.Random(f"{form} {kind} {seed}")
        renames, named = RENAMES[kind], form == "id with names"
        other = form != "id" and seed > 0  # the file was saved by another definition than MODEL
        groups = 1 if other else chance.choice([1, 2])
        model, optimizer = trained(chance.sample(NAMES, 4) if other else NAMES, groups, named)
        torch.save({"model": model.state_dict(), "optimizer": saved(model, optimizer, form)}, path)
        rules = [f"{old}.{{x*}} => {new}.{{x*}}" for old, new in renames.items()]
        options: dict[str, Any] = {"rule": rules}
        if rules and chance.random() < 0.5:
            (tmp_path / "rules.toml").write_text(f"[[rule]]\nrename = {rules}\n")
            options = {"rules": str(tmp_path / "rules.toml")}
        if groups == 2:
            options["optimizer"] = partial(sgd, groups=groups, named=False)
        definition = partial(Net, NAMES)
        done = ckpttool.remap(
            str(path), str(out), model=definition, optimizer_keys="id", force=True, **options
        )
        layers = [renames.get(name, name) for name in NAMES]
        assert (
            list(dict.fromkeys(key.partition(".")[0] for key in torch.load(out)["model"])) == layers
        ), seed
        assert loads(out, layers, groups), seed
        assert not done.optimizers[0].new
