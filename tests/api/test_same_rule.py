"""A rename has the same plan or the same error in a rules file and in Python as a string or a
list.
"""

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
    """Return the plan of the remap, or its error."""
    try:
        done = call()
    except ckpttool.CkptError as error:
        return sorted(problem.key for problem in error.problems), type(error).__name__
    return (
        done.plan.to_json(),
        done.missing,
        sorted(entry.key for s in done.result.sections for entry in s.tensors),
    )


@pytest.mark.parametrize("seed", range(12))
def test_a_rule_has_the_same_effect_in_every_form(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rng = random.Random(seed)
    names = tuple(rng.sample(NAMES, 3))
    new = tuple({"a": rng.choice(["x", "a"])}.get(name, name) for name in names)
    old, target = partial(build, names, rng.random() < 0.3), partial(build, new)
    model = old()
    optimizer = torch.optim.AdamW(model.parameters())
    sum(value.sum() for value in model.parameters()).backward()
    optimizer.step()
    prefix = rng.choice(["", "module."])
    saved: dict[str, Any] = {
        "model": {prefix + key: value for key, value in model.state_dict().items()}
    }
    if rng.random() < 0.5:
        saved["optimizer"] = optimizer.state_dict()
    torch.save(saved, "old.pt")
    torch.save({f"_orig_mod.{key}": value for key, value in model.state_dict().items()}, "like.pt")
    options: dict[str, Any] = {}
    if rng.random() < 0.7:
        options["model"] = old
        if rng.random() < 0.6:
            options["to_model"] = target
        if rng.random() < 0.4:
            options["optimizer"] = torch.optim.AdamW
    if rng.random() < 0.4 and "model" in options:
        options["to"] = rng.choice(["serialized", "runtime", "compile"])
    elif rng.random() < 0.3:
        options["like"] = "like.pt"
    rule = rng.choice(
        ["a.{x} => x.{x}", "{n}.weight => {n}.w", "{p*}.a.{x} => {p*}.x.{x}", "nowhere => w"]
    )
    Path("rules.toml").write_text(f"[[rule]]\nrename = {json.dumps(rule)}\n")
    answers = [
        answer(partial(ckpttool.remap, "old.pt", **options, **rules))
        for rules in ({"rule": rule}, {"rule": [rule]}, {"rules": "rules.toml"})
    ]
    assert answers[0] == answers[1] == answers[2], (rule, sorted(options))


def test_a_rule_converts_a_checkpoint_to_another_model(tmp_path: Path) -> None:
    torch.save(build(NAMES).state_dict(), tmp_path / "old.pt")
    models: dict[str, Any] = {
        "model": partial(build, NAMES),
        "to_model": partial(build, ("x", "b", "c")),
    }
    ckpttool.remap(
        str(tmp_path / "old.pt"), str(tmp_path / "new.pt"), rule="a.{x} => x.{x}", **models
    )
    build(("x", "b", "c")).load_state_dict(torch.load(tmp_path / "new.pt"))
