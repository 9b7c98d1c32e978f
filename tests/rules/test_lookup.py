"""Lookups, and trials on kinds of keys, give the results of trying each pattern on each key."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpttool.fixes.rules_file import suggest
from ckpttool.live.model import section_of
from ckpttool.naming import pairing
from ckpttool.naming.evidence import Pair, Side, Tensor, groups
from ckpttool.naming.pairing import infer
from ckpttool.ruleset import infer_rules
from ckpttool.ruleset.infer_rules import drops, patterns, renames
from ckpttool.ruleset.patterns import InTurn, Naming, Rule, matches, parse

SEGMENT = st.sampled_from(["a", "b", "layers", "0", "1", "12", "*", "{n}", "re:a", "x[1]"])
KEYS = st.lists(st.lists(SEGMENT, min_size=1, max_size=4).map(".".join), min_size=1, max_size=8, unique=True)
TEXTS = ["a.b", "a.{x*}", "{x}.b", "0", "re:a.*", "*", "layers.{n}.{x*}", "{x*}.1", "a", "a.b.0"]


def rename(keys: Iterable[str], rules: Sequence[Rule]) -> dict[str, str]:
    first = InTurn(rules).first
    return {key: first(key)[1] or key for key in keys}


@given(KEYS, KEYS)
def test_drops_match_their_keys_only(gone, kept):
    found = drops(gone, [key for key in kept if key not in gone])
    assert found is None or all(any(matches(text, key) for text in found) for key in gone)
    assert found is None or not any(matches(text, key) for text in found for key in kept if key not in gone)


@given(KEYS, st.lists(st.sampled_from(TEXTS), max_size=6))
def test_patterns_that_are_looked_up(keys, texts):
    for key in keys:
        assert set(Naming(texts).hits(key)) == {text for text in texts if matches(text, key)}


@given(KEYS, st.lists(st.sampled_from([text for text in TEXTS if text != "*"]), max_size=6))
def test_rules_that_are_looked_up(keys, texts):
    rules = [parse(f"{text} => new.{at}") for at, text in enumerate(texts)]
    for key in keys:
        names = [name for name in (rule.apply(key) for rule in rules) if name is not None]
        assert InTurn(rules).first(key)[1] == (names[0] if names else None)


@given(st.lists(st.lists(st.sampled_from("ab01"), min_size=1, max_size=4).map(".".join), min_size=1, unique=True))
def test_suggested_patterns_match_the_wanted_keys(keys):
    wanted, others = keys[::2], keys[1::2]
    texts = patterns(wanted, others)
    assert [key for key in keys if any(matches(text, key) for text in texts)] == [k for k in keys if k in wanted]


@given(KEYS, st.integers(0, 3), st.data())
def test_groups_without_some_tensors(keys, depth, data):
    tensors = {key: Tensor(key, "float32", (2,)) for key in keys}
    stay = data.draw(st.sets(st.sampled_from(keys)))
    left = {key: tensor for key, tensor in tensors.items() if key in stay}
    found = [part.among(left) for one in groups(tensors.values()) for part in one.at_depth(depth)]
    wanted = [part for one in groups(left.values()) for part in one.at_depth(depth)]
    assert {(one.template, *one.members) for one in filter(None, found)} == {(w.template, *w.members) for w in wanted}
    assert {m.key for one in wanted for m in one.members.values()} == {
        key for key in left if sum(part.isdecimal() for part in key.split(".")) >= depth
    }


def test_names_of_too_many_kinds_are_renamed_one_by_one():
    wanted = {f"a{n}.w": f"b{n * 7919 % 10007}.w" for n in range(9000)}
    assert rename(wanted, [parse(text) for text in renames(wanted, [])]) == wanted


def test_a_rule_with_an_exception_explains_more_than_two_rules() -> None:
    wanted = {"a.c.b": "x.a.c.b", "c": "x.c", "a.a.a": "a.a.a.z", "a": "x.a"}
    assert renames(wanted, []) == ("a.a.a => a.a.a.z", "{x*} => x.{x*}")


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(
        st.lists(st.sampled_from(["a", "b", "layers", "0", "1", "2"]), min_size=1, max_size=6).map(tuple),
        st.tuples(st.integers(0, 3), st.sampled_from(["a", "x", "0", "1"]), st.booleans()),
        min_size=1,
        max_size=12,
    ),
    st.sampled_from([0, 2, 400]),
)
def test_suggested_renames_give_the_wanted_names(changes, kinds):
    """Segments that are exchanged, put in or left alone, at any place; however many kinds are generalised."""
    names: dict[str, str] = {}
    for parts, (at, segment, put_in) in changes.items():
        new = (*parts[:at], segment, *parts[at if put_in else at + 1 :]) if at < len(parts) else parts
        if ".".join(new) not in names.values():
            names[".".join(parts)] = ".".join(new)
    wanted = {old: new for old, new in names.items() if old != new}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(infer_rules, "_MOST_KINDS", kinds)
        assert rename(names, [parse(text) for text in renames(wanted, names.keys() - wanted)]) == names


def test_layers_with_another_first_number_are_renamed_one_by_one():
    wanted = {f"a.{n}.{m}.w": f"b.{n}.{m + 1}.w" for n in range(2) for m in range(3)}
    rules = renames(wanted, [])
    assert sorted(rules) == [f"a.{{n}}.{m}.w => b.{{n}}.{m + 1}.w" for m in range(3)]


def test_a_redundant_rule_is_left_out():
    """The one that is found first explains most, and those after it explain all of that too."""
    wanted = {f"{way}.s.{end}": f"{way}.t.{end}" for way in "abc" for end in ("q", f"of_{way}_alone")}
    assert sorted(renames(wanted, ["z.s.u"])) == [f"{way}.s.{{x*}} => {way}.t.{{x*}}" for way in "abc"]


@pytest.mark.parametrize(
    ("limit", "most", "rules"),
    [
        ("_TOO_MANY", 1, ("a.{x*} => b.{x*}",)),
        ("_TOO_MANY", 0, ("a.v => b.v", "a.w => b.w")),
        ("_MOST_KINDS", 1, ("a.{x*} => b.{x*}",)),
        ("_MOST_KINDS", 0, ("a.v => b.v", "a.w => b.w")),
    ],
)
def test_limits_of_generalisation(monkeypatch, limit, most, rules):
    """Two samples of a kind: as many as the limit has are generalised."""
    monkeypatch.setattr(infer_rules, limit, most)
    assert tuple(sorted(renames({"a.v": "b.v", "a.w": "b.w"}, []))) == rules


@pytest.mark.parametrize(("spared", "found"), [([], ("a.{x*}",)), (["b.u"], ("a.w", "a.v"))])
def test_patterns_for_many_kinds_are_the_keys_themselves(monkeypatch, spared, found):
    monkeypatch.setattr(infer_rules, "_MOST_KINDS", 2)
    assert patterns(["a.w", "a.v"], spared) == found


@pytest.mark.parametrize("most", [0, 4000])
def test_no_rules_for_a_name_that_reads_like_a_regular_expression(monkeypatch, most):
    """Renames one by one, of which one means another key than it is written for."""
    monkeypatch.setattr(infer_rules, "_TOO_MANY", most)
    left = {"re:a.b": "c.d", "x.y": "z.w"}
    mine, theirs = (section_of({key: torch.zeros(2) for key in keys}) for keys in (left, left.values()))
    pairs = [Pair((old,), (new,), "said") for old, new in left.items()]
    assert suggest(pairs, {}, mine, theirs) is None
    assert suggest(pairs[1:], {}, mine, theirs) is not None


def test_a_search_beyond_its_budget_says_so(monkeypatch):
    left, right = (Side(tuple(Tensor(f"{head}{n}.w", "float32", (2, n % 3 + 1)) for n in range(20))) for head in "ab")
    assert "not looked for" not in str(infer(left, right))
    monkeypatch.setattr(pairing, "_MOST", 100)
    monkeypatch.setattr(pairing, "_MOST_EACH", 0)
    (told,) = infer(left, right).ambiguous
    assert told.reason == "not looked for further among 20 and 20 tensors: too many are alike"
    assert (len(told.left), len(told.right)) == (20, 20)
