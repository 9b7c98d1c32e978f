"""Indexed lookups, and trials on kinds of keys, give the same results as matching every pattern
with every key.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpttool.fixes.rules_file import suggest
from ckpttool.live.model import section_of
from ckpttool.naming import pairing
from ckpttool.naming.evidence import Pair, SideTensors, Tensor
from ckpttool.naming.pairing import infer
from ckpttool.naming.templates import groups
from ckpttool.ruleset import infer_rules
from ckpttool.ruleset.infer_rules import drops, patterns, renames
from ckpttool.ruleset.patterns import PatternSet, Rule, RuleList, matches, parse

SEGMENT = st.sampled_from(["a", "b", "layers", "0", "1", "12", "*", "{n}", "re:a", "x[1]"])
KEYS = st.lists(
    st.lists(SEGMENT, min_size=1, max_size=4).map(".".join), min_size=1, max_size=8, unique=True
)
TEXTS = ["a.b", "a.{x*}", "{x}.b", "0", "re:a.*", "*", "layers.{n}.{x*}", "{x*}.1", "a", "a.b.0"]


def rename(keys: Iterable[str], rules: Sequence[Rule]) -> dict[str, str]:
    names = {}
    for key in keys:
        renamed = RuleList(rules).rename(key)
        names[key] = key if renamed is None else renamed.name
    return names


@given(KEYS, KEYS)
def test_drops_match_only_their_keys(dropped, kept):
    found = drops(dropped, [key for key in kept if key not in dropped])
    assert found is None or all(any(matches(text, key) for text in found) for key in dropped)
    assert found is None or not any(
        matches(text, key) for text in found for key in kept if key not in dropped
    )


@given(KEYS, st.lists(st.sampled_from(TEXTS), max_size=6))
def test_pattern_lookup_equals_matching_each_pattern(keys, texts):
    for key in keys:
        assert set(PatternSet(texts).hits(key)) == {text for text in texts if matches(text, key)}


@given(KEYS, st.lists(st.sampled_from([text for text in TEXTS if text != "*"]), max_size=6))
def test_rule_lookup_equals_trying_each_rule(keys, texts):
    rules = [parse(f"{text} => new.{at}") for at, text in enumerate(texts)]
    for key in keys:
        names = [name for name in (rule.apply(key) for rule in rules) if name is not None]
        renamed = RuleList(rules).rename(key)
        assert (renamed and renamed.name) == (names[0] if names else None)


@given(
    st.lists(
        st.lists(st.sampled_from("ab01"), min_size=1, max_size=4).map(".".join),
        min_size=1,
        unique=True,
    )
)
def test_suggested_patterns_match_only_the_chosen_keys(keys):
    expected, others = keys[::2], keys[1::2]
    texts = patterns(expected, others)
    assert [key for key in keys if any(matches(text, key) for text in texts)] == [
        k for k in keys if k in expected
    ]


@given(KEYS, st.integers(0, 3), st.data())
def test_groups_without_some_tensors(keys, depth, data):
    tensors = {key: Tensor(key, "float32", (2,)) for key in keys}
    stay = data.draw(st.sets(st.sampled_from(keys)))
    left = {key: tensor for key, tensor in tensors.items() if key in stay}
    found = [part.among(left) for one in groups(tensors.values()) for part in one.at_depth(depth)]
    expected = [part for one in groups(left.values()) for part in one.at_depth(depth)]
    assert {(one.template, *one.members) for one in filter(None, found)} == {
        (w.template, *w.members) for w in expected
    }
    assert {m.key for one in expected for m in one.members.values()} == {
        key for key in left if sum(part.isdecimal() for part in key.split(".")) >= depth
    }


def test_names_of_too_many_kinds_are_renamed_individually(monkeypatch):
    monkeypatch.setattr(infer_rules, "_TOO_MANY", 100)
    expected = {f"a{n}.w": f"b{n * 7919 % 10007}.w" for n in range(300)}
    assert rename(expected, [parse(text) for text in renames(expected, [])]) == expected


def test_a_rule_with_an_exception_explains_more_than_two_rules() -> None:
    expected = {"a.c.b": "x.a.c.b", "c": "x.c", "a.a.a": "a.a.a.z", "a": "x.a"}
    assert renames(expected, []) == {
        "a.a.a => a.a.a.z": ["a.a.a"],
        "{x*} => x.{x*}": ["a.c.b", "c", "a"],
    }


@settings(max_examples=60)
@given(
    st.dictionaries(
        st.lists(st.sampled_from(["a", "b", "layers", "0", "1", "2"]), min_size=1, max_size=6).map(
            tuple
        ),
        st.tuples(st.integers(0, 3), st.sampled_from(["a", "x", "0", "1"]), st.booleans()),
        min_size=1,
        max_size=12,
    ),
    st.sampled_from([0, 2, 400]),
)
def test_suggested_renames_give_the_expected_names(changes, kinds):
    """Segments are replaced, inserted or kept, at any position, for any limit on generalized
    kinds.
    """
    names: dict[str, str] = {}
    for parts, (at, segment, put_in) in changes.items():
        new = (
            (*parts[:at], segment, *parts[at if put_in else at + 1 :]) if at < len(parts) else parts
        )
        if ".".join(new) not in names.values():
            names[".".join(parts)] = ".".join(new)
    expected = {old: new for old, new in names.items() if old != new}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(infer_rules, "_MOST_KINDS", kinds)
        assert (
            rename(names, [parse(text) for text in renames(expected, names.keys() - expected)])
            == names
        )


def test_layers_with_another_first_number_are_renamed_individually():
    expected = {f"a.{n}.{m}.w": f"b.{n}.{m + 1}.w" for n in range(2) for m in range(3)}
    rules = renames(expected, [])
    assert sorted(rules) == [f"a.{{n}}.{m}.w => b.{{n}}.{m + 1}.w" for m in range(3)]


def test_redundant_rule_is_omitted():
    """The first rule explains most keys, but later rules explain all of them too."""
    expected = {
        f"{way}.s.{end}": f"{way}.t.{end}" for way in "abc" for end in ("q", f"of_{way}_alone")
    }
    assert sorted(renames(expected, ["z.s.u"])) == [
        f"{way}.s.{{x*}} => {way}.t.{{x*}}" for way in "abc"
    ]


@pytest.mark.parametrize(
    ("limit", "most", "rules"),
    [
        ("_TOO_MANY", 1, ("a.{x*} => b.{x*}",)),
        ("_TOO_MANY", 0, ("a.v => b.v", "a.w => b.w")),
        ("_MOST_KINDS", 1, ("a.{x*} => b.{x*}",)),
        ("_MOST_KINDS", 0, ("a.v => b.v", "a.w => b.w")),
    ],
)
def test_limits_of_generalization(monkeypatch, limit, most, rules):
    """There are two samples of a kind; samples beyond the limit are not generalized."""
    monkeypatch.setattr(infer_rules, limit, most)
    assert tuple(sorted(renames({"a.v": "b.v", "a.w": "b.w"}, []))) == rules


@pytest.mark.parametrize(("spared", "found"), [([], ("a.{x*}",)), (["b.u"], ("a.w", "a.v"))])
def test_patterns_for_too_many_kinds_are_the_keys(monkeypatch, spared, found):
    monkeypatch.setattr(infer_rules, "_MOST_KINDS", 2)
    assert patterns(["a.w", "a.v"], spared) == found


@pytest.mark.parametrize("most", [0, 4000])
def test_no_rules_for_a_name_that_looks_like_a_regular_expression(monkeypatch, most):
    """One of the individual renames would be read as a regular expression."""
    monkeypatch.setattr(infer_rules, "_TOO_MANY", most)
    left = {"re:a.b": "c.d", "x.y": "z.w"}
    left_section, right_section = (
        section_of({key: torch.zeros(2) for key in keys}) for keys in (left, left.values())
    )
    pairs = [Pair((old,), (new,), "said") for old, new in left.items()]
    assert suggest(pairs, {}, left_section, right_section) is None
    assert suggest(pairs[1:], {}, left_section, right_section) is not None


def test_exhausted_search_budget_is_reported(monkeypatch):
    left, right = (
        SideTensors(tuple(Tensor(f"{head}{n}.w", "float32", (2, n % 3 + 1)) for n in range(20)))
        for head in "ab"
    )
    assert "not looked for" not in str(infer(left, right))
    monkeypatch.setattr(pairing, "_MOST", 100)
    monkeypatch.setattr(pairing, "_MOST_EACH", 0)
    (ambiguous,) = infer(left, right).ambiguous
    assert ambiguous.reason == "not looked for further among 20 and 20 tensors: too many are alike"
    assert (len(ambiguous.left), len(ambiguous.right)) == (20, 20)
