"""A rule that no key matches: the hint is a rule that works."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from command import Run

KEYS = ("_orig_mod.blocks.0.weight", "_orig_mod.blocks.1.weight", "_orig_mod.head.bias")


@pytest.fixture(autouse=True)
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({key: torch.ones(2) for key in KEYS}, "a.pt")


@pytest.mark.parametrize(
    "rule",
    [
        "blocks.{x*} => layers.{x*}",  # without the prefix of all keys
        "blocks => layers",  # a module, without the prefix
        "_orig_mod.blocks => layers",  # a module
        "model._orig_mod.blocks.{i}.{x*} => layers.{i}.{x*}",  # with a prefix that no key has
        "_orig_mod.block.{i}.{x*} => layers.{i}.{x*}",  # mistyped
        "_orig_mod.haed.bias => head.bias",
        "_orig_mod.{x} => {x}",  # one segment instead of all
    ],
)
def test_the_hint_is_a_rule_that_works(run: Run, rule: str) -> None:
    done = run("remap", "a.pt", "--rule", rule, "-o", "b.pt")
    assert done.status == 1
    (similar,) = re.findall(r"did you mean '(.*)'\?", done.err)
    assert run("remap", "a.pt", "--rule", similar, "-o", "b.pt").status == 0
    assert set(torch.load("b.pt")) != set(KEYS)


@pytest.mark.parametrize("rule", ["zebra => b", "_orig_mod.blocks.{x}.bias => b.{x}", "re:x => y"])
def test_without_a_similar_rule_the_first_keys_are_named(run: Run, rule: str) -> None:
    done = run("remap", "a.pt", "--rule", rule, "-o", "b.pt")
    assert done.status == 1
    assert "did you mean" not in done.err
    assert f"the keys here begin with {KEYS[0]}, {KEYS[1]}, {KEYS[2]};" in done.err


def test_of_several_rules_the_first_renames_a_key(run: Run) -> None:
    rules = ("--rule", "_orig_mod.{x*} => {x*}", "--rule", "zebra.{x*} => head.{x*}")
    done = run("remap", "a.pt", *rules, "-o", "b.pt")
    assert done.status == 1
    assert "the first --rule that matches a key renames it" in done.err
