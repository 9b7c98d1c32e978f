"""A rename means the same as `--rule`, in a file, and in Python as a string or a list: one plan, or one refusal."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpttool

NAMES = ("a", "b", "c")


def build(names: tuple[str, ...], tied: bool = False) -> nn.Module:
    model = nn.ModuleDict({name: nn.Linear(2, 2) for name in names})
    if tied:
        model[names[0]].weight = model[names[1]].weight
    return model


def answer(call: Callable[[], Any]) -> object:
    """The plan of the remap, or what it is refused for."""
    try:
        done = call()
    except ckpttool.CkptError as error:
        return sorted(problem.key for problem in error.problems), type(error).__name__
    return done.plan.to_json(), done.missing, sorted(entry.key for s in done.result.sections for entry in s.tensors)


@pytest.mark.parametrize("seed", range(12))
def test_a_rule_means_the_same_everywhere(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    chance = random.Random(seed)
    names = tuple(chance.sample(NAMES, 3))
    new = tuple({"a": chance.choice(["x", "a"])}.get(name, name) for name in names)
    old, to = partial(build, names, chance.random() < 0.3), partial(build, new)
    model = old()
    optimizer = torch.optim.AdamW(model.parameters())
    sum(value.sum() for value in model.parameters()).backward()
    optimizer.step()
    prefix = chance.choice(["", "module."])
    saved: dict[str, Any] = {"model": {prefix + key: value for key, value in model.state_dict().items()}}
    if chance.random() < 0.5:
        saved["optimizer"] = optimizer.state_dict()
    torch.save(saved, "old.pt")
    torch.save({f"_orig_mod.{key}": value for key, value in model.state_dict().items()}, "like.pt")
    options: dict[str, Any] = {}
    if chance.random() < 0.7:
        options["model"] = old
        if chance.random() < 0.6:
            options["to_model"] = to
        if chance.random() < 0.4:
            options["optimizer"] = torch.optim.AdamW
    if chance.random() < 0.4 and "model" in options:
        options["to"] = chance.choice(["serialized", "runtime", "compile"])
    elif chance.random() < 0.3:
        options["like"] = "like.pt"
    rule = chance.choice(["a.{x} => x.{x}", "{n}.weight => {n}.w", "{p*}.a.{x} => {p*}.x.{x}", "nowhere => w"])
    Path("rules.toml").write_text(f"[[rule]]\nrename = {json.dumps(rule)}\n")
    found = [
        answer(partial(ckpttool.remap, "old.pt", **options, **own))
        for own in ({"rule": rule}, {"rule": [rule]}, {"rules": "rules.toml"})
    ]
    assert found[0] == found[1] == found[2], (rule, sorted(options))


def test_a_rule_leads_to_another_model(tmp_path: Path) -> None:
    torch.save(build(NAMES).state_dict(), tmp_path / "old.pt")
    models: dict[str, Any] = {"model": partial(build, NAMES), "to_model": partial(build, ("x", "b", "c"))}
    ckpttool.remap(str(tmp_path / "old.pt"), str(tmp_path / "new.pt"), rule="a.{x} => x.{x}", **models)
    build(("x", "b", "c")).load_state_dict(torch.load(tmp_path / "new.pt"))
