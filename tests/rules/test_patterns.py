"""The documented syntax of rules, and every rule that is refused."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

import ckpttool
from ckpttool import CkptError, Refused
from ckpttool.ruleset.patterns import Rule, RuleList, matches, parse
from command import Run

RENAMES = [
    # rule, key, new name (None: no match)
    ("a => b", "a", "b"),
    ("a => b", "a.x", None),
    ("a.w => b.w", "a.w", "b.w"),
    (
        "layers.{i}.layer.{rest*} => layers.{i}.{rest*}",
        "layers.3.layer.attn.wq.weight",
        "layers.3.attn.wq.weight",
    ),
    ("layers.{i}.layer.{rest*} => layers.{i}.{rest*}", "layers.3.4.layer.weight", None),
    ("{x} => top.{x}", "w", "top.w"),
    ("{x} => top.{x}", "a.w", None),
    ("{x*} => model.{x*}", "a.b.c", "model.a.b.c"),
    ("module.{x*} => {x*}", "module.a.b", "a.b"),
    ("a.{x*}.w => b.{x*}.w", "a.w", "b.w"),  # {x*} may match no segment
    ("a.{x*}.w => b.{x*}.w", "a.1.2.w", "b.1.2.w"),
    ("{a}.{b} => {b}.{a}", "x.y", "y.x"),
    ("{a}.{a}.w => {a}.w", "x.x.w", "x.w"),
    ("{a}.{a}.w => {a}.w", "x.y.w", None),
    ("a+b.(c) => d", "a+b.(c)", "d"),  # everything else is literal
    ("a+b.(c) => d", "aab.c", None),
    ("a.w => ü.w", "a.w", "ü.w"),
    ("a.{x*} => b.{x*}", "a.x\ny", "b.x\ny"),
    (r"re:layer(\d+)\.(.*) => layers.\1.\2", "layer12.w", "layers.12.w"),
    (r"re:layer(\d+) => x\1", "layer12.w", None),  # a full match or none
    (r"re:(?P<a>.*)_old => \g<a>", "w_old", "w"),
]


def rename(keys: Iterable[str], rules: Sequence[Rule]) -> dict[str, str]:
    names = {}
    for key in keys:
        renamed = RuleList(rules).rename(key)
        names[key] = key if renamed is None else renamed.name
    return names


@pytest.mark.parametrize(("rule", "key", "name"), RENAMES)
def test_renames(rule: str, key: str, name: str | None) -> None:
    assert parse(rule).apply(key) == name


BAD = {
    "no arrow": "a",
    "nothing before the arrow": "=> b",
    "nothing after the arrow": "a =>",
    "a variable that FROM does not bind": "a => {x}",
    "one segment and many": "{x} => {x*}",
    "a variable that is part of a segment": "layer{i} => layers.{i}",
    "invalid regular expression": "re:( => b",
    "unknown group number": r"re:a => \1",
    "invalid group name": r"re:a => \g",
    "a backslash alone": "re:a => \\",
    "unknown escape": r"re:a => \x*",
    "character class in the new name": r"re:a => \d",
}


@pytest.mark.parametrize("name", BAD)
def test_bad_rules_are_usage_errors(name: str) -> None:
    with pytest.raises(CkptError) as caught:
        parse(BAD[name]).apply("a")
    assert caught.value.exit_status == 2
    assert caught.value.hint


def test_reverse() -> None:
    rule = parse("layers.{i}.layer.{rest*} => layers.{i}.{rest*}", reverse=True)
    assert rule.apply("layers.3.attn.w") == "layers.3.layer.attn.w"


@pytest.mark.parametrize("text", ["re:a => b", "a.{x*} => b", "{x}.{y} => {x}"])
def test_rules_without_a_reverse(text: str) -> None:
    with pytest.raises(CkptError):
        parse(text, reverse=True)


def test_ambiguous_match_is_refused() -> None:
    rule = parse("{a*}.layer.{b*} => {a*}.{b*}")
    assert rule.apply("x.layer.w") == "x.w"
    with pytest.raises(Refused, match="more than one way"):
        rule.apply("x.layer.y.layer.w")


def test_middle_of_three_variables_can_be_ambiguous() -> None:
    with pytest.raises(Refused):
        parse("{a*}.{b*}.w.{c*} => {c*}.{b*}.{a*}.v").apply("x.w")


def test_rename_to_an_empty_name_is_refused() -> None:
    for text in ("a.{x*} => {x*}", "re:(x?)a => \\1"):
        with pytest.raises(Refused, match="leaves nothing"):
            parse(text).apply("a")


def test_first_matching_rule_renames() -> None:
    rules = [parse("a.w => x"), parse("a.{r*} => b.{r*}")]
    assert rename(["a.w", "a.v", "c"], rules) == {"a.w": "x", "a.v": "b.v", "c": "c"}


def test_rules_swap_names_at_once() -> None:
    assert rename(["a", "b"], [parse("a => b"), parse("b => a")]) == {"a": "b", "b": "a"}


def test_rules_that_match_nothing_are_refused_by_name() -> None:
    with pytest.raises(Refused) as caught:
        ckpttool.remap({"a": torch.ones(1)}, rule=["a => b", "c => d", "a => e"])
    assert [problem.key for problem in caught.value.problems] == ["c => d", "a => e"]


SEGMENTS = st.lists(st.sampled_from(["a", "b", "layer", "0"]), min_size=1, max_size=5)


@given(SEGMENTS, st.integers(0, 5))
def test_rule_and_its_reverse_cancel_out(segments: list[str], at: int) -> None:
    """The rule adds a prefix at a fixed depth."""
    at = min(at, len(segments) - 1)
    heads = [f"{{x{i}}}" for i in range(at)]
    text = f"{'.'.join([*heads, '{rest*}'])} => {'.'.join([*heads, 'new', '{rest*}'])}"
    key = ".".join(segments)
    new = parse(text).apply(key)
    assert new == ".".join([*segments[:at], "new", *segments[at:]])
    assert parse(text, reverse=True).apply(new) == key


@pytest.mark.parametrize(
    ("pattern", "key", "expected"),
    [
        ("a.b", "a.b", True),
        ("a", "a.b", False),
        ("a.*", "a.b.c", True),
        ("*.bias", "a.b.bias", True),
        ("a.{x}.c", "a.b.c", True),
        ("a.{x}.c", "a.b.b.c", False),
        ("a.{x*}", "a.b.c", True),
        ("re:.*norm.*", "a.norm.w", True),
        ("re:norm", "a.norm.w", False),
        ("re: a.* ", "a.norm.w", True),  # as in a rule
        ("w[0]", "w[0]", True),  # a key may look like a shell pattern
    ],
)
def test_patterns(pattern: str, key: str, expected: bool) -> None:
    assert matches(pattern, key) == expected


def test_a_space_behind_re_does_not_count(run: Run, tmp_path: Path) -> None:
    save_file({"w": np.ones(1), "b": np.ones(1)}, tmp_path / "a.safetensors")
    for number, options in enumerate([("--drop", "re: w"), ("--rule", "re: w => v")]):
        out = tmp_path / f"{number}.safetensors"
        assert run("remap", tmp_path / "a.safetensors", "-o", out, *options).status == 0
    assert load_file(tmp_path / "0.safetensors").keys() == {"b"}
    assert load_file(tmp_path / "1.safetensors").keys() == {"b", "v"}


def test_a_pattern_that_is_not_a_regular_expression() -> None:
    with pytest.raises(CkptError):
        matches("re:(", "a")


@pytest.mark.parametrize(
    ("rule", "hint"),
    [
        ("model.* => backbone.*", "write {x*} for any text, on both sides: 'model.{x*} => backbone.{x*}'"),
        ("a.*.b.* => c.*.*", "'a.{x*}.b.{y*} => c.{x*}.{y*}'"),
        ("model.* => backbone", "write {x*} for any text, on both sides"),
        ("model.* => backbone.{y*}", "write {x*} for any text, on both sides"),
        ("encoder.{x*} -> vit.{x*}", "write 'encoder.{x*} => vit.{x*}'"),
        ("encoder.{x*}->vit.{x*}", "write 'encoder.{x*} => vit.{x*}'"),
        ("old = new", "write 'old => new'"),
        ("layers.{i} => blocks.{j}", "write 'layers.{i} => blocks.{i}'"),
        ("a => b => c", "ckpttool help rules"),
        ("model", "ckpttool help rules"),
    ],
)  # fmt: skip
def test_a_wrong_rule_shows_the_right_one(run: Run, tmp_path: Path, rule: str, hint: str) -> None:
    save_file({"model.weight": np.zeros(1, np.float32)}, tmp_path / "in.safetensors")
    done = run("remap", tmp_path / "in.safetensors", "--dry-run", "--rule", rule)
    assert done.status in (1, 2)
    assert hint in done.err.partition("hint: ")[2], done.err
    shown = re.findall(r"write (?:.*: )?'(.*=>.*)'", done.err)
    for right in shown:
        parse(right)
